"""TreeMask: a predicate, the values that it compares, and the block lists of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import validation
from .arguments import as_device, check_callable, check_int, check_tensor, check_type
from .blocks import BlockLists, dense_meaning
from .lasting import lasting
from .lowering.cache import values_of_mask_mod
from .mask_mod import MaskMod, mask_mod_of
from .predicate import Predicate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DEFAULT_BLOCK_SIZE = 128


class TreeMask:
    """Which query tokens see which key tokens, in the form that the op takes. Immutable.

    A pair is visible if its block is listed as full, or listed as partial and the predicate holds.

    Args and attributes:
        predicate: the mask predicate.
        q_vals: the rows ``q0, q1, ...``, int32 or int64 ``[B or 1, rows, q_len]``.
        k_vals: the rows ``k0, k1, ...``, of the same dtype, ``[B or 1, rows, kv_len]``.
        lists: the block lists.

    Raises:
        ValueError, TypeError: on construction, where these do not fit each other.
    """

    # No dataclass: FSDP takes dataclasses among a module's arguments apart and builds them anew
    # for every layer, which would lose the refined lists each time.

    predicate: Predicate
    q_vals: Tensor
    k_vals: Tensor
    lists: BlockLists
    _refined: dict[tuple[int, int], BlockLists]
    _lists_of_op: bool

    def __init__(
        self, predicate: Predicate, q_vals: Tensor, k_vals: Tensor, lists: BlockLists
    ) -> None:
        refined: dict[tuple[int, int], BlockLists] = {}
        check_type("predicate", predicate, Predicate, "a Predicate")
        check_tensor("q_vals", q_vals)
        check_tensor("k_vals", k_vals)
        check_type("lists", lists, BlockLists, "BlockLists")
        if not torch.compiler.is_compiling():
            q_vals, k_vals, lists = lasting(q_vals), lasting(k_vals), _lasting_lists(lists)
        for name, given in (
            ("predicate", predicate),
            ("q_vals", q_vals),
            ("k_vals", k_vals),
            ("lists", lists),
            ("_refined", refined),
            ("_lists_of_op", False),
        ):
            object.__setattr__(self, name, given)
        # While torch.compile traces, the values are not there yet: the op checks them as it runs.
        if not torch.compiler.is_compiling():
            self._check()

    def _check(self) -> None:
        q_len, kv_len, device = self.q_len, self.kv_len, self.q_vals.device
        text = str(self.predicate)
        validation.check_values(text, self.q_vals, self.k_vals, q_len, kv_len, device)
        validation.check_lists(
            self.lists.tensors,
            q_len,
            kv_len,
            self.lists.q_block_size,
            self.lists.kv_block_size,
            device,
        )
        batches = {self.batch_size, self.lists.kv_num_blocks.shape[0]} - {1}
        if len(batches) > 1:
            raise ValueError(
                "values and block lists must have one batch size or 1, got "
                f"{self.batch_size} and {self.lists.kv_num_blocks.shape[0]}"
            )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a TreeMask is immutable")

    @staticmethod
    def from_predicate(
        predicate: str | Predicate,
        q_vals: Tensor,
        k_vals: Tensor,
        q_len: int,
        kv_len: int,
        *,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    ) -> TreeMask:
        """The mask that a predicate says, with block lists derived from it.

        Args:
            predicate: the predicate or its text.
            q_vals: int32 or int64 ``[B or 1, rows, q_len]``.
            k_vals: of the same dtype and device, ``[B or 1, rows, kv_len]``.
            q_len, kv_len: lengths.
            BLOCK_SIZE: tokens a block, a multiple of 16; or one number for queries, one for keys.

        Raises:
            PredicateError: malformed text, or values that do not fit it.
            ValueError: values of another length, or an unsupported block size.
        """
        if isinstance(predicate, str):
            predicate = Predicate.parse(predicate)
        check_type("predicate", predicate, Predicate, "a Predicate or its text")
        check_tensor("q_vals", q_vals)
        check_tensor("k_vals", k_vals)
        validation.check_counts(q_len=q_len, kv_len=kv_len)
        q_block, kv_block = validation.block_sizes(BLOCK_SIZE)
        tensors = torch.ops.tree_attn_op.block_lists(
            q_vals,
            k_vals,
            str(predicate),
            q_len,
            kv_len,
            None,
            None,
            None,
            None,
            q_block,
            kv_block,
            q_block,
            kv_block,
        )
        lists = BlockLists.of(tensors, q_block, kv_block, q_len, kv_len)
        return TreeMask.of_op_lists(predicate, q_vals, k_vals, lists)

    @staticmethod
    def of_op_lists(
        predicate: Predicate, q_vals: Tensor, k_vals: Tensor, lists: BlockLists
    ) -> TreeMask:
        """A mask whose lists the op ``block_lists`` made, so that kernels may follow them.

        Other lists go through that op first; see :meth:`block_lists_for`.

        Args:
            predicate, q_vals, k_vals, lists: as of the class.
        """
        mask = TreeMask(predicate, q_vals, k_vals, lists)
        object.__setattr__(mask, "_lists_of_op", True)
        return mask

    @staticmethod
    def from_mask_mod(
        mask_mod: MaskMod,
        B: int | None,
        Q_LEN: int,
        KV_LEN: int,
        *,
        device: torch.device | str = "cpu",
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    ) -> TreeMask:
        """The mask of a flex_attention mask_mod, once it is proven what it means.

        Args:
            mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, as flex takes it.
            B: batch size; None: 1.
            Q_LEN, KV_LEN: lengths.
            device: of the mask; the captured tensors' own.
            BLOCK_SIZE: tokens a block, a multiple of 16; or one number for queries, one for keys.

        Raises:
            UnsupportedMask: the mask is no separable predicate; ``.reason`` says why.
            ValueError: a size that is no count.
        """
        batch = 1 if B is None else B
        check_callable("mask_mod", mask_mod)
        validation.check_counts(B=batch, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
        device = as_device(device)
        predicate, q_vals, k_vals = values_of_mask_mod(mask_mod, batch, Q_LEN, KV_LEN, device)
        return TreeMask.from_predicate(
            predicate, q_vals, k_vals, Q_LEN, KV_LEN, BLOCK_SIZE=BLOCK_SIZE
        )

    @staticmethod
    def from_block_mask(block_mask: BlockMask) -> TreeMask:
        """The mask of a flex BlockMask: its block lists as they are, with its mask_mod proven.

        Raises:
            UnsupportedMask: the mask_mod is no separable predicate; ``.reason`` says why.
            TypeError: it is no BlockMask.
        """
        lists = BlockLists.from_block_mask(block_mask)
        predicate, q_vals, k_vals = values_of_mask_mod(
            block_mask.mask_mod,
            lists.kv_num_blocks.shape[0],
            lists.q_len,
            lists.kv_len,
            lists.kv_num_blocks.device,
        )
        return TreeMask(predicate, q_vals, k_vals, lists)

    @property
    def q_len(self) -> int:
        """Number of query tokens."""
        return self.lists.q_len

    @property
    def kv_len(self) -> int:
        """Number of key tokens."""
        return self.lists.kv_len

    @property
    def batch_size(self) -> int:
        """Batch rows that the values differ in; 1: one mask for all."""
        return max(self.q_vals.shape[0], self.k_vals.shape[0])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch_size, heads, q_len, kv_len)``, as of a flex BlockMask; heads is mostly 1."""
        batch, heads = self.lists.kv_num_blocks.shape[:2]
        return max(batch, self.batch_size), heads, self.q_len, self.kv_len

    @property
    def ndim(self) -> int:
        """4. Models that are given a mask ask for this, and build none of their own if it is 4."""
        return 4

    @property
    def device(self) -> torch.device:
        """Where the values and the block lists are."""
        return self.q_vals.device

    def __repr__(self) -> str:
        return (
            f"TreeMask({str(self.predicate)!r}, batch={self.batch_size}, q_len={self.q_len}, "
            f"kv_len={self.kv_len}, device={self.device})"
        )

    def to_dense(self) -> Tensor:
        """The mask pair by pair, bool ``[B, q_len, kv_len]``; B is 1 if all batch rows are alike.

        ``[B, H, q_len, kv_len]`` where the block lists differ by head. Quadratic in the length:
        for tests, pictures and small masks.
        """
        dense = dense_meaning(self.predicate, self.q_vals, self.k_vals, self.lists)
        return dense.squeeze(1)

    def to(self, device: torch.device | str) -> TreeMask:
        """The mask on another device; this one if it is there."""
        device = as_device(device)
        if device == self.device:
            return self
        make = TreeMask.of_op_lists if self._lists_of_op else TreeMask
        return make(
            self.predicate,
            self.q_vals.to(device),
            self.k_vals.to(device),
            self.lists.map(lambda tensor: tensor.to(device)),
        )

    def block_lists_for(self, q_block_size: int, kv_block_size: int) -> BlockLists:
        """Lists of finer blocks with the same meaning; computed once for each pair of sizes.

        On a GPU, lists that were not made by the op ``block_lists`` are refined even to their own
        size: whatever they hold, kernels can then follow them (see ``list_checks``).

        Args:
            q_block_size, kv_block_size: divisors of the mask's own block sizes.

        Raises:
            TypeError, ValueError: they are not.
        """
        own = self.lists
        for name, size, whole in (
            ("q_block_size", q_block_size, own.q_block_size),
            ("kv_block_size", kv_block_size, own.kv_block_size),
        ):
            check_int(name, size)
            validation.check_block_size(name, size)
            if whole % size:
                raise ValueError(f"{name} must divide the mask's own of {whole}, got {size}")
        can_follow = self._lists_of_op or self.device.type == "cpu"
        if can_follow and (q_block_size, kv_block_size) == (own.q_block_size, own.kv_block_size):
            return own
        # A graph that is being compiled computes them itself: what it holds must not be kept here.
        keep = not torch.compiler.is_compiling()
        if keep and (q_block_size, kv_block_size) in self._refined:
            return self._refined[q_block_size, kv_block_size]
        tensors = torch.ops.tree_attn_op.block_lists(
            self.q_vals,
            self.k_vals,
            str(self.predicate),
            *(own.q_len, own.kv_len),
            *own.tensors[:4],
            *(own.q_block_size, own.kv_block_size, q_block_size, kv_block_size),
        )
        refined = BlockLists.of(tensors, q_block_size, kv_block_size, own.q_len, own.kv_len)
        if keep:
            refined = self._refined[q_block_size, kv_block_size] = _lasting_lists(refined)
        return refined

    @property
    def mask_mod(self) -> MaskMod:
        """The predicate as a flex mask_mod over ``q_vals`` and ``k_vals``."""
        return mask_mod_of(self.predicate, self.q_vals, self.k_vals)

    @property
    def block_mask(self) -> BlockMask:
        """A flex BlockMask of the same meaning, for any attention that takes one.

        Its lists are those that flex's own builder makes, its batch that of the values or of the
        lists, and its mask_mod is :attr:`mask_mod`.
        """
        # Not at the top: that module is built on this one.
        from .block_mask import block_mask_of

        return block_mask_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_refined": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: lasting(state[name]) for name in ("q_vals", "k_vals")}
        self.__dict__.update(state, **kept, lists=_lasting_lists(state["lists"]))


def _lasting_lists(lists: BlockLists) -> BlockLists:
    made_for_inference = any(one is not None and one.is_inference() for one in lists.tensors)
    return lists.map(lasting) if made_for_inference else lists


def finest_common(size: int, wanted: int) -> int:
    """The greatest divisor of ``size`` that divides ``wanted``: lists so fine can be had."""
    while wanted:  # Euclid's algorithm: Dynamo traces this, but not math.gcd of a symbolic size
        size, wanted = wanted, size % wanted
    return size
