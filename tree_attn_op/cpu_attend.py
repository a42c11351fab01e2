"""Attention over the pieces of a CPU call: three ways to compute one, and how two are merged.

Small pieces are computed many at a time by batched products. Large ones go to oneDNN's product in
float32 and to PyTorch's own flash kernel otherwise. exp2 takes the place of exp, with log2(e) in
the scale: PyTorch's exp and softmax take up to five times as long on some CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cpu_pieces import Batch, Bias, Columns, Piece

_LOG2_E = 1 / math.log(2)
_LN_2 = math.log(2)
_MAX_LINEAR_THREADS = 4
"""Most threads that one head's product is split over; more are better used on several heads."""

# Neither is public; None where a build lacks it. The first is what Inductor computes a linear
# layer with, and the way to oneDNN's float32 product, up to twice as fast as MKL's.
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def linear_fits(query: Tensor) -> bool:
    """Whether oneDNN's product is there, and the faster way for large pieces of this call."""
    return (
        _linear is not None
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and query.dtype == torch.float32
        and torch.get_num_threads() <= _MAX_LINEAR_THREADS
    )


def flash_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's own kernel computes this call: it takes one head dim for all three."""
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    return _flash is not None and dense and query.shape[-1] == value.shape[-1]


class Scratch:
    """Memory that one batch leaves to the next: fresh pages are slow to touch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor of any contents, overwritten by the next one of this name."""
        size = math.prod(shape)
        if name not in self._flat or self._flat[name].numel() < size:
            self._flat[name] = torch.empty(size, dtype=self._dtype)
        return self._flat[name][:size].view(shape)


def take(tensor: Tensor, columns: Columns) -> Tensor:
    """``tensor[:, columns]``, a view if ``columns`` is a slice."""
    if isinstance(columns, slice):
        return tensor[:, columns]
    return tensor.index_select(1, columns)


def hide(scores: Tensor, bias: Sequence[Bias], exact: bool) -> None:
    """Make hidden scores -inf.

    Unless ``exact``, -inf is added to them, much faster than replacing them, and a hidden NaN or
    +inf comes out as NaN.
    """
    for columns, each in bias:
        if exact:
            scores[..., columns].masked_fill_(each < 0, float("-inf"))
        else:
            scores[..., columns] += each


def _exponentiate(scores: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    """Weights in place of ``scores``, with each row's largest score and the sum of its weights.

    Where all scores are -inf, so is the log2 of the sum, and all weights are 0. The sum is at
    least 1 elsewhere.
    """
    torch.amax(scores, -1, keepdim=True, out=largest)
    largest.clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(largest).exp2_()
    torch.sum(weights, -1, keepdim=True, out=total)
    return weights


@dataclass(frozen=True)
class Heads:
    """What one batch row and its heads that share a mask compute with.

    ``query [H, Q, D]`` is as given; ``key`` and ``value`` ``[H / group, K, *]`` are in the dtype
    of the sums.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.key.shape[0]

    def rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """``tensor [H, Q, *]`` at ``rows`` as ``[H / group, group * r, *]``.

        The heads of a group stand under each other, so that one product serves them all.
        """
        return tensor[:, rows].reshape(self.key.shape[0], -1, tensor.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`: ``[H, r, *]``."""
        return rows.view(self.query.shape[0], -1, rows.shape[-1])

    def attend(
        self, batch: Batch, exact: bool, scratch: Scratch, out: Tensor, lse: Tensor
    ) -> None:
        """Attention over the columns of each piece, into ``out [H, Q, Dv]``, ``lse [H, Q]``."""
        number, heads, height = len(batch.pieces), self.query.shape[0], batch.height
        shape = (number, self.key.shape[0], self.group * height)
        scores = scratch.take("scores", *shape, batch.width)
        for piece, into in zip(batch.pieces, scores.unbind(), strict=True):
            query = self.rows(self.query, piece.rows).to(scores.dtype)
            key = take(self.key, piece.columns)
            into.baddbmm_(query, key.mT, beta=0, alpha=self.scale * _LOG2_E)
        hide(scores.view(number, heads, height, -1), batch.bias, exact)
        largest, total = scratch.take("largest", *shape, 1), scratch.take("total", *shape, 1)
        weights = _exponentiate(scores, largest, total)
        sums = scratch.take("sums", *shape, self.value.shape[-1])
        for piece, left, into in zip(batch.pieces, weights.unbind(), sums.unbind(), strict=True):
            torch.bmm(left, take(self.value, piece.columns), out=into)
        each = zip(
            batch.pieces,
            sums.view(number, heads, height, -1).unbind(),
            total.clamp(min=1).view(number, heads, height, 1).unbind(),
            total.log2_().add_(largest).mul_(_LN_2).view(number, heads, height).unbind(),
            strict=True,
        )
        for piece, new, divisor, new_lse in each:
            if batch.first:
                torch.div(new, divisor, out=out[:, piece.rows])
                lse[:, piece.rows] = new_lse
            else:
                merge(out[:, piece.rows], lse[:, piece.rows], new / divisor, new_lse)

    def attend_linear(self, piece: Piece, exact: bool) -> tuple[Tensor, Tensor]:
        """Attention over the columns of one large piece: out ``[H, r, Dv]`` and lse ``[H, r]``.

        One group of heads at a time, by oneDNN.
        """
        query = self.rows(self.query, piece.rows) * (self.scale * _LOG2_E)
        largest, total = query.new_empty(2, *query.shape[:2], 1).unbind()
        out = query.new_empty(*query.shape[:2], self.value.shape[-1])
        keys, values = take(self.key, piece.columns), take(self.value, piece.columns)
        for group, (key, value) in enumerate(zip(keys.unbind(), values.unbind(), strict=True)):
            # A right side that is not contiguous takes oneDNN a thousand times as long.
            scores = _linear(query[group], key.contiguous(), None, "none", [], "")
            hide(scores.view(self.group, -1, scores.shape[-1]), piece.bias, exact)
            weights = _exponentiate(scores, largest[group], total[group])
            sums = _linear(weights, value.contiguous().mT, None, "none", [], "")
            torch.div(sums, total[group].clamp(min=1), out=out[group])
        lse = total.log2_().add_(largest).mul_(_LN_2)
        return self.unrows(out), self.unrows(lse).squeeze(-1)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over the columns of one piece by PyTorch's own kernel, on the call's inputs.

    Returns:
        Out ``[H, r, Dv]`` and lse ``[H, r]``.
    """
    bias = None
    if piece.bias:
        bias = piece.bias[0][1].to(torch.promote_types(query.dtype, torch.float32))
    out, lse = _flash(
        query[None, :, piece.rows],
        take(key, piece.columns)[None],
        take(value, piece.columns)[None],
        attn_mask=bias,
        scale=scale,
    )
    out, lse = out[0], lse[0]
    if piece.blind:
        # The kernel gives such rows lse 0.
        assert bias is not None
        hidden = (bias == float("-inf")).all(1)
        out.masked_fill_(hidden.unsqueeze(-1), 0.0)
        lse.masked_fill_(hidden, float("-inf"))
    return out, lse


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Make attention over one set of keys that over its union with another, disjoint set."""
    weight = torch.sigmoid(new_lse - lse)
    # -inf minus -inf, where neither set has a visible key, is no weight.
    weight.masked_fill_(new_lse == float("-inf"), 0.0)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))
