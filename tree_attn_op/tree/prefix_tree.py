"""PrefixTree: token sequences that share prefixes, packed with each shared token stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_int
from ..lasting import lasting
from . import packing
from .explicit import groups_layout, nodes_layout, parents_layout
from .inputs import Integers, Ragged, device_of, limits
from .layout import Layout
from .token_tree import TokenTree
from .trie import SortedSequences


class PrefixTree(TokenTree):
    """Trajectories laid out as one sequence in DFS pre-order, and the mask that keeps them apart.

    Made from sequences, whose common prefixes are merged (`from_sequences`, `from_padded`,
    `from_ragged`; `pack` for several trees under a token budget), or from a tree that is known
    (`from_parents`, `from_groups`, `from_nodes`). See :class:`TokenTree` for what it offers.
    """

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Integers],
        *,
        share_lengths: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """Pack `sequences`, storing every common prefix once, at token granularity.

        Args:
            sequences: token ids, each sequence a list, 1-D integer tensor or array of any length,
                also empty. Ids may be any signed 64-bit integers. Equal sequences, and sequences
                that are a prefix of another, share all their tokens.
            share_lengths: [M], how many tokens at the start of each sequence may be shared: with
                prompt lengths, completions are never merged, however equal they are. None: all.
            device: where the tree's tensors go; by default that of the first tensor, else the CPU.

        Returns:
            The tree, which does not depend on the order of the sequences: children of a node are
            in ascending order of their ids, those that may not be shared first.

        Raises:
            TypeError: a sequence is not made of integers of at most 64 bits.
            ValueError: a sequence is not 1-D, an id is above 2^63 - 1, or share_lengths is not one
                number a sequence, 0 or more.
        """
        batch = Ragged.of_sequences(sequences)
        return cls._from_batch(batch, share_lengths, device_of(device, *sequences))

    @classmethod
    def from_padded(
        cls,
        input_ids: Integers,
        attention_mask: Any | None = None,
        *,
        share_lengths: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """`from_sequences` of the rows of a padded batch.

        Args:
            input_ids: integer [B, S].
            attention_mask: [B, S], true or 1 for tokens, false or 0 for padding, which may be on
                either side or in between; None: all are tokens.
            share_lengths: [B], counted in tokens of the row without its padding.
            device: as for `from_sequences`.

        Raises:
            TypeError, ValueError: as for `from_sequences`, or the mask has another shape or other
                values.
        """
        batch = Ragged.of_padded(input_ids, attention_mask)
        return cls._from_batch(batch, share_lengths, device_of(device, input_ids))

    @classmethod
    def from_ragged(
        cls,
        input_ids: Integers,
        cu_seqlens: Integers,
        *,
        share_lengths: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """`from_sequences` of sequences that lie one after another, as for varlen attention.

        Args:
            input_ids: integer [T].
            cu_seqlens: integer [M + 1], from 0 to T: sequence i is
                input_ids[cu_seqlens[i]:cu_seqlens[i + 1]].
            share_lengths: [M].
            device: as for `from_sequences`.

        Raises:
            TypeError, ValueError: as for `from_sequences`, or cu_seqlens does not ascend from 0
                to T.
        """
        batch = Ragged.of_offsets(input_ids, cu_seqlens)
        return cls._from_batch(batch, share_lengths, device_of(device, input_ids))

    @classmethod
    def from_parents(
        cls,
        parents: Integers,
        input_ids: Integers | None = None,
        *,
        attention_mask: Any | None = None,
        ends: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """The tree of a parent array, in which no tokens are merged.

        A batch [B, S] becomes one pack: its rows are separate trees, one after another without
        their padding, so that a model runs once on [1, N] instead of on [B, S]. Who keeps the
        layout [B, S] takes the mask `source_mask` instead, whose values have a batch.

        Args:
            parents: [S] or [B, S], the index of each token's parent in its row, -1 for roots.
                Tokens may be in any order: children before parents, depth-first, breadth-first.
            input_ids: of the same shape; None: the id of a token is its place in the flattened
                array.
            attention_mask: of the same shape, false or 0 for padding; None: no padding.
            ends: [M], places in the flattened array of the trajectories' last tokens, which may
                repeat or be inner tokens; None: all leaves, in ascending order.
            device: as for `from_sequences`.

        Raises:
            TypeError, ValueError: shapes or values that do not fit, a parent that is padding, or
                a cycle.
        """
        layout, source = parents_layout(parents, input_ids, attention_mask, ends)
        return cls._from_layout(layout, device_of(device, parents, input_ids), source.shape)

    @classmethod
    def from_groups(
        cls,
        group_ids: Integers,
        parent_ids: Integers,
        input_ids: Integers | None = None,
        *,
        attention_mask: Any | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """The tree of token groups that name their parent groups, as frameworks mask them.

        A token attends to the tokens of its group up to itself and to all groups above. The mask
        `(q >= k) & ((g[q] == g[k]) | (p[q] == g[k]))` shows the group directly above only: it is
        the same for trees of two levels, and less for deeper ones, where it hides the prompt from
        the second turn on. TreeMask.from_mask_mod takes such a mask as it is.

        Args:
            group_ids: [S] or [B, S], any numbers but -1. A group is a row's tokens of one id, in
                their order; it may be interleaved with others.
            parent_ids: of the same shape, the id of the group above each token's group, of which
                all tokens must stand before it; -1 or the group's own id for roots.
            input_ids, attention_mask, device: as for `from_parents`, which also says what becomes
                of a batch. The trajectories are those of all leaf groups, by their last tokens.

        Raises:
            TypeError, ValueError: shapes or values that do not fit, a group with several parents,
                a parent that is no group or that ends after its child begins.
        """
        layout, source = groups_layout(group_ids, parent_ids, input_ids, attention_mask)
        device = device_of(device, group_ids, parent_ids, input_ids)
        return cls._from_layout(layout, device, source.shape)

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[tuple[int, Integers]],
        *,
        ends: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixTree:
        """The tree of nodes (parent, tokens), in which no tokens are merged.

        Args:
            nodes: each the index of its parent in this list or -1, and its token ids: a list, 1-D
                integer tensor or array, also empty. Nodes may be in any order.
            ends: [M], the nodes at whose last tokens the trajectories end, which may repeat or be
                inner nodes; None: all leaf nodes, in ascending order.
            device: as for `from_sequences`.

        Returns:
            The tree, siblings in the order of the list; `source` counts tokens through the list.

        Raises:
            TypeError, ValueError: parents or ends that are no nodes, tokens that are no integers,
                or a cycle.
        """
        layout, source = nodes_layout(nodes, ends)
        tokens = (node[1] for node in nodes)
        return cls._from_layout(layout, device_of(device, *tokens), source.shape)

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Integers],
        max_tokens: int,
        *,
        num_ranks: int = 1,
        min_trees: int = 0,
        share_lengths: Integers | None = None,
        device: torch.device | str | None = None,
    ) -> list[PrefixTree]:
        """Divide `sequences` over trees of at most `max_tokens` packed tokens each.

        Sequences that share much come into one tree. The trees of a batch never have more tokens
        in total than those of sequence-by-sequence first fit in the order given. The result is
        the same wherever it is computed.

        Args:
            sequences: as for `from_sequences`.
            max_tokens: the token budget of a tree.
            num_ranks: the number of trees is a multiple of it. Rank r of a data-parallel group
                takes `trees[r::num_ranks]`: as many trees as all ranks, those of one step of
                similar size.
            min_trees: at least so many trees. Where each rank packs sequences of its own, pack,
                take the maximum of the numbers over the ranks, and pass it here.
            share_lengths: as for `from_sequences`.
            device: as for `from_sequences`.

        Returns:
            The trees, by falling number of tokens; to reach the number asked for, the last are
            empty, without a trajectory. `trajectory_ids` says which sequences a tree has.

        Raises:
            TypeError, ValueError: as for `from_sequences`, a number that is not positive, or a
                sequence of more than `max_tokens` tokens.
        """
        for name, number, least in (
            ("max_tokens", max_tokens, 1),
            ("num_ranks", num_ranks, 1),
            ("min_trees", min_trees, 0),
        ):
            check_int(name, number, least)
        batch = Ragged.of_sequences(sequences)
        too_long = np.flatnonzero(batch.lengths > max_tokens)
        if too_long.size:
            raise ValueError(
                f"sequence {too_long[0]} has {batch.lengths[too_long[0]]} tokens, more than the "
                f"max_tokens of {max_tokens}"
            )
        device = device_of(device, *sequences)
        ordered = SortedSequences.of(batch, limits(share_lengths, batch.lengths))
        bins = packing.plan(ordered, max_tokens)
        count = max(len(bins), min_trees)
        count += -count % num_ranks
        bins += [np.empty(0, dtype=np.int64)] * (count - len(bins))
        subsets = (ordered.subset(one) for one in bins)
        return [
            cls._from_layout(one.layout(), device, trajectory_ids=np.sort(one.order))
            for one in subsets
        ]

    @classmethod
    def _from_batch(
        cls, batch: Ragged, share_lengths: Integers | None, device: torch.device
    ) -> PrefixTree:
        ordered = SortedSequences.of(batch, limits(share_lengths, batch.lengths))
        return cls._from_layout(ordered.layout(), device)

    @classmethod
    def _from_layout(
        cls,
        layout: Layout,
        device: torch.device | str | None,
        source_shape: tuple[int, ...] | None = None,
        trajectory_ids: np.ndarray | None = None,
    ) -> PrefixTree:
        def tensor(array: np.ndarray) -> Tensor:
            return lasting(torch.from_numpy(array).to(device))

        ends = layout.ends
        lengths = np.zeros_like(ends)
        lengths[ends >= 0] = layout.depth[ends[ends >= 0]] + 1
        if trajectory_ids is None:
            trajectory_ids = np.arange(ends.size)
        return cls(
            input_ids=tensor(layout.input_ids),
            position_ids=tensor(layout.depth),
            parents=tensor(layout.parents),
            subtree_end=tensor(layout.subtree_end),
            trajectory_ends=tensor(ends),
            trajectory_lengths=tuple(lengths.tolist()),
            trajectory_ids=tuple(trajectory_ids.tolist()),
            source=None if layout.source is None else tensor(layout.source),
            source_shape=source_shape,
        )
