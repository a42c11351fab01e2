"""Checks of the ops' arguments, before any kernel runs. Each error names what was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import check_int, check_tensor
from .blocks import cdiv
from .predicate import Predicate

MAX_HEAD_DIM = 256
BLOCK_MULTIPLE = 16

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CPU_DTYPES = (*_GPU_DTYPES, torch.float64)
_LIST_NAMES = ("kv", "full_kv", "q", "full_q")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_ranks_and_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that query, key and value are tensors of four dimensions on one device.

    Raises:
        TypeError: one is no tensor.
        ValueError: one has another rank or lies elsewhere.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must be [batch, heads, length, head_dim], got shape {tuple(tensor.shape)}"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got query on {query.device} and "
                f"{name} on {tensor.device}"
            )


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check ranks, dtypes, devices and sizes of query, key and value.

    Raises:
        ValueError: they are no ``[B, Hq, Q, D]``, ``[B, Hkv, K, D]``, ``[B, Hkv, K, Dv]``.
        TypeError: their dtypes differ or are not supported on their device.
    """
    check_ranks_and_devices(query, key, value)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "query, key and value must have one dtype, got "
            f"{_names([query.dtype, key.dtype, value.dtype])}; cast them, or call under "
            "torch.autocast"
        )
    accepted = _CPU_DTYPES if query.device.type == "cpu" else _GPU_DTYPES
    if query.dtype not in accepted:
        raise TypeError(
            f"query, key and value must be {_names(accepted)} on {query.device.type}, got "
            f"{_names([query.dtype])}"
        )
    if not (query.shape[0] == key.shape[0] == value.shape[0]):
        raise ValueError(
            f"query, key and value must have one batch size, got {query.shape[0]}, "
            f"{key.shape[0]} and {value.shape[0]}"
        )
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            "key and value must agree in heads and length, got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must have one head dim, got {query.shape[3]} and {key.shape[3]}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            "the number of key heads must divide that of query heads, got "
            f"{query.shape[1]} query heads and {key.shape[1]} key heads"
        )
    for name, width in (("query and key", query.shape[3]), ("value", value.shape[3])):
        if not 1 <= width <= MAX_HEAD_DIM:
            raise ValueError(f"head dim of {name} must be 1 to {MAX_HEAD_DIM}, got {width}")


def check_scale(scale: float) -> None:
    """Check that the scale is a finite number."""
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")


def check_block_size(name: str, size: int) -> None:
    """Check that a block size is a positive multiple of 16."""
    if size < BLOCK_MULTIPLE or size % BLOCK_MULTIPLE:
        raise ValueError(f"{name} must be a positive multiple of {BLOCK_MULTIPLE}, got {size}")


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The block sizes of queries and of keys that a ``BLOCK_SIZE`` argument gives.

    Raises:
        TypeError: it is neither an int nor two.
        ValueError: a size that is not positive.
    """
    sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or not all(map(_is_int, sizes)):
        raise TypeError(f"BLOCK_SIZE must be an int or a pair of ints, got {block_size!r}")
    q_block_size, kv_block_size = sizes
    for size in sizes:
        check_int("BLOCK_SIZE", size, least=1)
    return q_block_size, kv_block_size


def check_counts(**counts: int) -> None:
    """Check that each named size is an int of at least 0.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.
    """
    for name, count in counts.items():
        check_int(name, count, least=0)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_values(
    predicate: str, q_vals: Tensor, k_vals: Tensor, q_len: int, kv_len: int, device: torch.device
) -> None:
    """Check the predicate's text and that the values fit it and the lengths.

    Raises:
        PredicateError: malformed text; missing rows; values that are not int32 or int64.
        ValueError: values of another length, batch or device.
    """
    for name, values in (("q_vals", q_vals), ("k_vals", k_vals)):
        check_tensor(name, values)
        if values.device != device:
            raise ValueError(f"{name} must be on {device}, got {values.device}")
    Predicate.parse(predicate).check_values(q_vals, k_vals)
    for name, values, length in (("q_vals", q_vals, q_len), ("k_vals", k_vals, kv_len)):
        if values.shape[2] != length:
            raise ValueError(
                f"{name} must have one value a token: the length is {length}, got "
                f"{values.shape[2]}"
            )
    batches = {q_vals.shape[0], k_vals.shape[0]} - {1}
    if len(batches) > 1:
        raise ValueError(
            "the batch sizes of q_vals and k_vals must be equal or 1, got "
            f"{q_vals.shape[0]} and {k_vals.shape[0]}"
        )


def check_lists(
    lists: Sequence[Tensor | None],
    q_len: int,
    kv_len: int,
    q_block_size: int,
    kv_block_size: int,
    device: torch.device,
) -> None:
    """Check two, four or eight block lists (in the op's order) against the lengths.

    Raises:
        TypeError: a list is not int32.
        ValueError: a list is of the wrong shape or device, or half of a pair is missing.
    """
    check_block_size("q_block_size", q_block_size)
    check_block_size("kv_block_size", kv_block_size)
    rows, columns = cdiv(q_len, q_block_size), cdiv(kv_len, kv_block_size)
    leading: torch.Size | None = None
    first = ""
    for at, prefix in zip(range(0, len(lists), 2), _LIST_NAMES, strict=False):
        number, indices = lists[at], lists[at + 1]
        num_name, name = f"{prefix}_num_blocks", f"{prefix}_indices"
        if number is None or indices is None:
            if number is not indices:
                missing, given = (num_name, name) if number is None else (name, num_name)
                raise ValueError(f"{missing} is missing, {given} is given")
            continue
        shape = (rows, columns) if "q" not in prefix else (columns, rows)
        for each, tensor, tail in ((num_name, number, shape[:1]), (name, indices, shape)):
            check_tensor(each, tensor)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{each} must be int32, got {_names([tensor.dtype])}")
            if tensor.device != device:
                raise ValueError(f"{each} must be on {device}, got {tensor.device}")
            if leading is None:
                leading, first = tensor.shape[:2], each
            if tensor.dim() != 2 + len(tail) or tensor.shape[2:] != tail:
                raise ValueError(
                    f"{each} must be [batch, heads, {', '.join(map(str, tail))}] for lengths "
                    f"{q_len} and {kv_len} in blocks of {q_block_size} and {kv_block_size}, got "
                    f"shape {tuple(tensor.shape)}: a mask built for other lengths?"
                )
            if tensor.shape[:2] != leading:
                raise ValueError(
                    f"all block lists must agree in batch and heads, got {tuple(leading)} of "
                    f"{first} and {tuple(tensor.shape[:2])} of {each}"
                )


def check_list_batch(q_vals: Tensor, k_vals: Tensor, kv_num_blocks: Tensor | None) -> None:
    """Check that block lists that are to be refined broadcast to the batch of the values."""
    batch = max(q_vals.shape[0], k_vals.shape[0])
    if kv_num_blocks is None or batch == 1 or kv_num_blocks.shape[0] in (1, batch):
        return
    raise ValueError(
        f"the batch size of kv_num_blocks must be 1 or {batch}, that of q_vals and k_vals; got "
        f"{kv_num_blocks.shape[0]}"
    )


def check_broadcast(
    batch: int, heads: int, q_vals: Tensor, k_vals: Tensor, kv_num_blocks: Tensor
) -> None:
    """Check that values and lists broadcast to the batch and the query heads."""
    for name, tensor in (
        ("q_vals", q_vals),
        ("k_vals", k_vals),
        ("kv_num_blocks", kv_num_blocks),
    ):
        if tensor.shape[0] not in (1, batch):
            raise ValueError(
                f"the batch size of {name} must be 1 or {batch}, that of query; got "
                f"{tensor.shape[0]}"
            )
    if kv_num_blocks.shape[1] not in (1, heads):
        raise ValueError(
            f"the block lists must have 1 or {heads} heads, as many as query; got "
            f"{kv_num_blocks.shape[1]}"
        )


def check_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Check the arguments that only the backward has."""
    out_shape = (*query.shape[:3], value.shape[3])
    for name, tensor, shape in (
        ("grad_out", grad_out, out_shape),
        ("out", out, out_shape),
        ("lse", lse, out_shape[:3]),
        ("grad_lse", grad_lse, out_shape[:3]),
    ):
        if tensor is None and name == "grad_lse":
            continue
        check_tensor(name, tensor)
        assert tensor is not None
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating, got {_names([tensor.dtype])}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on {query.device}, got {tensor.device}")


def check_fakes(name: str, *arguments: Any) -> None:
    """What fakes check of the arguments of the op ``name``: what needs no guard on a size.

    A meta tensor among others brings a call here too, whose result would be of no meaning.

    Raises:
        TypeError: what must be a tensor is none.
        ValueError: query, key or value has another rank, or a tensor lies elsewhere.
    """
    op = getattr(torch.ops.tree_attn_op, name)
    names = [argument.name for argument in op.default._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    for each in ("query", "q_vals", "k_vals"):
        if each in given:
            check_tensor(each, given[each])
    if "query" in given:
        check_ranks_and_devices(given["query"], given["key"], given["value"])
    device = given["query" if "query" in given else "q_vals"].device
    for each, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.device != device:
            raise ValueError(f"{each} must be on {device}, got {tensor.device}")
