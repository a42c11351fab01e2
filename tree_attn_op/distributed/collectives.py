"""Exchange of per-token rows between ranks that hold different numbers of them.

Functional collectives, so that they are traced by torch.compile. What is started runs beside other
work until it is waited for. Collectives want equal shares: the rows of a rank are padded to the
longest shard. Two index tensors say how padded shards, one after another, and the sequence relate:

- ``places``, int64 ``[S]``: the padded row of each token;
- ``tokens``, int64 ``[world_size * longest]``: the token of each padded row, any for padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """A process group as functional collectives name it.

    Attributes:
        rank: this rank in it.
        size: number of ranks.
        name: of the process group.
    """

    rank: int
    size: int
    name: str


def wait(pending: Tensor) -> Tensor:
    """The result of a collective, once it is there."""
    return torch.ops._c10d_functional.wait_tensor(pending)


def padded(tensor: Tensor, dim: int, longest: int) -> Tensor:
    """A rank's part of a tensor with zeros behind it in the dimension of the tokens."""
    length, shape = tensor.shape[dim], list(tensor.shape)
    if torch.compiler.is_compiling():
        # To ask whether anything is missing, or to make a tensor of what is, would cost a graph
        # for ranks that pad and one for those that do not; so would strides that depend on the
        # longest shard, which are compared with the tensor's. A compiler fuses this with its use.
        del shape[dim]
        zeros = tensor.new_zeros([longest, *shape]).movedim(0, dim)
        return torch.slice_scatter(zeros, tensor, dim, 0, length)
    if length == longest:
        return tensor
    shape[dim] = longest - length
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def start_gather(rows: Tensor, group: Group) -> Tensor:
    """Begin to collect all ranks' padded rows ``[longest, *]``, one shard after another."""
    return torch.ops._c10d_functional.all_gather_into_tensor(
        rows.contiguous(), group.size, group.name
    )


def in_order(gathered: Tensor, places: Tensor) -> Tensor:
    """Gathered rows in the order of the sequence, ``[S, *]``."""
    return gathered.index_select(0, places)


def start_reduce_scatter(rows: Tensor, tokens: Tensor, group: Group) -> Tensor:
    """Begin to sum all ranks' rows ``[S, *]`` and to bring each sum to the rank of its token.

    The result is this rank's padded shard, whose padding has no meaning.
    """
    return torch.ops._c10d_functional.reduce_scatter_tensor(
        rows.index_select(0, tokens), "sum", group.size, group.name
    )


def gather_equal(tensor: Tensor, group: Group) -> Tensor:
    """Tensors of one shape from all ranks, stacked: ``[size, *]``."""
    return wait(
        torch.ops._c10d_functional.all_gather_into_tensor(
            tensor.unsqueeze(0), group.size, group.name
        )
    )
