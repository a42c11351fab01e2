"""Finds ranks that were given different things, before a collective hangs or mixes them up.

Each rank sends one fixed-size vector of integers, so that the exchange itself cannot fail for what
it is there to find. ``TREE_ATTN_CHECK_RANKS`` in the environment says what is compared: unset, the
masks as they are sharded, which is once a batch; ``1``, every uncompiled call that exchanges
anything as well, which makes each wait for the device; ``0``, nothing.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..mask import TreeMask
from .balance import TreeLoadBalancer
from .collectives import Group, gather_equal

VARIABLE = "TREE_ATTN_CHECK_RANKS"
"""Environment variable that says what is compared between ranks."""

_SETTINGS = {"": (True, False), "0": (False, False), "1": (True, True)}

_SLOTS = 24
"""Integers that a rank sends: the name of the check, then one for each field."""

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_NO_DTYPE = -1

Fields = Mapping[str, "int | bytes | Tensor"]
"""What is compared, by the name that errors give it: bytes and tensors are equal or not."""


class RankMismatchError(RuntimeError):
    """Ranks of one mesh dimension were given masks, lengths or dtypes that do not fit together."""


def checks_masks(asked: bool | None = None) -> bool:
    """Whether masks are compared: as asked for, else as the environment says."""
    return _setting()[0] if asked is None else asked


def checks_calls(asked: bool | None = None) -> bool:
    """Whether attention calls are compared: as asked for, else as the environment says."""
    return _setting()[1] if asked is None else asked


def _setting() -> tuple[bool, bool]:
    given = os.environ.get(VARIABLE, "")
    if given not in _SETTINGS:
        raise ValueError(f"{VARIABLE} must be 0, 1 or unset, got {given!r}")
    return _SETTINGS[given]


def mask_fields(mask: TreeMask) -> Fields:
    """All that makes two whole masks equal, without waiting for the device."""
    lists = mask.lists
    return {
        "the number of queries": mask.q_len,
        "the number of keys": mask.kv_len,
        "the batch size": mask.shape[0],
        "the heads of the block lists": mask.shape[1],
        "the query block size": lists.q_block_size,
        "the key block size": lists.kv_block_size,
        "the dtype of the values": _dtype_number(mask.q_vals.dtype),
        "the predicate": str(mask.predicate).encode(),
        "q_vals": _checksum(mask.q_vals),
        "k_vals": _checksum(mask.k_vals),
        "the partial blocks": _lists_checksum(lists.kv_num_blocks, lists.kv_indices),
        "the full blocks": _lists_checksum(lists.full_kv_num_blocks, lists.full_kv_indices),
    }


def check_masks(
    fields: Fields,
    load_balancer: TreeLoadBalancer | None,
    device: torch.device,
    group: Group,
) -> None:
    """Compare a whole mask and its partition, where one is given, with those of the other ranks.

    Args:
        fields: of :func:`mask_fields`.
        load_balancer: the partition, None: each rank makes it of the mask.
        device: of the mask.
        group: of the mesh dimension.

    Raises:
        RankMismatchError: on every rank, if any two differ; the message says in what.
    """
    plan = b"" if load_balancer is None else load_balancer.identity
    _compare("sharding a mask", {**fields, "the load balancer": plan}, device, group)


def fingerprint(fields: Fields, load_balancer: TreeLoadBalancer, device: torch.device) -> Tensor:
    """An int64 scalar that tells whole masks and their partitions apart.

    Args:
        fields: of :func:`mask_fields`.
        load_balancer: the partition.
        device: of the mask and of the result.
    """
    return _checksum(_stacked([*fields.values(), load_balancer.identity], device))


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    lengths: Sequence[int],
    scale: float,
    options: Sequence[object],
    group: Group,
) -> None:
    """Compare the operands of an attention call with those of the other ranks.

    Args:
        query, key, value: this rank's, as they were given: autocast comes later.
        mask: of :func:`fingerprint`; None: not known.
        lengths: tokens that each rank should have.
        scale: factor of the scores.
        options: what else must be the same.
        group: of the mesh dimension.

    Raises:
        RankMismatchError: on every rank, if any two differ or a length is not as it should be.
    """
    operands = {"query": query, "key": key, "value": value}
    lengths_here = {f"the length of {name}": x.shape[2] for name, x in operands.items()}
    fields: dict[str, int | bytes | Tensor] = {**lengths_here}
    fields["the mask or its load balancer"] = b"" if mask is None else mask.to(query.device)
    for name, x in operands.items():
        fields[f"the dtype of {name}"] = _dtype_number(x.dtype)
        fields[f"the head dim of {name}"] = x.shape[3]
        fields[f"whether {name} requires gradients"] = int(
            x.requires_grad and torch.is_grad_enabled()
        )
    kind = query.device.type
    autocast = torch.is_autocast_enabled(kind)
    fields["the dtype of autocast"] = (
        _dtype_number(torch.get_autocast_dtype(kind)) if autocast else _NO_DTYPE
    )
    fields["the batch size"] = query.shape[0]
    fields["the query heads"] = query.shape[1]
    fields["the key heads"] = key.shape[1]
    fields["the scale"] = struct.pack("<d", scale)
    fields["the options of the call"] = repr(tuple(options)).encode()
    expected = dict.fromkeys(lengths_here, tuple(lengths))
    _compare("context-parallel attention", fields, query.device, group, expected)


def check_unshard(
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: TreeLoadBalancer,
    device: torch.device,
    group: Group,
) -> None:
    """Compare the shards that are to be put together with those of the other ranks.

    Args:
        buffers, seq_dims: this rank's, one dimension for each.
        load_balancer: which rank holds which tokens.
        device: of the mesh.
        group: of the mesh dimension.

    Raises:
        RankMismatchError: on every rank, if any two do not fit or a length is not as it should be.
    """
    what = "putting shards together"
    number: Fields = {
        "the number of buffers": len(buffers),
        "the load balancer": load_balancer.identity,
    }
    _compare(what, number, device, group)
    # One at a time: a rank sends so many numbers at once, and there may be any number of buffers.
    for at, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        name, dim = f"buffers[{at}]", dim % buffer.dim()
        sizes = [*buffer.shape[:dim], *buffer.shape[dim + 1 :]]
        length = f"the length of {name}"
        fields: Fields = {
            length: buffer.shape[dim],
            f"the dtype of {name}": _dtype_number(buffer.dtype),
            f"the dimensions of {name}": buffer.dim(),
            f"the sequence dimension of {name}": dim,
            f"the other sizes of {name}": repr(sizes).encode(),
        }
        _compare(what, fields, device, group, {length: load_balancer.lengths})


def _compare(
    what: str,
    fields: Fields,
    device: torch.device,
    group: Group,
    expected: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Gather one number a field and compare; ``expected`` has those that differ by rank."""
    assert len(fields) < _SLOTS
    unused = [0] * (_SLOTS - 1 - len(fields))
    vector = _stacked([what.encode(), *fields.values(), *unused], device)
    by_field = gather_equal(vector, group).T.tolist()
    if len(set(by_field[0])) > 1:
        raise RankMismatchError(
            f"ranks of one context-parallel group meet in different calls: this one is {what}, "
            f"rank {_differing(by_field[0], group)} is not"
        )
    problems = []
    for (name, given), values in zip(fields.items(), by_field[1:], strict=False):
        wanted = None if expected is None else expected.get(name)
        if wanted is not None and values != list(wanted):
            problems.append(f"{name} should be {list(wanted)} by rank and is {values}")
        elif wanted is None and len(set(values)) > 1:
            if isinstance(given, int):
                shown = _named(name, values)
                problems.append(f"{name} is {shown} by rank")
            else:
                problems.append(f"{name} differs from rank 0's on rank {_unlike_first(values)}")
    if problems:
        raise RankMismatchError(
            f"{what}: the ranks of the context-parallel group disagree. {'; '.join(problems)}. "
            "All ranks need the same mask and the same call"
        )


def _named(name: str, values: Sequence[int]) -> list[object]:
    if "dtype" not in name:
        return list(values)
    names = {_dtype_number(dtype): str(dtype).removeprefix("torch.") for dtype in _DTYPES}
    names[_NO_DTYPE] = "none"
    return [names.get(value, "another") for value in values]


def _dtype_number(dtype: torch.dtype) -> int:
    # A number below 0 for all others, which differ from each other too.
    return _DTYPES.index(dtype) if dtype in _DTYPES else _number(str(dtype).encode()) | -(2**63)


def _unlike_first(values: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != values[0])


def _differing(values: Sequence[int], group: Group) -> str:
    own = values[group.rank]
    return ", ".join(str(rank) for rank, value in enumerate(values) if value != own)


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)


def _stacked(values: Iterable[int | bytes | Tensor], device: torch.device) -> Tensor:
    """One int64 for each value."""
    numbers = [_number(one) if isinstance(one, bytes) else one for one in values]
    return torch.stack(
        [one if isinstance(one, Tensor) else torch.tensor(one, device=device) for one in numbers]
    )


def _checksum(values: Tensor) -> Tensor:
    """An int64 that depends on all values, their places and the shape; wraps."""
    flat = values.reshape(-1).long()
    place = torch.arange(1, flat.numel() + 1, device=flat.device)
    # Odd multipliers (those of SplitMix64, as int64) and a shift, so that values far apart mix.
    mixed = (flat ^ (place * -7046029254386353131)) * -4658895280553007687
    mixed = mixed ^ (mixed >> 31)
    return (mixed * -7723592293110705685).sum() + _number(repr(tuple(values.shape)).encode())


def _lists_checksum(number: Tensor | None, indices: Tensor | None) -> Tensor | int:
    if number is None or indices is None:
        return 0
    rank = torch.arange(indices.shape[-1], device=indices.device)
    # What stands behind the count has no meaning and may differ.
    return _checksum(torch.where(rank < number.unsqueeze(-1), indices, -1))
