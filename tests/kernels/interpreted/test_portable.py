"""Forward and backward of the portable kernels against the float64 oracle, on small shapes.

The interpreter multiplies bfloat16 as the integers that store it, so these run in float32 and
float16; bfloat16 is tested on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import (
    Case,
    Inputs,
    assert_matches,
    make_inputs,
    oracle,
    run_kernels,
    with_meaningless_strides,
)
from tests.kernels.poison import poison_empty
from tree_attn_op.kernels.choice import tma_strides
from tree_attn_op.kernels.configs import CUDA_DEVICES
from tree_attn_op.kernels.portable import launch

GROUPS = "q >= k & (q0 == k0 | q1 == k0)"
WINDOW = "q >= k & q0 - k0 < 20 & k1 != 3"
GENERAL = "~(q0 < k0 & k1 > 1) & (q1 != k0 | q - k > 17) & q0 != 2"
SMALL = (0, 4)

CASES = {
    "tree": Case(grad_lse=True),
    "groups": Case(predicate=GROUPS, value_range=SMALL),
    "window": Case(predicate=WINDOW),
    "general": Case(predicate=GENERAL, value_range=SMALL, grad_lse=True),
    "true": Case(predicate="True"),
    "false": Case(predicate="False", grad_lse=True),
    "query_only": Case(predicate="q0 != 0", value_range=(0, 2)),
    "key_only": Case(predicate="k0 != 0", value_range=(0, 2)),
    "tails": Case(q_len=77, kv_len=77, value_range=(0, 77), grad_lse=True),
    "tails_everything_visible": Case(predicate="True", q_len=45, kv_len=77, grad_lse=True),
    "tail_of_a_wide_block": Case(predicate="True", q_len=65, kv_len=129, blocks=(128, 128)),
    "one_token": Case(q_len=1, kv_len=1, value_range=(1, 2)),
    "short_queries": Case(q_len=20, kv_len=100, predicate="q0 >= k0"),
    "short_keys": Case(q_len=100, kv_len=20, predicate="q0 >= k0"),
    "group_of_four": Case(heads=4, kv_heads=1, predicate=GROUPS, value_range=SMALL),
    "group_of_three": Case(heads=6, kv_heads=2, predicate=GROUPS, value_range=SMALL),
    "two_batches": Case(batch=2, heads=4, kv_heads=2, values_batch=2, list_batch=2),
    "batches_share_lists": Case(batch=2, values_batch=2, predicate=GROUPS, value_range=SMALL),
    "batches_share_values": Case(batch=2, list_batch=2),
    "lists_per_head": Case(
        batch=2, heads=4, kv_heads=2, list_batch=2, list_heads=4, dropped_blocks=True
    ),
    "dropped_blocks": Case(heads=4, kv_heads=2, dropped_blocks=True, grad_lse=True),
    "no_full_lists": Case(full_lists=False, q_len=70),
    "no_full_lists_dropped": Case(full_lists=False, dropped_blocks=True, predicate="True"),
    "blocks_16": Case(blocks=(16, 16), heads=4, kv_heads=1),
    "blocks_48": Case(blocks=(48, 48), q_len=100, kv_len=100),
    "blocks_64_32": Case(blocks=(64, 32), q_len=128, kv_len=128, value_range=(0, 128)),
    "blocks_16_64": Case(blocks=(16, 64), q_len=80, kv_len=128, value_range=(0, 128)),
    "blocks_128": Case(blocks=(128, 128), q_len=160, kv_len=160, value_range=(0, 160)),
    "head_dim_16": Case(dim=16),
    "head_dim_31": Case(dim=31, value_dim=17),
    "head_dim_64": Case(dim=64),
    "head_dim_72": Case(dim=72, heads=1),
    "head_dim_96": Case(dim=96, value_dim=64, heads=1),
    "head_dim_128": Case(dim=128, heads=1),
    "head_dim_192_128": Case(dim=192, value_dim=128, heads=1),
    "value_dim_wider": Case(dim=32, value_dim=80),
    "int64_values": Case(
        predicate="q0 >= k0 & q1 - k1 < 4294967296",
        values=torch.int64,
        value_range=(-(2**62), 2**62),
    ),
    "int64_literal": Case(
        predicate="q0 - k0 > -4611686018427387904 & k1 != 5",
        values=torch.int64,
        value_range=(-(2**62), 2**62),
    ),
    "int32_differences_wrap": Case(
        predicate="q0 - k0 < 100", value_range=(-(2**31), 2**31 - 1), grad_lse=True
    ),
    "head_major": Case(sequence_major=False, heads=4, kv_heads=2),
    "last_stride_2": Case(last_stride=2, heads=4, kv_heads=2),
    "negative_scale": Case(scale=-0.3),
    "zero_scale": Case(scale=0.0, grad_lse=True),
    "scale_below_float32": Case(scale=1e-46, grad_lse=True),
    "negative_scale_below_float32": Case(scale=-1e-46),
    "large_scale": Case(scale=40.0),
    "float16": Case(dtype=torch.float16, heads=4, kv_heads=2, grad_lse=True),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)


def tolerance(case: Case) -> float:
    """Relative to the root mean square of a result.

    A large scale magnifies the rounding of scores, by how much depends on the order in which the
    BLAS under NumPy adds: 4e-4 with one of its kernels, 1.1e-3 with another.
    """
    if case.dtype is torch.float16:
        return 2e-2
    return 4e-3 if case.scale == 40.0 else 3e-5


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    assert_matches(run_kernels(case, inputs), oracle(case, inputs), tolerance(case))


HOPPER_CASES = {
    "tiles_of_descriptors": Case(heads=4, kv_heads=2, q_len=256, kv_len=256, value_range=(0, 256)),
    "tails": Case(batch=2, heads=4, kv_heads=1, q_len=200, kv_len=150, predicate="q0 >= k0"),
    "padded_head_dim": Case(dim=24, value_dim=40, q_len=130, kv_len=130, grad_lse=True),
    "unaligned_head_dim": Case(dim=31, value_dim=17, q_len=130, kv_len=130),
    "head_major": Case(sequence_major=False, heads=4, kv_heads=2, q_len=130, kv_len=130),
    "no_full_lists": Case(full_lists=False, dropped_blocks=True, heads=4, kv_heads=1, q_len=130),
}


@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper_configurations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16, to get the table's 16-bit entries: packed heads and loads through descriptors."""
    monkeypatch.setattr(launch, "device_of", lambda device: CUDA_DEVICES[90])
    case = replace(HOPPER_CASES[name], dtype=torch.float16, blocks=(64, 128))
    inputs = make_inputs(case)
    assert_matches(run_kernels(case, inputs), oracle(case, inputs), tolerance(case))


@pytest.mark.parametrize("q_len", [1, 130])
def test_dimensions_of_size_1_may_have_any_stride(
    q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read through descriptors all the same."""
    read = []

    def recorded(tensor: torch.Tensor) -> tuple[int, ...] | None:
        read.append(tma_strides(tensor))
        return read[-1]

    monkeypatch.setattr(launch, "device_of", lambda device: CUDA_DEVICES[90])
    monkeypatch.setattr(launch, "tma_strides", recorded)
    case = Case(q_len=q_len, kv_len=130, dtype=torch.float16, blocks=(64, 128))
    inputs = with_meaningless_strides(make_inputs(case))
    assert_matches(run_kernels(case, inputs), oracle(case, inputs), tolerance(case))
    assert len(read) == 2 + 2 + 4
    assert None not in read


def test_outputs_follow_their_inputs_in_memory() -> None:
    case = Case(heads=4, kv_heads=2)
    inputs = make_inputs(case)
    inputs.value = inputs.value.contiguous()
    results = run_kernels(case, inputs)
    for name, reference in (("out", inputs.query), ("dq", inputs.query), ("dk", inputs.key)):
        assert results[name].stride() == reference.stride(), name
    assert results["dv"].is_contiguous()
    assert results["lse"].is_contiguous()
    assert results["lse"].dtype is torch.float32


def test_expanded_gradients() -> None:
    case = Case(heads=4, kv_heads=2, grad_lse=True)
    inputs = make_inputs(case)
    inputs.grad_out = torch.tensor(1.0).expand(inputs.grad_out.shape)
    assert inputs.grad_lse is not None
    inputs.grad_lse = torch.randn(case.q_len).expand(inputs.grad_lse.shape)
    assert_matches(run_kernels(case, inputs), oracle(case, inputs), 3e-5)


def test_values_and_lists_need_not_be_dense() -> None:
    case = Case(heads=4, kv_heads=2, predicate=GROUPS, value_range=SMALL)
    inputs = make_inputs(case)
    expected = oracle(case, inputs)

    def spread(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(2, -1)[..., ::2]

    inputs.q_vals, inputs.k_vals = spread(inputs.q_vals), spread(inputs.k_vals)
    inputs.key_lists = [spread(t) for t in inputs.key_lists]
    inputs.query_lists = [spread(t) for t in inputs.query_lists]
    assert_matches(run_kernels(case, inputs), expected, 3e-5)


def test_rows_that_see_nothing_ignore_the_gradient_of_their_lse() -> None:
    case = Case(predicate="q0 != 0 & q >= k", value_range=(0, 2), grad_lse=True)
    inputs = make_inputs(case)
    expected = oracle(case, inputs)
    blind = ~inputs.visible.any(-1)
    assert blind.any()
    assert inputs.grad_lse is not None
    inputs.grad_lse[blind] = float("nan")
    assert_matches(run_kernels(case, inputs), expected, 3e-5)


def test_equal_inputs_give_equal_bits() -> None:
    case = Case(heads=4, kv_heads=2, q_len=70, kv_len=70, grad_lse=True)

    def bits(inputs: Inputs) -> dict[str, bytes]:
        results = run_kernels(case, inputs)
        return {name: t.contiguous().numpy().tobytes() for name, t in results.items()}

    assert bits(make_inputs(case)) == bits(make_inputs(case))


@pytest.mark.parametrize("empty", ["q_len", "kv_len", "batch"])
def test_empty_dimensions(empty: str) -> None:
    case = Case(q_len=32, kv_len=32)
    sizes = {"batch": 1, "q_len": 32, "kv_len": 32, empty: 0}
    batch, q_len, kv_len = sizes["batch"], sizes["q_len"], sizes["kv_len"]
    rows, columns = -(-q_len // 32), -(-kv_len // 32)

    def empty_lists(rows: int, columns: int) -> list[torch.Tensor | None]:
        counts = torch.zeros(1, 1, rows, dtype=torch.int32)
        indices = torch.zeros(1, 1, rows, columns, dtype=torch.int32)
        return [counts, indices, None, None]

    inputs = Inputs(
        torch.randn(batch, 2, q_len, 32),
        torch.randn(batch, 1, kv_len, 32),
        torch.randn(batch, 1, kv_len, 32),
        torch.zeros(1, 0, q_len, dtype=torch.int32),
        torch.zeros(1, 1, kv_len, dtype=torch.int32),
        torch.zeros(batch, 2, q_len, kv_len, dtype=torch.bool),
        empty_lists(rows, columns),
        empty_lists(columns, rows),
        torch.randn(batch, 2, q_len, 32),
        None,
    )
    results = run_kernels(case, inputs)
    assert results["lse"].isneginf().all()
    for name in ("out", "dq", "dk", "dv"):
        assert (results[name] == 0).all(), name
