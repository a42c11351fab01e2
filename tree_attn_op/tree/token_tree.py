"""What a packed tree offers: its tensors and mask, and the way to trajectories and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_device, check_int, check_number, check_tensor
from ..lasting import lasting
from ..mask import TreeMask
from . import layout, training
from .indexing import take
from .scatter import Reduction, flatten_values, scatter_values
from .statistics import TreeStatistics
from .training import LossTerms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.nn.attention.flex_attention import BlockMask

Tree = TypeVar("Tree", bound="TokenTree")


@dataclass(frozen=True, eq=False, repr=False)
class TokenTree:
    """A token tree in DFS pre-order and the trajectories that run through it.

    Every token of the pack is one node of the tree: it attends to itself and to its ancestors,
    which are the tokens before it in each trajectory that runs through it. N is the number of
    packed tokens, M that of trajectories and T that of the tokens of all trajectories, which can
    be much larger than N; what is as large as T is computed when it is asked for. All tensors are
    on one device. A tree is never changed.

    Attributes:
        input_ids: int64 [N], the token ids in DFS pre-order.
        position_ids: int64 [N], the depth of each token: its index in its trajectories.
        parents: int64 [N], the pack position of each token's parent, -1 for roots.
        subtree_end: int64 [N], one past the last pack position of each token's descendants.
        trajectory_ends: int64 [M], the pack position of each trajectory's last token, -1 for one
            without tokens.
        trajectory_lengths: the number of tokens of each trajectory.
        trajectory_ids: which sequence of the batch each trajectory is: 0 ... M-1, but for the
            trees of `pack`, which have some of a batch's sequences each, in ascending order.
        source: int64 [N] or None. Of trees from parents, groups and nodes, where each token stands
            in the flattened arrays that were given: `x.flatten(0, 1)[tree.source]` takes per-token
            data [B, S, ...] to the pack. None where equal tokens were merged.
        source_shape: the shape (S,) or (B, S) of those arrays, or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    parents: Tensor
    subtree_end: Tensor
    trajectory_ends: Tensor
    trajectory_lengths: tuple[int, ...]
    trajectory_ids: tuple[int, ...]
    source: Tensor | None = None
    source_shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """M, the number of trajectories."""
        return len(self.trajectory_lengths)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} trajectories, {self.num_tokens} tokens packed of "
            f"{self.num_trajectory_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """N, the number of tokens of the pack."""
        return self.input_ids.numel()

    @cached_property
    def num_trajectory_tokens(self) -> int:
        """T, the number of tokens of all trajectories unpacked."""
        return sum(self.trajectory_lengths)

    @property
    def tree_token_ratio(self) -> float:
        """N / T, the share of tokens that is left to compute: 1.0 where nothing is shared."""
        return self.num_tokens / self.num_trajectory_tokens if self.num_trajectory_tokens else 1.0

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.input_ids.device

    def to(self: Tree, device: torch.device | str) -> Tree:
        """The same tree on another device."""
        device = as_device(device)
        moved: dict[str, Any] = {
            field.name: lasting(value.to(device))
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    def __getstate__(self) -> dict[str, Any]:
        # What is computed on demand, which may be large, is computed anew where it is unpickled.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, lasting(value) if isinstance(value, Tensor) else value)

    # Attention

    @cached_property
    def mask(self) -> TreeMask:
        """The mask [1, N, N]: a token sees itself and its ancestors (`q >= k & q < k0`).

        k0 is `subtree_end`: in DFS pre-order the descendants of k are the positions k to k0 - 1.
        """
        end = self.subtree_end.to(self._position_dtype)
        return TreeMask.from_predicate(
            "q >= k & q < k0",
            end.new_empty(1, 0, self.num_tokens),
            end.view(1, 1, -1),
            self.num_tokens,
            self.num_tokens,
        )

    @property
    def block_mask(self) -> BlockMask:
        """The mask as a flex BlockMask, for any attention that takes one."""
        return self.mask.block_mask

    @cached_property
    def source_mask(self) -> TreeMask:
        """The same mask in the layout that the tree was made from: [1, S, S] or [B, S, S].

        `q0 >= k0 & q0 < k1`, where q0 and k0 are the pack positions of tokens and k1 the ends of
        their subtrees; for a batch the values are [B, 1, S] and [B, 2, S]. Padding neither sees
        nor is seen.

        Raises:
            ValueError: the tree was made from sequences, whose equal tokens were merged.
        """
        if self.source is None or self.source_shape is None:
            raise ValueError(
                "a tree from sequences has no source_mask: equal tokens were merged; use mask, "
                "or make the tree from parents, groups or nodes"
            )
        batch, size = (1, *self.source_shape)[-2:]
        dtype = self._position_dtype
        never = torch.iinfo(dtype).max
        position = torch.arange(self.num_tokens, dtype=dtype, device=self.device)

        def laid_out(values: Tensor, padding: int) -> Tensor:
            row = torch.full((batch * size,), padding, dtype=dtype, device=self.device)
            row[self.source] = values.to(dtype)
            return row.view(batch, 1, size)

        k_vals = torch.cat([laid_out(position, never), laid_out(self.subtree_end, never)], 1)
        q_vals = laid_out(position, -1)
        return TreeMask.from_predicate("q0 >= k0 & q0 < k1", q_vals, k_vals, size, size)

    @property
    def _position_dtype(self) -> torch.dtype:
        # Positions fit in 32 bits for any pack that fits on a device, and compare faster there.
        return torch.int32 if self.num_tokens < torch.iinfo(torch.int32).max else torch.int64

    # Trajectories

    @cached_property
    def trajectory_positions(self) -> Tensor:
        """int64 [T], the pack positions of all trajectories, one after another."""
        positions = layout.trajectory_positions(
            self.parents.cpu().numpy(),
            self.position_ids.cpu().numpy(),
            self.trajectory_ends.cpu().numpy(),
        )
        return lasting(torch.from_numpy(positions).to(self.device))

    def positions(self, index: int) -> Tensor:
        """The pack positions of trajectory `index`: int64 [its length], strictly ascending.

        Raises:
            IndexError: there is no such trajectory.
        """
        check_int("index", index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: trajectory {index} of a tree of {len(self)}")
        end = self.trajectory_ends[index % len(self)]
        # A token's ancestors are those before it whose subtrees have not ended.
        position = torch.arange(self.num_tokens, device=self.device)
        return torch.nonzero((position <= end) & (self.subtree_end > end)).squeeze(1)

    @cached_property
    def multiplicity(self) -> Tensor:
        """int64 [N], how many trajectories run through each token."""
        ends = self.trajectory_ends
        ended = torch.bincount(ends[ends >= 0] + 1, minlength=self.num_tokens + 1).cumsum(0)
        return lasting(ended[self.subtree_end] - ended[:-1])

    def unpack(self, x: Tensor, dim: int = -1) -> list[Tensor]:
        """Split a per-token tensor of the pack into one tensor a trajectory; differentiable.

        Args:
            x: any tensor of size N along `dim`, for instance logits [1, N, V] with `dim=1`.
            dim: the token dimension.

        Returns:
            For each trajectory i the values at `positions(i)` along `dim`, in its token order.

        Raises:
            ValueError: `x` is not of size N along `dim`.
        """
        check_tensor("x", x)
        check_int("dim", dim)
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not have the pack's {self.num_tokens} tokens "
                f"along dim {dim}"
            )
        values = take(x, self.trajectory_positions.to(x.device), dim)
        return list(values.split(self.trajectory_lengths, dim))

    def scatter(
        self,
        values: Tensor | Sequence[Tensor | float],
        reduction: Reduction = "sum",
        *,
        tolerance: float = 0.0,
    ) -> Tensor:
        """Lay per-trajectory values (advantages, old log-probs, loss masks) onto the pack.

        The other way of `unpack`; differentiable. With "sum" of weights a loss over trajectories
        becomes one over the pack: sum over i, t of weight[i][t] * f(token t of i) equals
        sum over n of scatter(weight)[n] * f(token n).

        Args:
            values: for each trajectory a tensor [its length, ...], or a number for all its tokens;
                or one tensor [T, ...] with the trajectories one after another, which a padded
                batch [M, S] is after `batch[attention_mask]`.
            reduction: what a shared token gets. "sum" and "mean" are over the trajectories through
                it (a sum of booleans counts), "first" is the value of the first trajectory, and
                "equal" that value too, once it is checked that all trajectories agree on it.
            tolerance: the largest difference that "equal" lets pass. NaN equals NaN.

        Returns:
            [N, ...], on the device of the values; 0 for tokens that no trajectory runs through.

        Raises:
            ValueError: values that do not fit the trajectories, or with "equal" disagree.
            TypeError: the mean of integers.
        """
        if check_number("tolerance", tolerance) < 0 or math.isnan(tolerance):
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        flat = flatten_values(values, self.trajectory_lengths, self.device)
        return scatter_values(
            flat,
            self.trajectory_positions,
            self.multiplicity,
            self.trajectory_lengths,
            reduction,
            tolerance,
        )

    # Training

    @cached_property
    def loss_terms(self) -> LossTerms:
        """Which position predicts which token: several tokens at a fork; see :class:`LossTerms`.

        The summed loss of the unpacked batch is the sum over terms of
        multiplicity * cross_entropy(logits[source], label).
        """
        return LossTerms.of(self.parents, self.input_ids, self.multiplicity)

    def token_logprobs(self, logits: Tensor, *, temperature: float = 1.0) -> Tensor:
        """The log-probability of each packed token given those before it, once; differentiable.

        Needs memory for one gradient of the logits and a bounded number of rows in float32.

        Args:
            logits: [N, V] or [1, N, V], of the model's run over the pack; any float dtype.
            temperature: that the logits are divided by.

        Returns:
            [N], float32 (float64 for float64): entry n is log p(token n | its ancestors), from the
            logits of its parent. Roots, which nothing predicts, get 0.

        Raises:
            TypeError, ValueError: logits of another dtype, shape or device, with fewer columns
                than the token ids need, or a temperature that is not positive.
        """
        logits = training.check_logits(logits, self.num_tokens)
        return self._of_tokens(training.term_logprobs(logits, self.loss_terms, temperature))

    def token_entropy(self, logits: Tensor, *, temperature: float = 1.0) -> Tensor:
        """The entropy in nats of the distribution that predicts each packed token.

        Args:
            logits, temperature: as for `token_logprobs`, and so the errors.

        Returns:
            [N], float32 (float64 for float64), differentiable; 0 for roots. The children of a fork
            have one distribution and so the same entropy.
        """
        logits = training.check_logits(logits, self.num_tokens)
        return self._of_tokens(training.term_entropy(logits, self.loss_terms, temperature))

    def gather_logprobs(self, logits: Tensor, *, temperature: float = 1.0) -> list[Tensor]:
        """The log-probability of each trajectory's tokens, as separate runs would give them.

        Args:
            logits, temperature: as for `token_logprobs`, and so the errors.

        Returns:
            For each trajectory [its length], aligned with its tokens: entry t is
            log p(token t | tokens before t), and entry 0 is 0. Of an unpacked run over trajectory
            i entries 1, 2, ... are `logits_i[:-1].log_softmax(-1)` at tokens 1, 2, ....
        """
        return self.unpack(self.token_logprobs(logits, temperature=temperature))

    def gather_entropy(self, logits: Tensor, *, temperature: float = 1.0) -> list[Tensor]:
        """The entropy of each trajectory's tokens: `token_entropy` by trajectory.

        Args:
            logits, temperature: as for `token_logprobs`, and so the errors.

        Returns:
            For each trajectory [its length], aligned as `gather_logprobs` is.
        """
        return self.unpack(self.token_entropy(logits, temperature=temperature))

    def _of_tokens(self, of_terms: Tensor) -> Tensor:
        """Values of loss terms [E] at the tokens that they predict, 0 at roots: [N]."""
        zeros = of_terms.new_zeros(self.num_tokens)
        return zeros.index_put((self.loss_terms.token,), of_terms)

    # About the tree

    @cached_property
    def statistics(self) -> TreeStatistics:
        """How much the tree saves, and its shape."""
        return TreeStatistics.of(
            self.parents.cpu().numpy(),
            self.position_ids.cpu().numpy(),
            np.array(self.trajectory_lengths, dtype=np.int64),
        )

    def plot(self, axes: Axes | None = None) -> Figure:
        """Draw the tree: unbranched stretches as bars over depth, one row a leaf.

        Args:
            axes: matplotlib axes to draw in; None: a figure of its own.

        Returns:
            The figure: `tree.plot().savefig(path)` writes it, notebooks show it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        # Not at the top: few programs draw.
        from .plot import plot_tree

        return plot_tree(
            self.parents.cpu().numpy(),
            self.position_ids.cpu().numpy(),
            self.subtree_end.cpu().numpy(),
            self.multiplicity.cpu().numpy(),
            axes,
        )

    def plot_mask(self) -> Figure:
        """Draw the mask and its tiles; see ``tree_attn_op.tree.plot.plot_mask``."""
        from .plot import plot_mask

        return plot_mask(self.mask)
