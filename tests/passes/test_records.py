"""What the pass writes down: log lines, counters, and artifacts for tlparse."""

from __future__ import annotations

import logging

import pytest
import torch

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, form_1, qkv


class Artifacts(logging.Handler):
    """Keeps the artifacts that are written to torch's structured trace."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact")
        if artifact is not None:
            self.payloads[artifact["name"]] = str(record.payload)  # type: ignore[attr-defined]


def run() -> PassThenEager:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    causal = block_mask(lambda b, h, q, k: q >= k, tensors)
    backend = PassThenEager()
    compiled(lambda *tensors: attention(attention(*tensors, mask), *tensors[1:], causal), backend)(
        *tensors
    )
    return backend


def test_log_and_counters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="passes"):
        run()
    text = caplog.text
    assert "rewritten: q >= k & (q0 == k0 | q1 == k0)" in text
    assert "kept flex: its mask reads no tensor" in text
    counters = torch._dynamo.utils.counters["inductor"]
    assert (counters["tree_attn_rewritten"], counters["tree_attn_kept"]) == (1, 1)


def test_torch_logs(capfd: pytest.CaptureFixture[str]) -> None:
    """What TORCH_LOGS="+passes" does."""
    torch._logging.set_logs(modules={"passes": logging.DEBUG})
    try:
        run()
    finally:
        torch._logging.set_logs()
    assert "rewritten: q >= k & (q0 == k0 | q1 == k0)" in capfd.readouterr().err


def test_artifacts() -> None:
    log, artifacts = logging.getLogger("torch.__trace"), Artifacts()
    level = log.level
    log.addHandler(artifacts)
    log.setLevel(logging.DEBUG)
    try:
        backend = run()
    finally:
        log.removeHandler(artifacts)
        log.setLevel(level)
    assert artifacts.payloads["tree_attn_report"] == str(backend.report)
    assert "tree_attn_op" not in artifacts.payloads["tree_attn_before"]
    assert "tree_attn_op.tree_attention" in artifacts.payloads["tree_attn_after"]
