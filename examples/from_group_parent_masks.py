"""Moving an engine that masks by group and parent ids to tree attention, step by step.

Such an engine packs prompts and completions into rows ``[B, S]``, gives each token the id of its
group and the id of the group above, and lets flex_attention keep the groups apart with a BlockMask
that it builds for every batch.

Run it: ``python examples/from_group_parent_masks.py``. It needs no GPU; ``torch.compile`` refuses
to trace flex_attention for training on a CPU, so that what is compiled here runs forward only.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import passes
import tree_attn_op
from tree_attn_op import PrefixTree, TreeMask, tree_attention

PADDING = -1

# ---------------------------------------------------------------------------------------------
# The engine as it was.


def pack_rows(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Group and parent ids int64 ``[B, S]``: two prompts a row, each with three completions."""
    groups = torch.full((rows, length), PADDING)
    parents = groups.clone()
    for row in range(rows):
        place = group = 0
        for _ in range(2):
            prompt = group
            for size in (40, 20, 25, 17 + row):
                groups[row, place : place + size] = group
                parents[row, place : place + size] = prompt
                place, group = place + size, group + 1
    return groups, parents


def group_mask(groups: Tensor, parents: Tensor):
    """Each token sees its group and the group above, up to itself."""

    def mask_mod(b, h, q, k):
        same = groups[b, q] == groups[b, k]
        above = parents[b, q] == groups[b, k]
        return (q >= k) & (same | above)

    return mask_mod


def build_mask(groups: Tensor, parents: Tensor) -> BlockMask:
    rows, length = groups.shape
    mask_mod = group_mask(groups, parents)
    return flex.create_block_mask(mask_mod, rows, None, length, length, device=groups.device)


def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


# ---------------------------------------------------------------------------------------------
# The move.


def build_mask_in_linear_memory(groups: Tensor, parents: Tensor) -> BlockMask:
    """Step 2: the same BlockMask without the ``[B, S, S]`` that flex's builder goes through."""
    rows, length = groups.shape
    mask_mod = group_mask(groups, parents)
    return tree_attn_op.create_block_mask(
        mask_mod, rows, None, length, length, device=groups.device
    )


def build_tree_mask(groups: Tensor, parents: Tensor) -> TreeMask:
    """Step 3: the mask for the op itself, which trains on a CPU too and works uncompiled."""
    rows, length = groups.shape
    mask_mod = group_mask(groups, parents)
    return TreeMask.from_mask_mod(mask_mod, rows, length, length, device=groups.device)


def deeper_tree() -> tuple[Tensor, Tensor]:
    """A conversation of three turns ``[1, S]``: group 2 answers group 1, which answers group 0."""
    sizes = torch.tensor([40, 30, 30])
    groups = torch.arange(3).repeat_interleave(sizes)[None]
    return groups, (groups - 1).clamp(min=0)


def main() -> int:
    torch.manual_seed(0)
    groups, parents = pack_rows(rows=2, length=256)
    query = torch.randn(2, 4, 256, 32)
    key, value = torch.randn(2, 2, 2, 256, 32)
    block_mask = build_mask(groups, parents)
    want = attend(query, key, value, block_mask)

    # Step 1: the backend. Nothing else changes; the report says what became of each call.
    report = passes.explain(attend, query, key, value, block_mask)
    print(report)
    if not all(call.rewritten for call in report):
        return 1
    compiled = torch.compile(attend, backend="tree_attn")
    torch.testing.assert_close(compiled(query, key, value, block_mask), want)

    linear = build_mask_in_linear_memory(groups, parents)
    torch.testing.assert_close(attend(query, key, value, linear), want)

    mask = build_tree_mask(groups, parents)
    print(f"the op: {mask.predicate}")
    torch.testing.assert_close(tree_attention(query, key, value, mask, enable_gqa=True), want)

    # Step 4, where a tree is deeper than prompt and completion. The mask by group and parent is
    # not transitive: the third turn does not see the first. The steps above compute just that, as
    # flex does. If all ancestors are meant, say so.
    groups, parents = deeper_tree()
    as_written = build_tree_mask(groups, parents).to_dense()[0]
    all_ancestors = PrefixTree.from_groups(groups, parents).source_mask.to_dense()[0]
    print(
        f"the last of 100 tokens sees {int(as_written[-1].sum())} as the mask is written, "
        f"{int(all_ancestors[-1].sum())} with all its ancestors"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
