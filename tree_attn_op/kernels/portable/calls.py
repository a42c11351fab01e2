"""Forward and backward by the portable kernels: what is allocated and launched, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tree_attn_op.kernels.choice import LEAST_SCALE
from tree_attn_op.kernels.launching import Output
from tree_attn_op.kernels.plans import Plan, copies, with_copies
from tree_attn_op.kernels.portable.launch import (
    Lists,
    Problem,
    delta_launch,
    dkdv_launch,
    dq_launch,
    forward_launch,
)
from tree_attn_op.layout import empty_like_layout


class ForwardPlan:
    """A forward call that is decided: see :func:`forward` for the arguments.

    The scale must be positive, and no argument such that it would have to be copied.
    """

    substitute = None

    def __init__(self, problem: Problem, lists: Lists):
        query, value = problem.query, problem.value
        batch, heads, q_len, _ = query.shape
        self._out = Output.like(query, (batch, heads, q_len, value.shape[3]))
        self._lse = Output.dense((batch, heads, q_len), torch.float32, query.device)
        config = problem.config("forward", lists.heads_share)
        samples = self._out.sample(), self._lse.sample()
        self._attend = forward_launch(problem, lists, *samples, config).planned(11)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: str,
        counts: Tensor,
        indices: Tensor,
        full_counts: Tensor | None,
        full_indices: Tensor | None,
        *planned: object,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._out(), self._lse()
        if full_counts is None or full_indices is None:
            full_counts, full_indices = counts, indices
        self._attend(
            *(query, key, value, out, lse, q_vals, k_vals),
            *(counts, indices, full_counts, full_indices),
        )
        return out, lse


class BackwardPlan:
    """A backward call that is decided: see :func:`backward` for the arguments.

    The scale must be positive, and no argument such that it would have to be copied.
    """

    substitute = None

    def __init__(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        by_key: Lists,
        by_query: Lists,
    ):
        inputs = (problem.query, problem.key, problem.value)
        self._grads = [Output.like(tensor, tensor.shape) for tensor in inputs]
        self._delta = Output.dense(lse.shape, lse.dtype, lse.device)
        delta = self._delta.sample()
        dq, dk, dv = (output.sample() for output in self._grads)
        dq_config = problem.config("dq", by_key.heads_share)
        dkdv_config = problem.config("dkdv", by_query.heads_share)
        self._sums = delta_launch(out, grad_out, lse, grad_lse, delta).planned(5)
        self._dkdv = dkdv_launch(
            problem, by_query, grad_out, lse, delta, dk, dv, dkdv_config
        ).planned(14)
        self._dq = dq_launch(problem, by_key, grad_out, lse, delta, dq, dq_config).planned(13)

    def __call__(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: str,
        counts: Tensor,
        indices: Tensor,
        full_counts: Tensor | None,
        full_indices: Tensor | None,
        q_counts: Tensor,
        q_indices: Tensor,
        full_q_counts: Tensor | None,
        full_q_indices: Tensor | None,
        *planned: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        new_dq, new_dk, new_dv = self._grads
        dq, dk, dv, delta = new_dq(), new_dk(), new_dv(), self._delta()
        if full_counts is None or full_indices is None:
            full_counts, full_indices = counts, indices
        if full_q_counts is None or full_q_indices is None:
            full_q_counts, full_q_indices = q_counts, q_indices
        self._sums(out, grad_out, lse, lse if grad_lse is None else grad_lse, delta)
        inputs = (query, key, value, grad_out, lse, delta)
        self._dkdv(
            *(*inputs, dk, dv, q_vals, k_vals),
            *(q_counts, q_indices, full_q_counts, full_q_indices),
        )
        self._dq(
            *(*inputs, dq, q_vals, k_vals),
            *(counts, indices, full_counts, full_indices),
        )
        return dq, dk, dv


class _Anew:
    """The plan of a rare call: nothing is remembered of it but that it was checked."""

    substitute = None

    def __init__(self, call: Callable[..., Any], until: int):
        self._call, self._until = call, until

    def __call__(self, *arguments: Any) -> Any:
        # The op has query-side lists among the arguments of the forward, which takes none.
        return self._call(*arguments[: self._until], *arguments[-3:])


def _positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """``(query', scale', sign)`` with ``scale' > 0``, ``query' * scale' == query * scale``.

    The kernels scale the maximum of a row, not every score, which needs a positive scale; one that
    is no normal float32 counts as 0. ``sign`` takes the gradient of ``query'`` to that of
    ``query`` where the two differ.
    """
    if scale >= LEAST_SCALE:
        return query, scale, 1.0
    # In the layout of the query, which outputs follow.
    scaled = empty_like_layout(query, query.shape, query.dtype)
    if scale <= -LEAST_SCALE:
        return torch.neg(query, out=scaled), -scale, -1.0
    return scaled.zero_(), 1.0, 0.0


def _copies(
    arguments: tuple[Any, ...], rows: tuple[int, ...], dense: tuple[int, ...]
) -> tuple[int, ...]:
    """Places of arguments whose elements must be, and are not, adjacent in the last dimension
    (``rows``) or in all (``dense``)."""
    return (
        *(at for at in rows if arguments[at].stride(-1) != 1),
        *(at for at in dense if arguments[at] is not None and not arguments[at].is_contiguous()),
    )


def _forward_copies(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return _copies(arguments, (0, 1, 2, 3, 4), (6, 7, 8, 9))


def _backward_copies(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return _copies(arguments, (0, 2, 3, 4, 5, 7, 8), (6, *range(10, 18)))


def plan_forward(*arguments: Any) -> Plan:
    """What is to be done for a call of the op ``tree_attention``, given its arguments."""
    places = _forward_copies(arguments)
    if places:
        return copies(places)
    if not arguments[-1] >= LEAST_SCALE:
        return _Anew(forward, 10)
    problem = Problem(*(*arguments[:6], *arguments[-3:]))
    return ForwardPlan(problem, Lists(*arguments[6:10]))


def plan_backward(*arguments: Any) -> Plan:
    """What is to be done for a call of the op ``tree_attention_backward``, given its arguments.

    Query-side lists must be among them.
    """
    places = _backward_copies(arguments)
    if places:
        return copies(places)
    if not arguments[-1] >= LEAST_SCALE:
        return _Anew(backward, 18)
    problem = Problem(*(*arguments[2:5], *arguments[7:10], *arguments[-3:]))
    lists = Lists(*arguments[10:14]), Lists(*arguments[14:18])
    return BackwardPlan(*(*arguments[:2], *arguments[5:7], problem, *lists))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tree attention: ``(out, lse)``.

    Args:
        query, key, value: ``[B, Hq, Q, D]``, ``[B, Hkv, K, D]``, ``[B, Hkv, K, Dv]``, bfloat16,
            float16 or float32, any strides. Copied only if the last dimension is not contiguous.
        q_vals, k_vals: ``[B or 1, rows, Q]`` and ``[B or 1, rows, K]``, both int32 or both int64.
        predicate: text of the predicate.
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices: key-side lists, int32.
        q_block_size, kv_block_size: block sizes of the lists, multiples of 16.
        scale: factor of the scores.

    Returns:
        ``out`` ``[B, Hq, Q, Dv]`` in the layout of ``query`` (see ``empty_like_layout``) and
        ``lse`` ``[B, Hq, Q]``, float32, base e. A row that sees nothing has out 0 and lse -inf.
    """
    scaled_query, positive_scale, _ = _positive_scale(query, scale)
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    arguments: tuple[Any, ...] = (scaled_query, key, value, q_vals, k_vals, predicate, *lists)
    arguments = with_copies(arguments, _forward_copies(arguments))
    problem = Problem(*(*arguments[:6], q_block_size, kv_block_size, positive_scale))
    return ForwardPlan(problem, Lists(*arguments[6:]))(*arguments)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_num_blocks: Tensor,
    q_indices: Tensor,
    full_q_num_blocks: Tensor | None,
    full_q_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward`: ``(grad_query, grad_key, grad_value)``.

    Args:
        grad_out: ``[B, Hq, Q, Dv]``, any strides, expanded ones too.
        grad_lse: ``[B, Hq, Q]`` or None; of no effect on rows that see nothing.
        out, lse: what the forward returned.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: query-side lists, the transpose
            of the key-side lists.
        The rest as in :func:`forward`.

    Returns:
        Gradients with the shapes, dtypes and layouts of ``query``, ``key`` and ``value``. Equal
        inputs give equal bits.
    """
    scaled_query, positive_scale, sign = _positive_scale(query, scale)
    arguments: tuple[Any, ...] = (
        *(grad_out, grad_lse, scaled_query, key, value, out, lse, q_vals, k_vals, predicate),
        *(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices),
        *(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices),
    )
    arguments = with_copies(arguments, _backward_copies(arguments))
    sizes = (q_block_size, kv_block_size, positive_scale)
    problem = Problem(*(*arguments[2:5], *arguments[7:10], *sizes))
    lists = Lists(*arguments[10:14]), Lists(*arguments[14:18])
    plan = BackwardPlan(*(*arguments[:2], *arguments[5:7], problem, *lists))
    dq, dk, dv = plan(*arguments)
    return (dq if sign == 1.0 else dq * sign), dk, dv
