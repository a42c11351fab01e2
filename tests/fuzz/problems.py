"""Random calls of the op: sizes, layouts, values, block lists and magnitudes from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tree_attn_op.blocks import BlockLists, compact
from tree_attn_op.predicate import Predicate
from tree_attn_op.reference import allowed_from_lists

PREDICATES = (
    "q >= k & q < k0",
    "q >= k & (q0 == k0 | q1 == k0)",
    "q0 >= k0 & q0 < k1",
    "q >= k & q0 == k0 & q - k < 20",
    "q0 == k0 & q1 - k1 < 2",
    "q0 - k0 < 3 | k1 != 2",
    "q1 != 0 & k0 >= 1",
    "~(q0 < k0 & k1 > 1) & (q1 != k0 | q - k > 17)",
    "q < 9 | k < 4",
    "True",
    "False",
)

LAYOUTS = (
    "BHSD",
    "BSHD",
    "SBHD",
    "DSHB",
    "sliced",
    "step 2",
    "one batch",
    "one head",
    "one token",
    "overlapping",
)
"""Orders in memory, slices of something larger, expanded dimensions, rows that share memory."""

MAGNITUDES = ("usual",) * 8 + ("tiny", "large", "outliers", "outliers", "integers", "zero")


@dataclass(frozen=True)
class Choices:
    """What a case may be drawn from; the defaults are for a CPU.

    On a GPU each combination of some of these is a kernel to be compiled, so that there the tests
    fix them and draw what remains.
    """

    dtypes: Sequence[torch.dtype] = (
        torch.float64,
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    predicates: Sequence[str] = PREDICATES
    heads: Sequence[tuple[int, int]] = ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (3, 3))
    dims: Sequence[tuple[int, int]] = ((1, 1), (3, 5), (8, 8), (16, 16), (31, 17), (64, 64))
    blocks: Sequence[tuple[int, int]] = (
        (16, 16),
        (32, 32),
        (48, 16),
        (64, 64),
        (16, 128),
        (128, 128),
    )
    values: Sequence[torch.dtype] = (torch.int32, torch.int64)
    layouts: Sequence[str] = LAYOUTS
    full_lists: Sequence[bool] = (True, True, True, False)
    longest: int = 300
    device: str = "cpu"


@dataclass(frozen=True)
class Problem:
    """One call of the op with gradients to send back, and the pairs that it may use."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_vals: Tensor
    k_vals: Tensor
    predicate: str
    lists: BlockLists
    scale: float
    grad_out: Tensor
    grad_lse: Tensor | None
    allowed: Tensor
    description: str

    @property
    def mask_arguments(self) -> tuple:
        """The op's arguments after query, key and value."""
        sizes = (self.lists.q_block_size, self.lists.kv_block_size)
        return (self.q_vals, self.k_vals, self.predicate, *self.lists.tensors, *sizes, self.scale)


def draw(seed: int, choices: Choices) -> Problem:
    """The case of a seed."""
    return _Draw(seed, choices).problem()


class _Draw:
    """Everything that is drawn for one case, in order."""

    def __init__(self, seed: int, choices: Choices) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.choices = choices
        self.notes: list[str] = []

    def choose(self, name: str, options: Sequence) -> Any:
        chosen = self.random.choice(tuple(options))
        self.notes.append(f"{name}={chosen}")
        return chosen

    def length(self, name: str) -> int:
        near = self.random.choice((1, 16, 32, 64, 64, 128, 128))
        anywhere = self.random.randint(1, self.choices.longest)
        size = self.random.choice((near, near + 1, max(near - 1, 1), anywhere))
        return self.choose(name, (min(size, self.choices.longest),))

    def problem(self) -> Problem:
        dtype = self.choose("dtype", self.choices.dtypes)
        heads, kv_heads = self.choose("heads", self.choices.heads)
        dim, value_dim = self.choose("dims", self.choices.dims)
        batch = self.choose("batch", (1, 2, 3))
        q_len = self.length("q_len")
        kv_len = q_len if self.random.random() < 0.5 else self.length("kv_len")
        predicate = self.choose("predicate", self.choices.predicates)
        q_vals, k_vals = self.values(Predicate.parse(predicate), batch, q_len, kv_len)
        lists = self.lists(Predicate.parse(predicate), q_vals, k_vals, batch, heads)
        allowed = allowed_from_lists(
            Predicate.parse(predicate), q_vals, k_vals, lists.tensors, *lists.sizes
        )
        query = self.operand("query", (batch, heads, q_len, dim), dtype)
        key = self.operand("key", (batch, kv_heads, kv_len, dim), dtype)
        value = self.operand("value", (batch, kv_heads, kv_len, value_dim), dtype)
        unread = _unread_keys(lists)
        if unread.any() and self.choose("unread keys are NaN", (True, False)):
            for tensor in (key, value):
                if not self.shares_memory(tensor):
                    tensor[:, :, unread] = torch.nan
        grad_out = self.operand("grad_out", (batch, heads, q_len, value_dim), dtype)
        grad_lse = None
        if self.choose("through_lse", (True, False)):
            lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            grad_lse = self.operand("grad_lse", (batch, heads, q_len, 1), lse_dtype)[..., 0]
        usual = dim**-0.5
        scale = self.choose("scale", (usual, usual, usual, -0.3, 0.0, 3.0, 40.0, 1e-6))
        device = self.choices.device
        return Problem(
            query,
            key,
            value,
            q_vals.to(device),
            k_vals.to(device),
            predicate,
            lists.map(lambda tensor: tensor.to(device)),
            scale,
            grad_out,
            grad_lse,
            allowed.to(device),
            ", ".join(self.notes),
        )

    # Query, key, value and gradients

    def operand(self, name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        """A random ``[B, H, S, D]`` tensor on the device, of some layout and magnitude."""
        layout = self.choose(f"{name} layout", self.choices.layouts)
        magnitude = self.choose(f"{name} magnitude", MAGNITUDES)
        batch, heads, length, dim = shape

        def stored(*sizes: int) -> Tensor:
            return self.numbers(sizes, magnitude, dtype).to(self.choices.device)

        if layout == "one batch":
            return stored(1, heads, length, dim).expand(shape)
        if layout == "one head":
            return stored(batch, 1, length, dim).expand(shape)
        if layout == "one token":
            return stored(batch, heads, 1, dim).expand(shape)
        if layout == "overlapping":
            # Each row begins within the one before it, each head within the rows of the last.
            step = max(16, dim // 32 * 16)
            strides = (step * length, 16, step, 1)
            size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            return stored(size).as_strided(shape, strides)
        if layout in ("sliced", "step 2"):
            # What lies around and between must not be read.
            around = (batch + 1, 2 * heads, 2 * length + 5, 2 * dim)
            tensor = torch.full(around, torch.nan, dtype=dtype, device=self.choices.device)
            if layout == "sliced":
                tensor = tensor[1:, heads:, 2 : 2 + length, :dim]
            else:
                tensor = tensor[1:, ::2, 5::2, ::2]
            return tensor.copy_(stored(*shape))
        order = ["BHSD".index(letter) for letter in layout]
        return stored(*(shape[at] for at in order)).permute([order.index(at) for at in range(4)])

    @staticmethod
    def shares_memory(tensor: Tensor) -> bool:
        """Whether some of its elements are one number."""
        sizes = [
            (stride, size)
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            if size > 1
        ]
        extent = 1
        for stride, size in sorted(sizes):
            if stride < extent:
                return True
            extent = stride * (size - 1) + extent
        return False

    def numbers(self, shape: Sequence[int], magnitude: str, dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        if magnitude == "zero":
            return torch.zeros(*shape, dtype=dtype)
        if magnitude == "tiny":
            numbers *= 1e-3
        elif magnitude == "large":
            # Products of two must fit into float16, where results are rounded to it.
            numbers *= 8.0 if dtype == torch.float16 else 1e3
        elif magnitude == "outliers":
            far = torch.rand(*shape, generator=self.generator) < 0.02
            numbers = torch.where(far, numbers * 30.0, numbers)
        elif magnitude == "integers":
            numbers = numbers.round()
        return numbers.to(dtype)

    # Values and block lists

    def values(
        self, predicate: Predicate, batch: int, q_len: int, kv_len: int
    ) -> tuple[Tensor, Tensor]:
        dtype = self.choose("values", self.choices.values)
        largest = self.choose(
            "largest value", (2, 3, 6, 6, max(q_len, kv_len), torch.iinfo(dtype).max)
        )
        rows = []
        for count, length in ((predicate.num_q_rows, q_len), (predicate.num_k_rows, kv_len)):
            shape = (self.random.choice((1, batch)), count + self.random.choice((0, 1)), length)
            least = -largest if largest > 2**30 else 0
            made = torch.randint(least, largest, shape, generator=self.generator)
            if self.random.random() < 0.3:
                made = made.sort(-1).values
            made = made.to(dtype)
            if self.random.random() < 0.3:
                made = made.repeat_interleave(2, -1)[..., ::2]
            rows.append(made)
        return rows[0], rows[1]

    def lists(
        self, predicate: Predicate, q_vals: Tensor, k_vals: Tensor, batch: int, heads: int
    ) -> BlockLists:
        q_block, kv_block = self.choose("blocks", self.choices.blocks)
        q_len, kv_len = q_vals.shape[2], k_vals.shape[2]
        kind = self.choose("lists", ("derived", "derived", "made by hand"))
        if kind == "derived":
            tensors = torch.ops.tree_attn_op.block_lists(
                q_vals,
                k_vals,
                str(predicate),
                *(q_len, kv_len),
                *(None,) * 4,
                *(q_block, kv_block, q_block, kv_block),
            )
        else:
            tensors = self.hand_made(
                self.random.choice((1, batch)),
                self.random.choice((1, heads)),
                -(-q_len // q_block),
                -(-kv_len // kv_block),
            )
        given: list[Tensor | None] = list(tensors)
        if not self.choose("full lists", self.choices.full_lists):
            given[2] = given[3] = given[6] = given[7] = None
        if self.choose("query-side lists", (True, False)) is False:
            given[4:] = [None] * 4
        if self.random.random() < 0.3:
            given = [None if t is None else t.repeat_interleave(2, -1)[..., ::2] for t in given]
        return BlockLists.of(given, q_block, kv_block, q_len, kv_len)

    def hand_made(self, batch: int, heads: int, rows: int, columns: int) -> list[Tensor]:
        """Blocks of each kind, rows without any, and entries of no meaning behind the counts."""
        kind = torch.randint(0, 4, (batch, heads, rows, columns), generator=self.generator)
        kind[:, :, self.random.randrange(rows)] = self.random.choice((0, 1, 2))
        made = []
        for view in (kind, kind.mT):
            for wanted in (1, 2):
                counts, indices = compact(view == wanted)
                listed = torch.arange(view.shape[-1]) < counts.unsqueeze(-1)
                made += [counts, torch.where(listed, indices, self.random.choice((-7, 2**20)))]
        return [tensor.int() for tensor in made]


def _unread_keys(lists: BlockLists) -> Tensor:
    """bool ``[kv_len]``: the key tokens of blocks that no row lists."""
    columns = lists.kv_indices.shape[3]
    read = torch.zeros(columns, dtype=torch.bool)
    for counts, indices in zip(lists.key_side[::2], lists.key_side[1::2], strict=True):
        if counts is not None:
            listed = torch.arange(columns) < counts.unsqueeze(-1)
            read[indices[listed].long()] = True
    return ~read.repeat_interleave(lists.kv_block_size)[: lists.kv_len]
