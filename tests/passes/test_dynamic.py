"""Lengths and batch sizes that change: no recompilation once shapes are dynamic."""

from __future__ import annotations

from typing import Any

import torch

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, form_1, form_3, qkv


def test_lengths_change_without_recompiling() -> None:
    backend = PassThenEager()
    layer = compiled(two_layers, backend)
    compilations = []
    for length in (192, 300, 515, 137, 700):
        tensors = qkv(2, length)
        mask = block_mask(form_1(Tree(2, length)), tensors)
        torch.testing.assert_close(layer(*tensors, mask), two_layers(*tensors, mask))
        compilations.append(len(backend.graphs))
    assert compilations == [1, 2, 2, 2, 2]
    assert not backend.report.kept, str(backend.report)


def test_batch_and_length_change_without_recompiling() -> None:
    backend = PassThenEager()
    layer = compiled(two_layers, backend)
    compilations = []
    for batch, length in ((2, 192), (3, 300), (4, 137), (5, 515), (2, 260)):
        tensors = qkv(batch, length)
        mask = block_mask(form_1(Tree(batch, length)), tensors)
        torch.testing.assert_close(layer(*tensors, mask), two_layers(*tensors, mask))
        compilations.append(len(backend.graphs))
    assert compilations[1:] == [2, 2, 2, 2]
    assert not backend.report.kept, str(backend.report)


def test_dynamic_from_the_start_shares_values() -> None:
    backend = PassThenEager()
    layer = compiled(two_layers, backend, dynamic=True)
    tensors = qkv(2, 192)
    mask = block_mask(form_3(Tree(2, 192)), tensors)
    torch.testing.assert_close(layer(*tensors, mask), two_layers(*tensors, mask))
    lists = torch.ops.tree_attn_op.block_lists.default
    (gm,) = backend.graphs
    assert len(gm.graph.find_nodes(op="call_function", target=lists)) == 1
    assert not backend.report.kept, str(backend.report)


def test_captured_number_that_changes() -> None:
    """A window that is a Python int becomes symbolic when it changes."""
    backend = PassThenEager()
    tensors = qkv(2, 192)
    tree = Tree(2, 192)
    counts = torch.full((1, 1, 2), 2, dtype=torch.int32)
    columns = torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2).contiguous()

    def windowed(query: Any, key: Any, value: Any, window: int) -> Any:
        node = tree.node

        def within(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (node[b, q] == node[b, k]) & (q - k < window)

        lists = torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(
            counts, columns, BLOCK_SIZE=128, mask_mod=within, seq_lengths=(192, 192)
        )
        return attention(query, key, value, lists)

    layer = compiled(windowed, backend)
    compilations = []
    for window in (5, 9, 31, 100):
        torch.testing.assert_close(layer(*tensors, window), windowed(*tensors, window))
        compilations.append(len(backend.graphs))
    assert compilations == [1, 2, 2, 2]
    assert not backend.report.kept, str(backend.report)


def two_layers(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return attention(attention(query, key, value, mask), key, value, mask)
