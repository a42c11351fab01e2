"""What the bench asks of an implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .problem import Problem

Grads = tuple[Tensor, Tensor, Tensor]


class Implementation(ABC):
    """One way to compute a problem's attention, ready to be called again and again.

    Attributes:
        name: how the command line and the reports call it.
        ours: whether it is this project's, which must be as exact as flex; others are timed if
            they are right to the roundings of the dtype.
        inputs: the tensors that `forward` reads and `backward` differentiates by.
        grad_out: the gradient of `forward`'s result.
        pairs: the useful (query, key) pairs that its time is set against.
        has_backward: whether it can be differentiated on the problem's device.
        note: what it runs, where that depends on what is installed.
    """

    name: ClassVar[str]
    ours: ClassVar[bool] = False
    has_backward = True
    note = ""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.pairs = problem.pairs
        self.grad_out = problem.grad_out
        query, key, value = (
            x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)
        )
        self.inputs: Grads = (query, key, value)

    @classmethod
    def unavailable(cls, problem: Problem) -> str | None:
        """Why it cannot run this problem here, None where it can."""
        return None

    @abstractmethod
    def forward(self) -> Tensor:
        """The attention output in the implementation's own layout."""

    def backward(self, out: Tensor) -> Grads:
        """Gradients by query, key and value; may be called again for the same `out`."""
        dq, dk, dv = torch.autograd.grad(out, self.inputs, self.grad_out, retain_graph=True)
        return dq, dk, dv

    def packed_results(self) -> tuple[Tensor, Grads | None] | None:
        """(out, gradients) in the layout of the problem; None where it computes something else."""
        out = self.forward()
        return out, self.backward(out) if self.has_backward else None
