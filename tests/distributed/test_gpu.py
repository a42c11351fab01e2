"""Context parallelism over NCCL."""

from __future__ import annotations

import os

import pytest
import torch

from tests.distributed import gpu_cases
from tests.distributed.launch import run_on_ranks


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # Multicast over NVLink needs set-up that containers often lack.
    monkeypatch.setitem(os.environ, "NCCL_NVLS_ENABLE", "0")
    run_on_ranks(2, gpu_cases.CASES, backend="nccl")
