"""Fixtures of the tests of the pass."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled by another test is seen, and nothing stays installed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._inductor.config.pre_grad_custom_pass is None, "a test left a pass installed"
    torch._dynamo.reset()


@pytest.fixture
def traceable_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex_attention be traced on a CPU with inputs that require a gradient.

    flex refuses them when it is called, because its own CPU kernel has no backward; the op that
    the pass puts in its place has one.
    """
    monkeypatch.setattr(
        torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None
    )
