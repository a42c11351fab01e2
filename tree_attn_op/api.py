"""The public call: tree attention with a TreeMask, in the style of flex_attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from . import validation
from .arguments import check_number, check_type
from .mask import TreeMask, finest_common

CPU_LIST_BLOCK = 64
"""Blocks of lists that the CPU implementation works with."""


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention in which each query sees the keys that ``mask`` lets it see.

    Equal to ``flex_attention(query, key, value, block_mask=mask.block_mask, ...)``. Differentiable
    once in query, key and value, on CPU too; works under ``torch.compile(fullgraph=True)`` and
    ``torch.autocast``.

    Args:
        query: ``[B, Hq, Q, D]``; bfloat16, float16 or float32 (on CPU also float64), any strides.
        key: ``[B, Hkv, K, D]``.
        value: ``[B, Hkv, K, Dv]``. D and Dv are 1 to 256.
        mask: for lengths Q and K, of batch 1 or B.
        scale: factor of the scores; None: ``D ** -0.5``.
        enable_gqa: let groups of Hq / Hkv query heads share a key head.
        return_aux: ``AuxRequest(lse=True)`` to return the log-sum-exp of the scores as well.

    Returns:
        ``out [B, Hq, Q, Dv]``; with ``return_aux`` the pair ``(out, AuxOutput)``, whose ``lse`` is
        ``[B, Hq, Q]``, base e, float32 (float64 for float64) and differentiable. A query that sees
        nothing has out 0, lse -inf and gradients 0.

    Raises:
        TypeError: an argument of the wrong type, or dtypes that differ or are not supported.
        ValueError: sizes, devices, head counts or lengths that do not fit each other.
    """
    if not isinstance(mask, TreeMask):
        raise TypeError(f"mask must be a TreeMask, got {type(mask).__name__}")
    validation.check_ranks_and_devices(query, key, value)
    if not torch.is_autocast_enabled(query.device.type):
        validation.check_operands(query, key, value)
    check_options(query, key, enable_gqa, return_aux)
    if (query.shape[2], key.shape[2]) != (mask.q_len, mask.kv_len):
        raise ValueError(
            f"the mask was built for lengths {mask.q_len} (query) and {mask.kv_len} (key), got "
            f"{query.shape[2]} and {key.shape[2]}"
        )
    if mask.device != query.device:
        raise ValueError(
            f"the mask is on {mask.device} and query on {query.device}: use mask.to(...)"
        )
    scale = query.shape[3] ** -0.5 if scale is None else check_number("scale", scale)
    lists = mask.block_lists_for(*list_blocks(query, key, value, mask))
    out, lse = torch.ops.tree_attn_op.tree_attention(
        query,
        key,
        value,
        mask.q_vals,
        mask.k_vals,
        str(mask.predicate),
        *lists.tensors,
        lists.q_block_size,
        lists.kv_block_size,
        scale,
    )
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse if return_aux.lse else None)


def check_options(
    query: Tensor, key: Tensor, enable_gqa: bool, return_aux: AuxRequest | None
) -> None:
    """Check ``enable_gqa`` and ``return_aux``.

    Raises:
        TypeError, ValueError: what is asked for is not supported.
    """
    if return_aux is not None:
        if not isinstance(return_aux, AuxRequest):
            raise TypeError(f"return_aux must be an AuxRequest, got {type(return_aux).__name__}")
        if return_aux.max_scores:
            raise ValueError(
                "return_aux supports lse only, got max_scores=True: flex_attention computes those"
            )
    check_type("enable_gqa", enable_gqa, bool, "a bool")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True "
            "to let groups of query heads share a key head"
        )


def list_blocks(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> tuple[int, int]:
    """Block sizes of the lists that serve the device best, as fine as the mask allows."""
    if query.device.type == "cpu":
        wanted = (CPU_LIST_BLOCK, CPU_LIST_BLOCK)
    else:
        # Not at the top: it is of no use without a GPU.
        from .kernels.choice import preferred_list_blocks

        group = query.shape[1] // key.shape[1]
        wanted = preferred_list_blocks(
            query.device, query.dtype, query.shape[3], value.shape[3], group
        )
    own = mask.lists
    return (
        finest_common(own.q_block_size, wanted[0]),
        finest_common(own.kv_block_size, wanted[1]),
    )
