"""Addresses beyond 2^31 elements, without the memory: rows far apart in a tensor never touched.

An allocation takes memory as its pages are written, so that a few rows of a tensor of 2^32
elements need little of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import Case, assert_matches, make_inputs, oracle, run_kernels

LENGTH = 70
FAR = 1 << 25
"""Elements between two rows: those of 70 rows span 2^31."""


def far_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, each row in memory of its own."""
    batch, heads, length, dim = tensor.shape
    strides = (heads * dim, dim, FAR, 1)
    try:
        memory = torch.empty(FAR * length, dtype=tensor.dtype)
    except RuntimeError:
        pytest.skip("this machine lends no such address space")
    return memory.as_strided((batch, heads, length, dim), strides).copy_(tensor)


@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
def test_rows_beyond_2_to_the_31_elements(name: str) -> None:
    assert FAR * LENGTH > 2**31
    case = Case(heads=2, dim=16, q_len=LENGTH, kv_len=LENGTH, value_range=(0, LENGTH))
    inputs = make_inputs(replace(case, dtype=torch.float16))
    expected = oracle(case, inputs)
    setattr(inputs, name, far_apart(getattr(inputs, name)))
    assert_matches(run_kernels(case, inputs), expected, 2e-2)
