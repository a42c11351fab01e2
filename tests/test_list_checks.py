"""Numbers in block lists: what the debug switch finds, what malformed lists mean without it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from tree_attn_op import TreeMask, list_checks, tree_attention
from tree_attn_op.reference import reference_attention

from .attention_cases import hand_made_lists, ids_case, operands, tree_case
from .fuzz.problems import Choices, draw
from .malformed_lists import CHANGES, LENGTHS, malformed, mask_of, meaning, whole_case

OPS = torch.ops.tree_attn_op
MALFORMED = {name: (named, made) for name, named, made in malformed()}


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(list_checks.VARIABLE, "1")


@pytest.mark.usefixtures("validate")
def test_well_formed_lists_pass() -> None:
    """Entries behind the counts, absent lists, lists of one side only."""
    cases = [hand_made_lists(ids_case(*LENGTHS, 2), 2, 4), tree_case(130), whole_case()]
    for made in cases:
        lengths = made.q_vals.shape[2], made.k_vals.shape[2]
        made.call(*operands(2, (4, 2), lengths, requires_grad=True), 0.3)[0].sum().backward()
        mask_of(made).block_lists_for(16, 16)
    for seed in range(30):
        problem = draw(seed, Choices(longest=100))
        list_checks.check_contents(problem.lists.tensors)


@pytest.mark.usefixtures("validate")
@pytest.mark.parametrize("name", CHANGES)
def test_malformed_lists_are_named(name: str) -> None:
    named, made = MALFORMED[name]
    with pytest.raises(ValueError, match=rf"\b{named}\b.* must .*got -?\d+ at \[0, 0, \d"):
        made.call(*operands(1, (2, 1), LENGTHS), 0.3)
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        mask_of(made).block_lists_for(16, 16)


@pytest.mark.usefixtures("validate")
def test_query_side_lists_of_other_blocks() -> None:
    made = tree_case(130)
    counts = made.lists.q_num_blocks
    assert counts is not None
    fewer = made.with_lists(q_num_blocks=(counts - 1).clamp(min=0))
    with pytest.raises(ValueError, match="q_indices and full_q_indices must list what kv_indices"):
        fewer.call(*operands(1, (2, 1), (130, 130)), 0.3)


@pytest.mark.usefixtures("validate")
def test_compiled_code_checks_as_it_runs() -> None:
    _, made = MALFORMED["negative index"]
    compiled = torch.compile(made.call, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="kv_indices must list blocks of keys from 0 to 6"):
        compiled(*operands(1, (2, 1), LENGTHS), 0.3)


def test_nothing_is_read_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_checks, "check_contents", None)
    inputs = operands(1, (2, 1), (130, 130))
    for setting in (None, "0", ""):
        monkeypatch.delenv(list_checks.VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(list_checks.VARIABLE, setting)
        tree_case(130).call(*inputs, 0.3)
    monkeypatch.setenv(list_checks.VARIABLE, "yes")
    with pytest.raises(ValueError, match="TREE_ATTN_VALIDATE must be 0 or 1, got 'yes'"):
        tree_case(130).call(*inputs, 0.3)


@pytest.mark.parametrize("name", CHANGES)
def test_malformed_lists_mean_the_same_on_every_way(name: str) -> None:
    """As they are and refined: counts are cut, indices out of range list nothing."""
    _, made = MALFORMED[name]
    query, key, value = inputs = operands(1, (2, 1), LENGTHS, requires_grad=True)
    want, want_lse = reference_attention(query, key, value, meaning(made))
    out, lse = made.call(*inputs, 16**-0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    grad = torch.randn_like(out)
    both = (torch.autograd.grad(result, inputs, grad, retain_graph=True) for result in (out, want))
    for got, expected in zip(*both, strict=True):
        torch.testing.assert_close(got, expected)
    mask = mask_of(made)
    fine = TreeMask.of_op_lists(
        mask.predicate, mask.q_vals, mask.k_vals, mask.block_lists_for(16, 16)
    )
    list_checks.check_contents(fine.lists.tensors)
    for each in (mask, fine):
        torch.testing.assert_close(tree_attention(*inputs, each, enable_gqa=True), want)


def test_a_block_mask_that_was_cut_short() -> None:
    """A block beyond the keys lists nothing, as in flex's kernels, which read none there."""
    ids = torch.randint(0, 3, (64,))
    block_mask = BlockMask(
        (64, 64),
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[6, 0], [0, 1]]]], dtype=torch.int32),
        *(None,) * 6,
        BLOCK_SIZE=(32, 32),
        mask_mod=lambda b, h, q, k: ids[q] == ids[k],
    )
    mask = TreeMask.from_block_mask(block_mask)
    inputs = operands(1, (2, 1), (64, 64))
    allowed = ids[:, None] == ids
    allowed[:32] = False
    want, _ = reference_attention(*inputs, allowed[None])
    torch.testing.assert_close(tree_attention(*inputs, mask, enable_gqa=True), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHANGES)
def test_malformed_lists_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask's lists are refined before a kernel follows them; the op's are checked if asked."""
    named, made = MALFORMED[name]
    inputs = operands(1, (2, 1), LENGTHS, dtype=torch.float32)
    on_gpu = [tensor.cuda().requires_grad_() for tensor in inputs]
    on_cpu = [tensor.double().requires_grad_() for tensor in inputs]
    out = tree_attention(*on_gpu, mask_of(made).to("cuda"), enable_gqa=True)
    want, _ = reference_attention(*on_cpu, meaning(made))
    out.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-4)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(one.grad.cpu().double(), other.grad, rtol=1e-4, atol=1e-4)
    monkeypatch.setenv(list_checks.VARIABLE, "1")
    arguments = [t.cuda() if isinstance(t, torch.Tensor) else t for t in made.mask_arguments]
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        OPS.tree_attention(*on_gpu, *arguments, 0.3)
