"""Block lists from a predicate, on the device: two small launches, no host synchronisation.

What the launches do: ``block_list_kernels.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tree_attn_op.kernels.launching import Launch, Output
from tree_attn_op.kernels.plans import Plan, copies, with_copies
from tree_attn_op.kernels.portable.block_list_kernels import list_tiles, prepare_tiles
from tree_attn_op.predicate import Predicate

_CHUNK = 1024
"""Most tiles, or tokens of a tile, that one program looks at at a time."""


class BlockListsPlan:
    """A call of the op ``block_lists`` that is decided: see :func:`block_lists`.

    Given lists must be dense.
    """

    substitute = None

    def __init__(
        self,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: Predicate,
        q_len: int,
        kv_len: int,
        kv_num_blocks: Tensor | None,
        kv_indices: Tensor | None,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_block_size: int,
        kv_block_size: int,
        new_q_block_size: int,
        new_kv_block_size: int,
        full_at_ends: bool,
        batch: int,
        heads: int,
    ):
        device = q_vals.device
        num_q = _cdiv(q_len, new_q_block_size)
        num_k = _cdiv(kv_len, new_kv_block_size)
        q_batch, q_rows, _ = q_vals.shape
        k_batch, k_rows, _ = k_vals.shape
        batch = max(batch, q_batch, k_batch)
        coarse: dict[str, Any] = {
            "num_columns": 0, "width": 0, "full_width": 0, "HAS_COARSE": False, "HAS_FULL": False,
            "CHUNK": 1,
        }  # fmt: skip
        coarse_rows, coarse_batch = 0, 0
        if kv_num_blocks is not None and kv_indices is not None:
            coarse_batch, heads, rows = kv_num_blocks.shape
            batch = max(batch, coarse_batch)
            coarse_rows = coarse_batch * heads * rows
            columns = _cdiv(kv_len, kv_block_size)
            full = kv_indices if full_kv_indices is None else full_kv_indices
            coarse = {
                "num_columns": columns, "width": kv_indices.shape[-1],
                "full_width": full.shape[-1], "HAS_COARSE": True,
                "HAS_FULL": full_kv_indices is not None,
                "CHUNK": min(_CHUNK, _power_of_2(columns)),
            }  # fmt: skip

        shapes = (
            *((batch, heads, num_q), (batch, heads, num_q, num_k)) * 2,
            *((batch, heads, num_k), (batch, heads, num_k, num_q)) * 2,
        )
        self._lists = [Output.dense(shape, torch.int32, device) for shape in shapes]
        q_items, k_items = q_batch * q_rows * num_q, k_batch * k_rows * num_k
        coarse_at = 2 * (q_items + k_items)
        states = _cdiv(coarse_rows * coarse["num_columns"], 8)
        self._bounds = Output.dense((coarse_at + states,), torch.int64, device)
        strides = zip(
            ("q_stride_batch", "q_stride_row", "q_stride_token",
             "k_stride_batch", "k_stride_row", "k_stride_token"),
            (*q_vals.stride(), *k_vals.stride()),
            strict=True,
        )  # fmt: skip
        common = {
            "q_len": q_len, "kv_len": kv_len, "Q_ROWS": q_rows, "K_ROWS": k_rows,
            "Q_TILE": new_q_block_size, "K_TILE": new_kv_block_size,
        }  # fmt: skip
        self._prepare = Launch(
            prepare_tiles,
            (q_items + k_items + coarse_rows,),
            (),
            {
                **common, **coarse, **dict(strides), "q_items": q_items, "k_items": k_items,
                "Q_LANES": min(_CHUNK, _power_of_2(new_q_block_size)),
                "K_LANES": min(_CHUNK, _power_of_2(new_kv_block_size)),
            },
            {},
        )  # fmt: skip
        longest = max(num_q, num_k)
        self._list = Launch(
            list_tiles,
            (num_q + num_k, heads, batch),
            (),
            {
                **common, "coarse_at": coarse_at, "P": predicate.program,
                "WRAPS_AT_32": q_vals.dtype is torch.int32, "Q_BATCHED": q_batch > 1,
                "K_BATCHED": k_batch > 1, "Q_RATIO": q_block_size // new_q_block_size,
                "K_RATIO": kv_block_size // new_kv_block_size, "HAS_COARSE": coarse_batch > 0,
                "COARSE_BATCHED": coarse_batch > 1, "FULL_AT_ENDS": full_at_ends,
                "CHUNK": min(_CHUNK, max(16, _power_of_2(longest))),
                "ONE_CHUNK": longest <= _CHUNK,
            },
            {},
        )  # fmt: skip

    def __call__(
        self,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: object,
        q_len: int,
        kv_len: int,
        counts: Tensor | None,
        indices: Tensor | None,
        full_counts: Tensor | None,
        full_indices: Tensor | None,
        *planned: object,
    ) -> tuple[Tensor, ...]:
        lists = tuple([new() for new in self._lists])
        bounds = self._bounds()
        if counts is None or indices is None:
            counts = indices = bounds  # not read
        if full_counts is None or full_indices is None:
            full_counts, full_indices = counts, indices  # not read
        self._prepare(q_vals, k_vals, counts, indices, full_counts, full_indices, bounds)
        self._list(bounds, *lists)
        return lists


def _copies(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Places of the arguments that kernels can only read as dense copies."""
    lists = [at for at in range(5, 9) if arguments[at] is not None]
    return tuple(at for at in lists if not arguments[at].is_contiguous())


def plan_block_lists(*arguments: Any, batch: int = 1, heads: int = 1) -> Plan:
    """What is to be done for a call of the op ``block_lists``, given all its arguments.

    The predicate is parsed; ``batch`` and ``heads`` are as in :func:`block_lists`.
    """
    places = _copies(arguments)
    return copies(places) if places else BlockListsPlan(*(*arguments, batch, heads))


def block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: Predicate,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    *,
    batch: int = 1,
    heads: int = 1,
    full_at_ends: bool = True,
) -> tuple[Tensor, ...]:
    """The op ``tree_attn_op::block_lists`` for a GPU; see DESIGN.md for arguments and results.

    Lengths and the batch are at least 1.

    Args:
        batch, heads: of the lists, where neither values nor given lists have more.
        full_at_ends: whether a tile that runs over an end may be listed as full. It means the
            same; flex's builder lists it as partial.
    """
    arguments: tuple[Any, ...] = (
        *(q_vals, k_vals, predicate, q_len, kv_len),
        *(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices),
        *(q_block_size, kv_block_size, new_q_block_size, new_kv_block_size, full_at_ends),
    )
    arguments = with_copies(arguments, _copies(arguments))
    return BlockListsPlan(*(*arguments, batch, heads))(*arguments)


def _cdiv(length: int, block: int) -> int:
    return (length + block - 1) // block


def _power_of_2(size: int) -> int:
    """The least power of 2 that is no less than ``size``, which is at least 1."""
    return 1 << (size - 1).bit_length()
