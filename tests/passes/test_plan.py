"""``plan="predicate"``: lists from the mask's meaning, and no BlockMask left in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from passes import TreeAttentionPass

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, form_1, form_8, qkv
from .test_rewrite import expect_equal_to_oracle, top_k_lists


def test_lists_come_from_the_predicate() -> None:
    tensors = qkv()
    whole = block_mask(form_8(Tree(2, 192)), tensors, BLOCK_SIZE=32)
    backend = PassThenEager(TreeAttentionPass(plan="predicate"))
    out = compiled(attention, backend)(*tensors, top_k_lists(whole))
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, whole)


def test_block_sizes_do_not_matter() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors, BLOCK_SIZE=40)
    backend = PassThenEager(TreeAttentionPass(plan="predicate"))
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_a_block_mask_built_in_the_graph_vanishes() -> None:
    tensors = qkv()
    tree = Tree(2, 192)

    def builds_its_mask(query: Any, key: Any, value: Any, node: Any, parent: Any) -> Any:
        def parents(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & ((node[b, q] == node[b, k]) | (parent[b, q] == node[b, k]))

        mask = create_block_mask(parents, 2, None, 192, 192, device="cpu")
        return attention(query, key, value, mask)

    inputs = (*tensors, tree.node, tree.parent)
    sizes, results = {}, {}
    for plan in ("lists", "predicate"):
        backend = PassThenEager(TreeAttentionPass(plan=plan))
        results[plan] = compiled(builds_its_mask, backend)(*inputs)
        assert len(backend.report.rewritten) == 1, str(backend.report)
        sizes[plan] = largest_intermediate(backend)
    torch.testing.assert_close(results["predicate"], results["lists"])
    assert sizes["lists"] >= 2 * 192 * 192
    assert sizes["predicate"] < 2 * 192 * 192


def largest_intermediate(backend: PassThenEager) -> int:
    """Elements of the largest tensor that AOTAutograd's graph computes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses.fake_tensor import FakeTensor

    largest = []

    def measure(gm: Any, inputs: Any) -> Any:
        values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "call_function"]
        largest.append(max(v.numel() for v in values if isinstance(v, FakeTensor)))
        return gm.forward

    (gm,) = backend.graphs
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    with inputs[0].fake_mode:
        aot_autograd(fw_compiler=measure)(gm, inputs)(*inputs)
    return max(largest)
