"""Checks of what is wrong on one rank as on all: types, sizes and options of the public calls.

They come before ranks are compared and before any exchange, in which the other ranks would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..api import check_options
from ..arguments import check_int, check_tensor, check_type
from ..mask import TreeMask
from ..tree import LossTerms
from .balance import TreeLoadBalancer
from .collectives import Group

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest

    from .context_parallel import ContextParallelMask


def group_of(mesh: DeviceMesh) -> Group:
    """The ranks of a mesh of one dimension.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has more dimensions; the message says how to take one.
    """
    check_type("mesh", mesh, DeviceMesh, "a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(
            f"context parallelism is over one mesh dimension, got a mesh of {mesh.ndim} "
            f"({mesh.mesh_dim_names}): pass mesh[name]"
        )
    group = mesh.get_group()
    return Group(group.rank(), group.size(), group.group_name)


def check_partition(load_balancer: TreeLoadBalancer, world_size: int) -> None:
    """Check that a load balancer is for so many ranks.

    Raises:
        TypeError, ValueError: it is none, or for another number.
    """
    check_type("load_balancer", load_balancer, TreeLoadBalancer, "a TreeLoadBalancer")
    if load_balancer.world_size != world_size:
        raise ValueError(
            f"the load balancer is for {load_balancer.world_size} ranks, the mesh has {world_size}"
        )


def check_optional_bool(name: str, value: object) -> None:
    """Check that a value is a bool or None.

    Raises:
        TypeError: it is neither.
    """
    check_type(name, value, (bool, type(None)), "a bool or None")


def check_buffers(buffers: Sequence[Any], seq_dims: Sequence[int], masks: bool) -> None:
    """Check per-token tensors and the dimensions that are their sequence.

    Args:
        buffers, seq_dims: one dimension for each tensor.
        masks: TreeMasks are taken too; their dimension is not looked at.

    Raises:
        TypeError: no sequences, a DTensor or what is no tensor.
        ValueError: another number of dimensions, or one that a tensor has not.
    """
    kinds = "Tensors and TreeMasks" if masks else "Tensors"
    check_type("buffers", buffers, Sequence, f"a sequence of {kinds}")
    check_type("seq_dims", seq_dims, Sequence, "a sequence of ints")
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"seq_dims must have one dimension for each of {len(buffers)} buffers, got "
            f"{len(seq_dims)}"
        )
    for at, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if masks and isinstance(buffer, TreeMask):
            continue
        name = f"buffers[{at}]"
        check_type(name, buffer, Tensor, "a Tensor or a TreeMask" if masks else "a Tensor")
        check_local(name, buffer)
        check_tensor(name, buffer)
        check_int(f"seq_dims[{at}]", dim)
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"seq_dims[{at}] must be a dimension of {name}, of shape {tuple(buffer.shape)}, "
                f"got {dim}"
            )


def check_lengths(
    buffers: Sequence[Any], seq_dims: Sequence[int], length: int, holder: str
) -> None:
    """Check that per-token tensors have so many tokens. Masks are not looked at.

    Args:
        buffers, seq_dims: of :func:`check_buffers`.
        length: tokens that each has.
        holder: what has so many tokens, for the error.

    Raises:
        ValueError: another length.
    """
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        if not isinstance(buffer, TreeMask) and buffer.shape[dim] != length:
            raise ValueError(
                f"a buffer of shape {tuple(buffer.shape)} has {buffer.shape[dim]} tokens in "
                f"dimension {dim}, {holder} {length}"
            )


def check_loss_terms(terms: LossTerms, length: int) -> None:
    """Check that loss terms are of a tree of so many tokens.

    Terms that were made without the number of tokens are only refused if they name a token that
    is not there.

    Raises:
        ValueError: they are of another tree.
    """
    given = terms.num_tokens
    if given is not None and given != length:
        raise ValueError(
            f"terms must be of the tree that the mask was made for, of {length} tokens, got "
            f"those of {given}"
        )
    places = (terms.source, terms.token)
    if given is None and any(bool(((one < 0) | (one >= length)).any()) for one in places):
        raise ValueError(f"terms must be of {length} tokens as the mask is, got a place beyond")


def check_local(name: str, tensor: object) -> None:
    """Check that a tensor is not distributed: shards of tokens are plain tensors.

    Raises:
        TypeError: it is a DTensor.
    """
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"{name} must be this rank's plain Tensor, got a DTensor: pass {name}.to_local()"
        )


def check_exchange(
    num_chunks: int, reshard_after_forward: bool, reduce_dtype: torch.dtype | None
) -> None:
    """Check how keys, values and gradients shall be exchanged.

    Raises:
        TypeError: an option of another type.
    """
    check_int("num_chunks", num_chunks)
    check_type("reshard_after_forward", reshard_after_forward, bool, "a bool")
    if reduce_dtype is None:
        return
    kind = "a floating-point torch.dtype or None"
    check_type("reduce_dtype", reduce_dtype, torch.dtype, kind)
    if not reduce_dtype.is_floating_point:
        raise TypeError(f"reduce_dtype must be {kind}, got {reduce_dtype}")


def check_call(
    query: Tensor,
    key: Tensor,
    mask: ContextParallelMask,
    enable_gqa: bool,
    return_aux: AuxRequest | None,
    num_chunks: int,
) -> None:
    """Check that operands fit this rank's mask and the options.

    Raises:
        TypeError, ValueError: they do not.
    """
    length = mask.local.q_len
    if query.shape[2] != length or key.shape[2] != length:
        raise ValueError(
            f"rank {mask.group.rank} holds {length} tokens of this mask, got query and key of "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    if mask.device != query.device:
        raise ValueError(f"the mask is on {mask.device} and query on {query.device}")
    check_options(query, key, enable_gqa, return_aux)
    if num_chunks < 1 or key.shape[1] % num_chunks:
        raise ValueError(
            f"num_chunks must divide the number of key heads {key.shape[1]}, got {num_chunks}"
        )
