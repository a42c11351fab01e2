"""tree_attention: the meaning of its options, its errors, and its compiled form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

from tree_attn_op import PrefixTree, TreeMask, tree_attention
from tree_attn_op.reference import reference_attention

from .attention_cases import operands, tree_case


def tree_mask(length: int = 150, block: int = 128) -> TreeMask:
    made = tree_case(length)
    return TreeMask.from_predicate(
        made.predicate, made.q_vals, made.k_vals, length, length, BLOCK_SIZE=block
    )


@pytest.mark.parametrize("block", [16, 48, 128])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_out_and_lse(block: int, scale: float | None) -> None:
    mask = tree_mask(block=block)
    query, key, value = operands(2, (4, 2), (150, 150), (16, 8))
    out, aux = tree_attention(
        query, key, value, mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    want, want_lse = reference_attention(query, key, value, mask.to_dense(), scale)
    torch.testing.assert_close(out, want)
    assert isinstance(aux, AuxOutput)
    torch.testing.assert_close(aux.lse, want_lse)
    assert aux.max_scores is None


def test_without_aux_the_result_is_a_tensor() -> None:
    inputs = operands(1, (2, 2), (150, 150))
    out = tree_attention(*inputs, tree_mask())
    assert isinstance(out, Tensor)
    again, aux = tree_attention(*inputs, tree_mask(), return_aux=AuxRequest())
    assert torch.equal(out, again)
    assert aux.lse is None


def test_equals_flex_attention() -> None:
    mask = tree_mask()
    query, key, value = operands(1, (4, 2), (150, 150), dtype=torch.float32)
    want, aux = flex_attention(
        query,
        key,
        value,
        block_mask=mask.block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out, got = tree_attention(
        query, key, value, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(got.lse, aux.lse)


def test_prefix_tree() -> None:
    tree = PrefixTree.from_sequences([[1, 2, 3, 4], [1, 2, 5], [7, 8]])
    length = tree.num_tokens
    query, key, value = operands(1, (2, 2), (length, length))
    packed = tree_attention(query, key, value, tree.mask)
    for index in range(len(tree)):
        at = tree.positions(index)
        alone = (tensor[:, :, at] for tensor in (query, key, value))
        want = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
        torch.testing.assert_close(packed[:, :, at], want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend: str) -> None:
    mask = tree_mask()
    inputs = operands(1, (4, 2), (150, 150), dtype=torch.float32, requires_grad=True)

    def model(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask) -> Tensor:
        for _ in range(2):
            query, aux = tree_attention(
                query, key, value, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
        return query * aux.lse.unsqueeze(-1)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    got, want = compiled(*inputs, mask), model(*inputs, mask)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    both = (torch.autograd.grad(result, inputs, weight) for result in (got, want))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compiled_with_other_values_of_the_same_mask() -> None:
    """The mask is an input, not a constant of the graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tree_attention, backend=counter, fullgraph=True)
    inputs = operands(1, (2, 2), (150, 150))
    for leaves in (2, 5):
        made = tree_case(150, leaves=leaves)
        mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, 150, 150)
        want, _ = reference_attention(*inputs, made.allowed)
        torch.testing.assert_close(compiled(*inputs, mask), want)
    assert counter.frame_count == 1


def test_autocast() -> None:
    mask = tree_mask()
    query, key, value = operands(1, (2, 2), (150, 150), dtype=torch.float32)
    mixed = (query, key.bfloat16(), value.bfloat16())
    with pytest.raises(TypeError, match=r"one dtype, got float32, bfloat16, bfloat16.*autocast"):
        tree_attention(*mixed, mask)
    with torch.autocast("cpu", torch.bfloat16):
        out = tree_attention(*mixed, mask)
    assert torch.equal(out, tree_attention(*(tensor.bfloat16() for tensor in mixed), mask))


def test_errors() -> None:
    mask = tree_mask()
    query, key, value = operands(1, (4, 2), (150, 150))
    with pytest.raises(ValueError, match=r"4 heads and key has 2: pass enable_gqa=True"):
        tree_attention(query, key, value, mask)
    with pytest.raises(
        ValueError, match=r"lengths 150 \(query\) and 150 \(key\), got 140 and 150"
    ):
        tree_attention(query[:, :, :140], key, value, mask, enable_gqa=True)
    with pytest.raises(TypeError, match="mask must be a TreeMask, got BlockMask"):
        tree_attention(query, key, value, mask.block_mask, enable_gqa=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_scores"):
        tree_attention(
            query, key, value, mask, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
        )
    with pytest.raises(TypeError, match="AuxRequest, got bool"):
        tree_attention(query, key, value, mask, enable_gqa=True, return_aux=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on meta and query on cpu.*mask\.to"):
        tree_attention(query, key, value, mask.to("meta"), enable_gqa=True)
    with pytest.raises(ValueError, match="3 query heads and 2 key heads"):
        tree_attention(query[:, :3], key, value, mask, enable_gqa=True)
    with pytest.raises(ValueError, match="scale must be finite"):
        tree_attention(query, key, value, mask, enable_gqa=True, scale=float("nan"))
    wide = TreeMask.from_predicate(
        "q >= k", torch.empty(3, 0, 150).int(), torch.empty(3, 0, 150).int(), 150, 150
    )
    with pytest.raises(ValueError, match="batch size of q_vals must be 1 or 1"):
        tree_attention(query, key, value, wide, enable_gqa=True)
