"""Whether a training step agrees with the same step in a wider dtype, up to its roundings."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_attn_op import PrefixTree

from . import training
from .model import Model

_ERROR_FACTOR = 2.0
"""How much larger than the unpacked run's a variant's rounding error may be."""
_MOST_ERROR = 0.1
"""Of any variant's gradients, relative to their size: more is no rounding error."""


@dataclass
class Agreement:
    """A variant's first loss and gradients against those of a wider dtype.

    Attributes:
        loss: the loss.
        loss_error: its distance to the wider one's, relative to that.
        gradient_errors: by kind of parameter the norm of the difference over the norm.
    """

    loss: float
    loss_error: float
    gradient_errors: dict[str, float]


@dataclass(frozen=True)
class Reference:
    """The loss and the gradients of one step in a wider dtype."""

    loss: float
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: Model, tree: PrefixTree, chunk: int) -> Reference:
        """On the tree, through this project's op without torch.compile.

        It takes part in no rule by which the variants that are compared with the unpacked run
        could look better: that run, which has nothing in common with it, must be close to it too.
        """
        narrow = model.embedding.weight.dtype
        wide = torch.float64 if narrow == torch.float32 else torch.float32
        wide_model = copy.deepcopy(model).to(wide)
        variant = training.tree_variant("op", tree, model.shape.head_dim, compiled=False)
        loss = training.backward(wide_model, variant, checkpointing=True, chunk=chunk)
        return cls(float(loss), training.gradients(wide_model))

    def agreement(self, loss: float, gradients: dict[str, Tensor]) -> Agreement:
        """How close a run came, by kind: the last part of the parameters' names but "weight"."""
        sums: dict[str, list[float]] = {}
        for name, expected in self.gradients.items():
            total = sums.setdefault(name.split(".")[-2], [0.0, 0.0])
            total[0] += float((gradients[name].to(expected.dtype) - expected).square().sum())
            total[1] += float(expected.square().sum())
        errors = {kind: (difference / size) ** 0.5 for kind, (difference, size) in sums.items()}
        return Agreement(loss, abs(loss - self.loss) / abs(self.loss), errors)


def verdict(own: Agreement, unpacked: Agreement | None) -> str:
    """ "ok", or what is off by more than roundings."""
    for kind, error in own.gradient_errors.items():
        limit = _MOST_ERROR
        if unpacked is not None:
            limit = min(limit, _ERROR_FACTOR * unpacked.gradient_errors[kind])
        if not error <= limit:
            return f"wrong: gradients of {kind} are off by {error:.1e}, allowed are {limit:.1e}"
    if not own.loss_error <= 1e-3:
        return f"wrong: the loss is off by {own.loss_error:.1e}"
    return "ok"
