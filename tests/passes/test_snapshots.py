"""Graphs before and after the pass, for each form of mask, and the verdict for each refusal.

``EXPECTTEST_ACCEPT=1 pytest tests/passes/test_snapshots.py`` writes them anew.
"""

from __future__ import annotations

import textwrap
from typing import Any

import expecttest
import torch

from passes import TreeAttentionPass

from .helpers import (
    PassThenEager,
    Tree,
    attention,
    block_mask,
    compiled,
    form_1,
    form_3,
    form_8,
    form_9,
    qkv,
)


class Snapshots(expecttest.TestCase):
    def setUp(self) -> None:
        torch._dynamo.reset()
        self.tensors = qkv()
        self.tree = Tree(2, 192)

    def run_pass(self, mask_mod: Any, **options: Any) -> PassThenEager:
        mask = block_mask(mask_mod, self.tensors)
        backend = PassThenEager(TreeAttentionPass(**options))
        compiled(attention, backend)(*self.tensors, mask)
        return backend

    def before_and_after(self, mask_mod: Any, **options: Any) -> str:
        backend = self.run_pass(mask_mod, **options)
        (call,) = backend.report
        assert call.rewritten, call
        return f"{backend.before[0]}\n---\n{backend.after[0]}"

    def verdict(self, mask_mod: Any) -> str:
        backend = self.run_pass(mask_mod)
        (call,) = backend.report
        assert not call.rewritten, call
        assert backend.before == backend.after
        if call.mask_node is not None:
            # The line of the mask, not that of the call.
            line = mask_mod.__code__.co_firstlineno
            assert call.source.startswith(f"{__file__}:{line}: "), call.source
        lines = (call.reason, str(call.hint))
        return "\n".join(part for line in lines for part in textwrap.wrap(line, 90))

    def test_form_1(self) -> None:
        self.assertExpectedInline(
            self.before_and_after(form_1(self.tree)),
            """\
v0 = flex_attention(query, key, value, kv_num_blocks, kv_indices, full_kv_num_blocks,
        full_kv_indices, 128, 128, 0.25)
    m0 = ge(q, k)
    m1 = captured0[(b, q)]
    m2 = captured0[(b, k)]
    m3 = eq(m1, m2)
    m4 = captured1[(b, q)]
    m5 = captured0[(b, k)]
    m6 = eq(m4, m5)
    m7 = or(m3, m6)
    m8 = and(m0, m7)
    return m8
v1 = v0[0]
return (v1,)
---
v0 = arange(2, dtype=torch.int64, device=device(type='cpu'))
v1 = unsqueeze(v0, 1)
v2 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v3 = unsqueeze(v2, 0)
v4 = captured0[(v1, v3)]
v5 = broadcast_to(v4, (2, 192))
v6 = captured1[(v1, v3)]
v7 = broadcast_to(v6, (2, 192))
v8 = stack((v5, v7), dim=1)
v9 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v10 = unsqueeze(v9, 0)
v11 = captured0[(v1, v10)]
v12 = broadcast_to(v11, (2, 192))
v13 = stack((v12,), dim=1)
v14 = tree_attn_op.block_lists(v8, v13, 'q >= k & (q0 == k0 | q1 == k0)', 192, 192,
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, 128, 128, 128,
        128)
v15 = v14[0]
v16 = v14[1]
v17 = v14[2]
v18 = v14[3]
v19 = v14[4]
v20 = v14[5]
v21 = v14[6]
v22 = v14[7]
v23 = tree_attn_op.tree_attention(query, key, value, v8, v13, 'q >= k & (q0 == k0 | q1 ==
        k0)', v15, v16, v17, v18, v19, v20, v21, v22, 128, 128, 0.25)
v24 = v23[0]
return (v24,)""",
        )

    def test_form_3(self) -> None:
        self.assertExpectedInline(
            self.before_and_after(form_3(self.tree)),
            """\
v0 = flex_attention(query, key, value, kv_num_blocks, kv_indices, full_kv_num_blocks,
        full_kv_indices, 128, 128, 0.25)
    m0 = lt(q, captured0)
    m1 = lt(k, captured0)
    m2 = and(m0, m1)
    m3 = captured1[k]
    m4 = captured1[q]
    m5 = le(m3, m4)
    m6 = and(m2, m5)
    m7 = captured1[q]
    m8 = captured2[k]
    m9 = lt(m7, m8)
    m10 = and(m6, m9)
    return m10
v1 = v0[0]
return (v1,)
---
v0 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v1 = unsqueeze(v0, 0)
v2 = captured1[v1]
v3 = broadcast_to(v2, (1, 192))
v4 = reshape(captured0, (1, 1))
v5 = lt(v1, v4)
v6 = Tensor.to(v5, torch.int64)
v7 = broadcast_to(v6, (1, 192))
v8 = stack((v3, v7), dim=1)
v9 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v10 = unsqueeze(v9, 0)
v11 = captured1[v10]
v12 = broadcast_to(v11, (1, 192))
v13 = captured2[v10]
v14 = broadcast_to(v13, (1, 192))
v15 = lt(v10, v4)
v16 = Tensor.to(v15, torch.int64)
v17 = broadcast_to(v16, (1, 192))
v18 = stack((v12, v14, v17), dim=1)
v19 = tree_attn_op.block_lists(v8, v18, 'q0 >= k0 & q0 < k1 & q1 != 0 & k2 != 0', 192,
        192, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, 128, 128,
        128, 128)
v20 = v19[0]
v21 = v19[1]
v22 = v19[2]
v23 = v19[3]
v24 = v19[4]
v25 = v19[5]
v26 = v19[6]
v27 = v19[7]
v28 = tree_attn_op.tree_attention(query, key, value, v8, v18, 'q0 >= k0 & q0 < k1 & q1 !=
        0 & k2 != 0', v20, v21, v22, v23, v24, v25, v26, v27, 128, 128, 0.25)
v29 = v28[0]
return (v29,)""",
        )

    def test_form_8(self) -> None:
        self.assertExpectedInline(
            self.before_and_after(form_8(self.tree)),
            """\
v0 = flex_attention(query, key, value, kv_num_blocks, kv_indices, full_kv_num_blocks,
        full_kv_indices, 128, 128, 0.25)
    m0 = ge(q, k)
    m1 = captured0[k]
    m2 = lt(q, m1)
    m3 = and(m0, m2)
    return m3
v1 = v0[0]
return (v1,)
---
v0 = empty((1, 0, 192), dtype=torch.int64, device=device(type='cpu'))
v1 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v2 = unsqueeze(v1, 0)
v3 = captured0[v2]
v4 = broadcast_to(v3, (1, 192))
v5 = stack((v4,), dim=1)
v6 = tree_attn_op.block_lists(v0, v5, 'q >= k & q < k0', 192, 192, kv_num_blocks,
        kv_indices, full_kv_num_blocks, full_kv_indices, 128, 128, 128, 128)
v7 = v6[0]
v8 = v6[1]
v9 = v6[2]
v10 = v6[3]
v11 = v6[4]
v12 = v6[5]
v13 = v6[6]
v14 = v6[7]
v15 = tree_attn_op.tree_attention(query, key, value, v0, v5, 'q >= k & q < k0', v7, v8,
        v9, v10, v11, v12, v13, v14, 128, 128, 0.25)
v16 = v15[0]
return (v16,)""",
        )

    def test_form_9(self) -> None:
        self.assertExpectedInline(
            self.before_and_after(form_9(self.tree)),
            """\
v0 = flex_attention(query, key, value, kv_num_blocks, kv_indices, full_kv_num_blocks,
        full_kv_indices, 128, 128, 0.25)
    m0 = captured0[(b, q)]
    m1 = captured0[(b, k)]
    m2 = eq(m0, m1)
    m3 = ge(q, k)
    m4 = and(m2, m3)
    m5 = sub(q, k)
    m6 = lt(m5, 40)
    m7 = and(m4, m6)
    return m7
v1 = v0[0]
return (v1,)
---
v0 = arange(2, dtype=torch.int64, device=device(type='cpu'))
v1 = unsqueeze(v0, 1)
v2 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v3 = unsqueeze(v2, 0)
v4 = captured0[(v1, v3)]
v5 = broadcast_to(v4, (2, 192))
v6 = stack((v5,), dim=1)
v7 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v8 = unsqueeze(v7, 0)
v9 = captured0[(v1, v8)]
v10 = broadcast_to(v9, (2, 192))
v11 = stack((v10,), dim=1)
v12 = tree_attn_op.block_lists(v6, v11, 'q >= k & q - k < 40 & q0 == k0', 192, 192,
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, 128, 128, 128,
        128)
v13 = v12[0]
v14 = v12[1]
v15 = v12[2]
v16 = v12[3]
v17 = v12[4]
v18 = v12[5]
v19 = v12[6]
v20 = v12[7]
v21 = tree_attn_op.tree_attention(query, key, value, v6, v11, 'q >= k & q - k < 40 & q0 ==
        k0', v13, v14, v15, v16, v17, v18, v19, v20, 128, 128, 0.25)
v22 = v21[0]
return (v22,)""",
        )

    def test_form_1_with_the_predicate_plan(self) -> None:
        self.assertExpectedInline(
            self.before_and_after(form_1(self.tree), plan="predicate").split("---\n")[1],
            """\
v0 = arange(2, dtype=torch.int64, device=device(type='cpu'))
v1 = unsqueeze(v0, 1)
v2 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v3 = unsqueeze(v2, 0)
v4 = captured0[(v1, v3)]
v5 = broadcast_to(v4, (2, 192))
v6 = captured1[(v1, v3)]
v7 = broadcast_to(v6, (2, 192))
v8 = stack((v5, v7), dim=1)
v9 = arange(192, dtype=torch.int64, device=device(type='cpu'))
v10 = unsqueeze(v9, 0)
v11 = captured0[(v1, v10)]
v12 = broadcast_to(v11, (2, 192))
v13 = stack((v12,), dim=1)
v14 = tree_attn_op.block_lists(v8, v13, 'q >= k & (q0 == k0 | q1 == k0)', 192, 192, None,
        None, None, None, 128, 128, 128, 128)
v15 = v14[0]
v16 = v14[1]
v17 = v14[2]
v18 = v14[3]
v19 = v14[4]
v20 = v14[5]
v21 = v14[6]
v22 = v14[7]
v23 = tree_attn_op.tree_attention(query, key, value, v8, v13, 'q >= k & (q0 == k0 | q1 ==
        k0)', v15, v16, v17, v18, v19, v20, v21, v22, 128, 128, 0.25)
v24 = v23[0]
return (v24,)""",
        )

    def test_form_11_table(self) -> None:
        table = torch.rand(192, 192) > 0.5
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: table[q, k]),
            """\
looks up a q-by-k table
Instead of a table indexed by query and key, store one number a token and compare: node
and parent ids, or the tree's enter/exit (tin/tout) order, (tin[k] <= tin[q]) & (tin[q] <
tout[k])""",
        )

    def test_form_11_table_of_each_batch_row(self) -> None:
        table = torch.rand(2, 192, 192) > 0.5
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: table[b, q, k]),
            """\
looks up a q-by-k table
Instead of a table indexed by query and key, store one number a token and compare: node
and parent ids, or the tree's enter/exit (tin/tout) order, (tin[k] <= tin[q]) & (tin[q] <
tout[k])""",
        )

    def test_form_12_table_of_nodes(self) -> None:
        node, table = self.tree.node[0], torch.rand(200, 200) > 0.5
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: (k <= q) & table[node[q], node[k]]),
            """\
looks up a q-by-k table
Instead of a table indexed by query and key, store one number a token and compare: node
and parent ids, or the tree's enter/exit (tin/tout) order, (tin[k] <= tin[q]) & (tin[q] <
tout[k])""",
        )

    def test_form_13_causal(self) -> None:
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: q >= k),
            """\
its mask reads no tensor, so no prefix is shared
None""",
        )

    def test_form_13_window(self) -> None:
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: (q >= k) & (q - k < 17)),
            """\
its mask reads no tensor, so no prefix is shared
None""",
        )

    def test_form_14_heads(self) -> None:
        document = self.tree.node[0]
        self.assertExpectedInline(
            self.verdict(lambda b, h, q, k: (q >= k) & ((h < 2) | (document[q] == document[k]))),
            """\
depends on the head index
A tree mask is the same for all heads: call flex_attention once for each group of heads,
each with a mask of b, q and k only""",
        )
