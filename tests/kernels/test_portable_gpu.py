"""The portable kernels on a GPU, at sizes that fill it, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cases import (
    Case,
    Inputs,
    errors,
    lists_of,
    make_inputs,
    oracle,
    run_kernels,
    with_meaningless_strides,
)
from tests.kernels.poison import poison_empty

pytestmark = pytest.mark.gpu

# Root mean square error over the oracle's: what rounding inputs of each dtype leaves.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GROUPS = "q >= k & (q0 == k0 | q1 == k0)"
BASE = Case(
    batch=2,
    heads=8,
    kv_heads=2,
    q_len=1024,
    kv_len=1024,
    dim=64,
    blocks=(128, 128),
    value_range=(0, 1024),
    values_batch=2,
    list_batch=2,
    dtype=torch.bfloat16,
    grad_lse=True,
)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)


def check(case: Case, inputs: Inputs | None = None) -> None:
    inputs = make_inputs(case, "cuda") if inputs is None else inputs
    found = errors(run_kernels(case, inputs), oracle(case, inputs))
    for name, (rms, _) in found.items():
        assert rms < TOLERANCE[case.dtype], f"{name}: error {rms:.1e} of {case}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [16, 31, 64, 72, 80, 96, 128, (192, 128), (64, 128), 256])
def test_head_dims_and_dtypes(dim: int | tuple[int, int], dtype: torch.dtype) -> None:
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    check(replace(BASE, dim=dims[0], value_dim=dims[1], dtype=dtype, q_len=999, kv_len=999))


CALLS = {
    "whole_blocks": BASE,
    "fine_lists": replace(BASE, blocks=(64, 64)),
    "wide_key_blocks": replace(BASE, blocks=(64, 128)),
    "finest_lists": replace(BASE, blocks=(16, 16)),
    "blocks_48": replace(BASE, blocks=(48, 48)),
    "blocks_of_256": replace(BASE, blocks=(256, 256)),
    "groups": replace(BASE, predicate=GROUPS, value_range=(0, 6)),
    "everything": replace(BASE, predicate="True", q_len=1000, kv_len=1000),
    "nothing": replace(BASE, predicate="False"),
    "one_row": replace(BASE, q_len=1, kv_len=1025, predicate="q0 >= k0"),
    "tails": replace(BASE, q_len=1025, kv_len=137, predicate="q0 >= k0"),
    "lists_per_head": replace(BASE, list_heads=8, dropped_blocks=True),
    "no_full_lists": replace(BASE, full_lists=False, dropped_blocks=True),
    "group_of_three": replace(BASE, heads=6),
    "no_group": replace(BASE, kv_heads=8),
    "sixteen_heads_a_group": replace(BASE, heads=16, kv_heads=1),
    "head_major": replace(BASE, sequence_major=False),
    "last_stride_2": replace(BASE, last_stride=2),
    "negative_scale": replace(BASE, scale=-0.2),
    "zero_scale": replace(BASE, scale=0.0),
    "scale_below_float32": replace(BASE, scale=1e-46),
    "int64_values": replace(
        BASE,
        predicate="q0 >= k0 & q1 - k1 < 4294967296",
        values=torch.int64,
        value_range=(-(2**62), 2**62),
    ),
    "int32_differences_wrap": replace(
        BASE, predicate="q0 - k0 < 100", value_range=(-(2**31), 2**31 - 1)
    ),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, dim: int) -> None:
    check(replace(CALLS[name], dim=dim))


@pytest.mark.parametrize("q_len", [1, 1000])
def test_dimensions_of_size_1_may_have_any_stride(q_len: int) -> None:
    one = {"batch": 1, "values_batch": 1, "list_batch": 1, "kv_heads": 1}
    case = replace(BASE, **one, q_len=q_len, kv_len=1000, value_range=(0, 1000))
    check(case, with_meaningless_strides(make_inputs(case, "cuda")))


def test_longer_sequence() -> None:
    check(replace(BASE, batch=1, values_batch=1, list_batch=1, q_len=4001, kv_len=4001, dim=128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_inputs_give_equal_bits(dtype: torch.dtype) -> None:
    case = replace(BASE, dtype=dtype, dim=128, q_len=1500, kv_len=1500)
    inputs = make_inputs(case, "cuda")
    first = run_kernels(case, inputs)
    for _ in range(4):
        again = run_kernels(case, inputs)
        for name, tensor in first.items():
            bits = (tensor.view(torch.uint8), again[name].view(torch.uint8))
            assert torch.equal(*bits), name


def test_offsets_beyond_32_bits() -> None:
    """More than 2**31 elements a tensor: documents of 128 tokens, the last ones checked."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    length, heads, document, dim = 2**18 + 128, 64, 128, 128
    assert length * heads * dim > 2**31
    from tree_attn_op.kernels import portable

    generator = torch.Generator("cuda").manual_seed(0)

    def random(count: int) -> torch.Tensor:
        shape = (1, length, count, dim)
        data = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return data.normal_(generator=generator).transpose(1, 2)

    query, key, value, grad_out = random(heads), random(heads), random(heads), random(heads)
    documents = (torch.arange(length, device="cuda") // document).to(torch.int32).view(1, 1, -1)
    blocks = length // document
    counts = torch.ones(1, 1, blocks, dtype=torch.int32, device="cuda")
    indices = torch.arange(blocks, dtype=torch.int32, device="cuda").view(1, 1, blocks, 1)
    lists = (counts, indices, None, None)
    common = (documents, documents, "q >= k & q0 == k0")
    sizes = (document, document, dim**-0.5)
    out, lse = portable.forward(query, key, value, *common, *lists, *sizes)
    grads = portable.backward(
        grad_out, None, query, key, value, out, lse, *common, *lists, *lists, *sizes
    )

    def tail(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, -2:, -2 * document :]

    case = Case(heads=2, kv_heads=2, q_len=2 * document, kv_len=2 * document, dim=dim)
    small = make_inputs(case, "cuda")
    small.query, small.key, small.value = tail(query), tail(key), tail(value)
    small.grad_out = tail(grad_out)
    rows = torch.arange(2 * document, device="cuda")
    same = rows[:, None] // document == rows // document
    small.visible = (same & (rows[:, None] >= rows)).expand(1, 2, -1, -1)
    actual = dict(zip(("out", "dq", "dk", "dv"), map(tail, (out, *grads)), strict=True))
    expected = oracle(case, small)
    del expected["lse"]
    for name, (rms, _) in errors(actual, expected).items():
        assert rms < 1e-2, f"{name}: error {rms:.1e}"


def test_large_logits_do_not_overflow_the_weights() -> None:
    """A masked score far above the lse of its row: exp2 overflows there and must not matter."""
    case = replace(BASE, scale=1e4, grad_lse=False)
    inputs = make_inputs(case, "cuda")
    for name, tensor in run_kernels(case, inputs).items():
        finite = torch.isfinite(tensor) | (torch.isneginf(tensor) if name == "lse" else False)
        assert finite.all(), name


def test_lists_filled_with_unread_entries_are_not_read() -> None:
    states = torch.tensor([[[[1, 0], [2, 1]]]], device="cuda")
    counts, indices, full_counts, full_indices = lists_of(states, True)
    assert counts is not None
    assert indices is not None
    assert full_counts is not None
    assert full_indices is not None
    assert counts.tolist() == [[[1, 1]]]
    assert full_counts.tolist() == [[[0, 1]]]
    assert indices[0, 0, 0, 1] > 2
    assert full_indices[0, 0, 0, 0] > 2
