"""Tensors that are kept and may later take part in training, made in inference mode or not.

Autograd refuses to save a tensor that was made under ``torch.inference_mode``. A mask or a tree is
often first used there, for the log-probabilities of the policy that sampled, and then trained on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def lasting(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that autograd can save if it was made in inference mode."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def making_lasting() -> AbstractContextManager[object]:
    """While this lasts, what is made of lasting tensors is lasting too."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)
