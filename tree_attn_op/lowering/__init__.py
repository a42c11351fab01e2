"""From a mask to a predicate and its values, or the reason why not.

:func:`lower` takes the mask graph of a flex_attention call, :func:`lower_mask_mod` a Python
mask_mod. Both walk the graph (``graph.py``) through an allow-list of operations
(``operations.py``) on values that know what they depend on (``values.py``, ``mixed.py``), turn
comparisons into a formula (``comparison.py``, ``formula.py``), and the formula into a predicate
with rows (``rows.py``). :func:`emit` and :func:`evaluate` compute the rows (``emission.py``).

Nothing is matched against known masks: what is supported follows from what the operations mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from ..errors import UnsupportedMask
from .emission import emit, evaluate
from .graph import formula_of_graph
from .rows import Lowered, ValueExpr, lowered_of
from .trace import trace_mask_mod
from .values import CapturedInfo, check_devices

__all__ = [
    "CapturedInfo",
    "Lowered",
    "UnsupportedMask",
    "ValueExpr",
    "emit",
    "evaluate",
    "lower",
    "lower_mask_mod",
]


def lower(
    mask: fx.GraphModule | fx.Graph,
    captured: Sequence[CapturedInfo],
    *,
    index_placeholders: int = 4,
    device: torch.device | None = None,
) -> Lowered:
    """Prove what a mask graph means.

    Args:
        mask: the mask subgraph of a flex_attention call, of either dialect (Python operators and
            torch functions, or aten). Its first placeholders are b, h, q, k, the others the
            captured operands in order.
        captured: what is known of each captured operand.
        index_placeholders: how many placeholders are indices: 4.
        device: where the values will be computed, to check the captured tensors' against.

    Raises:
        UnsupportedMask: the mask is no separable predicate, or uses what is not supported.
        ValueError: the graph does not have these placeholders.
    """
    return _lower(mask, captured, index_placeholders, device, check_dtypes=False)


def lower_mask_mod(
    mask_mod: Callable[..., Tensor], device: torch.device | str
) -> tuple[Lowered, list[Tensor]]:
    """Prove what a Python ``mask_mod(b, h, q_idx, kv_idx)`` means.

    Captured Python numbers become part of the mask; captured tensors stay operands.

    Args:
        mask_mod: any callable that flex_attention takes: a function, a closure over tensors,
            numbers or other masks, a partial, a bound method, an object with ``__call__``.
        device: the device of the indices, and of the captured tensors.

    Returns:
        the lowered mask and the tensors that it captures, as :func:`evaluate` takes them.

    Raises:
        UnsupportedMask: the mask cannot be traced, or :func:`lower` refuses it.
    """
    graph, tensors = trace_mask_mod(mask_mod, device)
    infos = [CapturedInfo.of(tensor) for tensor in tensors]
    return _lower(graph, infos, 4, torch.device(device), check_dtypes=True), tensors


def _lower(
    mask: fx.GraphModule | fx.Graph,
    captured: Sequence[CapturedInfo],
    index_placeholders: int,
    device: torch.device | None,
    check_dtypes: bool,
) -> Lowered:
    graph = mask.graph if isinstance(mask, fx.GraphModule) else mask
    check_devices(captured, device)
    formula = formula_of_graph(
        graph, captured, index_placeholders=index_placeholders, check_dtypes=check_dtypes
    )
    return lowered_of(formula, tuple(captured))
