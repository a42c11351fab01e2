"""The CPU implementation against the dense oracle: values, gradients, layouts, odd inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_attn_op import cpu, cpu_attend, cpu_pieces, layout
from tree_attn_op.predicate import Predicate

from .attention_cases import Case, case, hand_made_lists, ids_case, operands, tree_case
from .strategies import K_ROWS, Q_ROWS, nodes, random_values

SCALE = 0.3


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    cpu_pieces._kept.cache_clear()


def check(
    made: Case,
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    scale: float = SCALE,
) -> None:
    """Out, lse and all gradients, with a gradient through lse, equal the oracle's."""
    lengths = made.q_vals.shape[2], made.k_vals.shape[2]
    inputs = operands(batch, heads, lengths, dims, dtype, requires_grad=True)
    reference = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, lse = made.call(*inputs, scale)
    want, want_lse = made.oracle(*reference, scale)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=min(tolerance, 1e-4))

    grad_out = torch.randn_like(out)
    grad_lse = torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), inputs, (grad_out, grad_lse))
    seen = torch.isfinite(want_lse)
    wanted = torch.autograd.grad(
        (want, want_lse[seen]), reference, (grad_out.double(), grad_lse.double()[seen])
    )
    for gradient, expected, tensor in zip(got, wanted, inputs, strict=True):
        assert gradient.dtype == tensor.dtype
        torch.testing.assert_close(
            gradient.double(), expected, rtol=4 * tolerance, atol=4 * tolerance
        )


@pytest.mark.parametrize("length", [1, 15, 137, 1025])
def test_tree(length: int) -> None:
    check(tree_case(length, (128, 128)), heads=(2, 1), dims=(8, 8))


def test_large_rectangles() -> None:
    """Long enough for PyTorch's own kernel, masked and not, and for lists coarser than tiles."""
    made = tree_case(1500, (128, 128), leaves=5)
    check(made, heads=(4, 2))
    check(made, heads=(1, 1), dims=(16, 24))


def test_partial_rectangles_with_blind_rows() -> None:
    q_vals = torch.randint(0, 3, (1, 1, 700))
    k_vals = torch.randint(0, 2, (1, 1, 300))
    check(case("q0 == k0", q_vals, k_vals, (64, 64)), heads=(2, 2))


@pytest.fixture
def by_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large float32 pieces go to oneDNN, whatever this machine would choose."""
    if cpu_attend._linear is None or not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(cpu, "linear_fits", lambda query: query.dtype == torch.float32)


FLOAT32 = {"dtype": torch.float32, "tolerance": 3e-5}


@pytest.mark.usefixtures("by_linear")
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (16, 24), (7, 1)])
def test_large_rectangles_by_linear(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(tree_case(1100, (128, 128), leaves=5), heads, 1, dims, **FLOAT32)


@pytest.mark.usefixtures("by_linear")
def test_masked_rectangles_by_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing, masks of each head, and rectangles in several pieces."""
    q_vals = torch.randint(0, 3, (1, 1, 700))
    k_vals = torch.randint(0, 2, (1, 1, 300))
    made = case("q0 == k0", q_vals, k_vals, (64, 64))
    check(made, heads=(2, 2), **FLOAT32)
    check(hand_made_lists(made, 2, 4), heads=(4, 2), batch=2, **FLOAT32)
    monkeypatch.setattr(cpu, "_LINEAR_SCORES", 64 * 300)
    monkeypatch.setattr(cpu, "MAX_COLUMNS", 100)
    check(made, heads=(2, 2), **FLOAT32)


@pytest.mark.usefixtures("by_linear")
@pytest.mark.parametrize("which", range(5))
def test_strides_by_linear(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right sides that are not contiguous would take oneDNN a thousand times as long."""
    linear, seen = cpu_attend._linear, []

    def watched(left: torch.Tensor, right: torch.Tensor, *others) -> torch.Tensor:
        seen.append(right.is_contiguous() or right.mT.is_contiguous())
        return linear(left, right, *others)

    monkeypatch.setattr(cpu_attend, "_linear", watched)
    made = tree_case(700, (64, 64))
    inputs = [
        _layouts(each)[which] for each in operands(2, (4, 2), (700, 700), dtype=torch.float32)
    ]
    out, lse = made.call(*inputs, SCALE)
    assert seen
    assert all(seen)
    want, want_lse = made.oracle(*inputs, SCALE)
    torch.testing.assert_close(out.double(), want, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=3e-5, atol=3e-5)


def test_linear_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.empty(1, 1, 1, 1)
    monkeypatch.setattr(cpu_attend, "_linear", object())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu_attend.linear_fits(query)
    assert not cpu_attend.linear_fits(query.double())
    assert not cpu_attend.linear_fits(query.bfloat16())
    with monkeypatch.context() as off:
        off.setattr(torch.backends.mkldnn, "enabled", False)
        assert not cpu_attend.linear_fits(query)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert not cpu_attend.linear_fits(query)


@pytest.mark.parametrize("scale", [0.0, SCALE])
def test_scratch_may_hold_anything(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    take = cpu_attend.Scratch.take
    monkeypatch.setattr(
        cpu_attend.Scratch, "take", lambda *given: take(*given).fill_(float("nan"))
    )
    check(tree_case(300, (64, 64)), scale=scale)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_far_scores(scale: float, shift: float) -> None:
    """Scores whose exponentials overflow and underflow, and rows far from each other."""
    made = tree_case(700, (64, 64))
    query, key, value = operands(1, (2, 1), (700, 700))
    query[..., 0], key[..., 0] = shift, 5.0
    query[:, :, ::3] *= 10
    out, lse = made.call(query, key, value, scale)
    want, want_lse = made.oracle(query, key, value, scale)
    torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("most", [1, 1 << 30])
def test_batches_hold_each_piece_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces a batch holds; forward and backward take the same ones."""
    monkeypatch.setattr(cpu_pieces, "_BATCH_SCORES", most)
    check(tree_case(1025, (128, 128), leaves=7), heads=(2, 1), dims=(8, 8))
    check(hand_made_lists(ids_case(150, 200), 2, 4), heads=(4, 2), batch=2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 6e-2), (torch.float16, 8e-3)],
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    check(tree_case(700, (128, 128)), dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("lengths", [(70, 70), (33, 100), (129, 31), (1, 65)])
def test_ids_in_no_order(lengths: tuple[int, int]) -> None:
    check(ids_case(*lengths, batch=2), batch=2)
    check(ids_case(*lengths, dtype=torch.int32, blocks=(16, 48)), batch=2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("values", [1, 2])
def test_hand_made_lists(batch: int, heads: int, values: int) -> None:
    check(hand_made_lists(ids_case(150, 200, values), batch, heads), batch=2)


def test_absent_full_lists() -> None:
    made = tree_case(100).with_lists(full_kv_num_blocks=None, full_kv_indices=None)
    check(made.with_lists(full_q_num_blocks=None, full_q_indices=None))


def test_key_side_lists_are_enough() -> None:
    made = tree_case(100).with_lists(
        q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None
    )
    check(made)


@pytest.mark.parametrize("dims", [(1, 1), (31, 31), (72, 80), (24, 8), (256, 256)])
def test_head_dims(dims: tuple[int, int]) -> None:
    check(tree_case(90), heads=(2, 1), dims=dims)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(scale: float) -> None:
    check(tree_case(600, (64, 64)), heads=(1, 1), scale=scale)


def test_nothing_is_listed() -> None:
    made = case("False", torch.empty(1, 0, 40).int(), torch.empty(1, 0, 50).int())
    inputs = operands(2, (4, 2), (40, 50), requires_grad=True)
    out, lse = made.call(*inputs, SCALE)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    for gradient in torch.autograd.grad((out.sum() + lse.exp().sum()), inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@settings(max_examples=40)
@given(
    node=nodes,
    seed=st.integers(0, 2**31),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_random_predicates(node, seed: int, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_vals = random_values(generator, Q_ROWS, lengths[0], dtype, batch=2)
    k_vals = random_values(generator, K_ROWS, lengths[1], dtype, batch=2)
    made = case(str(Predicate(node)), q_vals, k_vals, (16, 32))
    inputs = operands(2, (2, 1), lengths, (8, 8))
    out, lse = made.call(*inputs, SCALE)
    # Derived lists mean the predicate alone.
    dense = Predicate(node).dense(q_vals, k_vals, *lengths)
    assert torch.equal(made.allowed[:, 0], dense)
    want, want_lse = made.oracle(*inputs, SCALE)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("rows", [False, True])
def test_gradcheck(rows: bool) -> None:
    made = ids_case(9, 7) if rows else tree_case(12)
    lengths = made.q_vals.shape[2], made.k_vals.shape[2]
    inputs = operands(2, (2, 1), lengths, (3, 2), requires_grad=True)

    def attention(*tensors):
        out, lse = made.call(*tensors, SCALE)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attention, inputs)


def _layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    batch, heads, length, width = tensor.shape
    wide = torch.randn(batch, heads + 1, length + 3, 2 * width, dtype=tensor.dtype)
    return [
        tensor,
        torch.randn(batch, length, heads, width, dtype=tensor.dtype).transpose(1, 2),
        wide[:, 1:, 2:-1, ::2],
        torch.randn(batch, heads, width, length, dtype=tensor.dtype).mT,
        torch.randn(1, 1, length, width, dtype=tensor.dtype).expand(tensor.shape),
    ]


@pytest.mark.parametrize("which", range(5))
def test_strides(which: int) -> None:
    made = tree_case(300, (64, 64))
    inputs = [
        _layouts(tensor)[which].detach().requires_grad_()
        for tensor in operands(2, (4, 2), (300, 300))
    ]
    out, lse = made.call(*inputs, SCALE)
    dense = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
    want, want_lse = made.oracle(*dense, SCALE)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grad = torch.randn(4, 300, 2, 16, dtype=torch.float64).permute(2, 0, 1, 3)
    for gradient, tensor in zip(torch.autograd.grad(out, inputs, grad), inputs, strict=True):
        assert (
            gradient.stride()
            == layout.empty_like_layout(tensor, tuple(tensor.shape), tensor.dtype).stride()
        )
    reference = [tensor.requires_grad_() for tensor in dense]
    wanted = torch.autograd.grad(made.oracle(*reference, SCALE)[0], reference, grad)
    got = torch.autograd.grad(made.call(*inputs, SCALE)[0], inputs, grad)
    for gradient, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_output_element_is_written(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that start as NaN come out without one."""

    def poisoned(*args, **kwargs) -> torch.Tensor:
        return layout.empty_like_layout(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(cpu, "empty_like_layout", poisoned)
    made = hand_made_lists(ids_case(150, 200), 1, 1)
    inputs = operands(1, (2, 2), (150, 200), dtype=dtype, requires_grad=True)
    out, lse = made.call(*inputs, SCALE)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    for gradient in torch.autograd.grad(out, inputs, torch.randn_like(out)):
        assert not gradient.isnan().any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("linear", [False, True])
def test_hidden_keys_do_not_matter(
    poison: float, linear: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no query sees in a partial block may hold anything, as it may for flex_attention."""
    if linear:
        request.getfixturevalue("by_linear")
    else:
        monkeypatch.setattr(cpu, "linear_fits", lambda query: False)
    length = 600
    hidden = torch.zeros(1, 1, length, dtype=torch.int32)
    hidden[..., ::7] = 1
    made = case("k0 == 0", hidden.new_empty(1, 0, length), hidden, (64, 64))
    query, key, value = operands(1, (2, 1), (length, length), dtype=torch.float32)
    want = made.call(query, key, value, SCALE)
    key[:, :, ::7] = poison
    torch.testing.assert_close(made.call(query, key, value, SCALE), want)


def test_same_bits_twice() -> None:
    made = tree_case(1500, (128, 128), leaves=5)
    inputs = operands(1, (4, 2), (1500, 1500), dtype=torch.float32, requires_grad=True)
    runs = []
    for _ in range(2):
        out, lse = made.call(*inputs, SCALE)
        runs.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_without_pytorchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attend, "_flash", None)
    check(tree_case(1100, (128, 128)), heads=(2, 1), dims=(8, 8))


@pytest.mark.parametrize("name", ["k_vals", "kv_num_blocks"])
def test_masks_are_kept_by_content(name: str) -> None:
    """Values and lists that change in place are seen, though the tensors are the same."""
    made = tree_case(300, (64, 64))
    inputs = operands(1, (2, 1), (300, 300))
    for _ in range(2):
        torch.testing.assert_close(made.call(*inputs, SCALE)[0], made.oracle(*inputs, SCALE)[0])
    before = made.call(*inputs, SCALE)[0]
    if name == "k_vals":
        made.k_vals[..., -3:-1] = 0
    else:
        made.lists.kv_num_blocks[..., 1:3] -= 1
    after, _ = made.call(*inputs, SCALE)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, made.oracle(*inputs, SCALE)[0])


def test_masks_too_large_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pieces, "_MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(cpu_pieces, "MAX_PAIRS", 64 * 64)
    check(tree_case(1100, (128, 128)), heads=(2, 1), dims=(8, 8))
    check(ids_case(600, 90, blocks=(64, 64)), heads=(2, 1), dims=(8, 8))


def test_scores_are_cut_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows in several pieces, merged."""
    monkeypatch.setattr(cpu_attend, "_flash", None)
    monkeypatch.setattr(cpu, "_MAX_SCORES", 1)
    monkeypatch.setattr(cpu, "MAX_COLUMNS", 100)
    monkeypatch.setattr(cpu_pieces, "MAX_COLUMNS", 128)
    check(tree_case(1100, (64, 64)), heads=(2, 1), dims=(8, 8))
    check(ids_case(700, 1100, blocks=(64, 64)), heads=(2, 1), dims=(8, 8))
