"""Uninitialised memory made visible: what a kernel does not write is NaN, not a lucky zero."""

from __future__ import annotations

import pytest
import torch


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``torch.empty`` and its likes return NaN in floating tensors."""
    for name in ("empty", "empty_like", "empty_strided"):
        original = getattr(torch, name)

        def filled(*args, original=original, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, filled)
