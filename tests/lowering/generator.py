"""Random mask graphs, separable and not, in the pre-grad dialect; deterministic for each seed.

The aten dialect of the same mask is had by tracing it (``lower_mask_mod(mask.mask_mod, "cpu")``).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tree_attn_op.lowering import CapturedInfo

B, Q_LEN, KV_LEN = 2, 5, 7
LENGTH = max(Q_LEN, KV_LEN)
INTEGER_DTYPES = (
    *[torch.int64] * 3,
    *[torch.int32] * 3,
    torch.int16,
    torch.int8,
    torch.uint8,
)

Values = list[fx.Node]


@dataclass
class RandomMask:
    """A mask graph with the operands that it captures, some of them Python ints."""

    seed: int
    graph_module: fx.GraphModule
    captured: list[Tensor | int]
    infos: list[CapturedInfo]

    def mask_mod(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.graph_module.forward(b, h, q, k, *self.captured)

    def dense(self) -> Tensor | None:
        """The mask evaluated by PyTorch on 0-d tensors, [B, Q_LEN, KV_LEN]; None if it raises."""
        result = torch.empty(B, Q_LEN, KV_LEN, dtype=torch.bool)
        head = torch.tensor(0)
        positions = [torch.tensor(i) for i in range(LENGTH)]
        try:
            for b in range(B):
                for q in range(Q_LEN):
                    for k in range(KV_LEN):
                        value = self.mask_mod(positions[b], head, positions[q], positions[k])
                        if value.dtype is not torch.bool or value.dim():
                            return None
                        result[b, q, k] = value
        except (RuntimeError, IndexError, TypeError, ZeroDivisionError):
            return None
        return result


@cache
def symbolic_int() -> torch.SymInt:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tensor = mode.from_tensor(torch.empty(1237))
    (size,) = tensor.shape
    if isinstance(size, int):
        size = ShapeEnv().create_unbacked_symint()
    return size


@dataclass
class _Pools:
    """Nodes that may become operands, by what they depend on."""

    query: Values = field(default_factory=list)
    key: Values = field(default_factory=list)
    row: Values = field(default_factory=list)  # of the batch row, or of nothing
    mixed: Values = field(default_factory=list)
    flags: Values = field(default_factory=list)
    numbers: Values = field(default_factory=list)  # captured Python ints: second operands only


class _Builder:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.graph = fx.Graph()
        self.b, self.h, self.q, self.k = (self.graph.placeholder(n) for n in "bhqk")
        self.last_placeholder = self.k
        self.captured: list[Tensor | int] = []
        self.infos: list[CapturedInfo] = []
        self.pools = _Pools(query=[self.q], key=[self.k], row=[self.b])

    # Operands

    def capture(self, value: Tensor | int) -> fx.Node:
        with self.graph.inserting_after(self.last_placeholder):
            node = self.graph.placeholder(f"captured_{len(self.captured)}")
        self.last_placeholder = node
        self.captured.append(value)
        symbolic = symbolic_int() if isinstance(value, int) else value
        self.infos.append(CapturedInfo.of(symbolic))
        return node

    def ids(self, *shape: int) -> Tensor:
        """Ids of any kind: repeated, negative, out of order, extreme."""
        dtype = self.rng.choice(INTEGER_DTYPES)
        info = torch.iinfo(dtype)
        kind = self.rng.randrange(5)
        if kind == 0:
            return torch.randint(info.min, info.max, shape, generator=self.generator, dtype=dtype)
        if kind == 1:
            corners = torch.tensor(
                [info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max], dtype=dtype
            )
            return corners[torch.randint(0, 7, shape, generator=self.generator)]
        if kind == 2:
            order = torch.randperm(shape[-1], generator=self.generator).to(dtype)
            return order.expand(shape).contiguous()
        return torch.randint(-3, 6, shape, generator=self.generator).to(dtype)

    def call(self, function: Callable, *args: object, **kwargs: object) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def method(self, name: str, *args: object, **kwargs: object) -> fx.Node:
        return self.graph.call_method(name, args, kwargs)

    def number(self) -> int:
        return self.rng.choice([-7, -2, -1, 0, 1, 1, 2, 3, 5, 100, 300, 2**31, -(2**40)])

    def small(self) -> int:
        return self.rng.choice([-3, -1, 0, 1, 2, 3, 4])

    # Integers of one side

    def position(self, side: str) -> fx.Node:
        """An index into a table of LENGTH entries."""
        index = {"q": self.q, "k": self.k, "b": self.b}[side]
        if self.rng.random() < 0.7:
            return index
        value = self.recent(self.pool(side))
        wrapped = self.call(self.rng.choice([operator.mod, torch.remainder]), value, LENGTH)
        if self.rng.random() < 0.3:
            wrapped = self.call(operator.sub, wrapped, LENGTH)  # counts from the end
        return self.method("to", wrapped, torch.int64)

    def recent(self, pool: Values) -> fx.Node:
        """One of a pool, the newer the likelier, so that graphs become deep."""
        return pool[-1 - min(int(self.rng.expovariate(0.7)), len(pool) - 1)]

    def pool(self, side: str) -> Values:
        return {"q": self.pools.query, "k": self.pools.key, "b": self.pools.row}[side]

    def look_up(self, side: str) -> fx.Node:
        """A gather; its spelling varies."""
        position = self.position(side)
        spelling = self.rng.randrange(6)
        if spelling == 0:
            return self.call(
                operator.getitem, self.capture(self.ids(B, LENGTH)), (self.b, position)
            )
        if spelling == 1:
            rows = self.call(operator.getitem, self.capture(self.ids(B, LENGTH)), self.b)
            return self.call(operator.getitem, rows, position)
        if spelling == 2:
            table = self.capture(self.ids(LENGTH, B))
            columns = self.call(operator.getitem, table, position)
            return self.call(operator.getitem, columns, (self.b,))
        if spelling == 3:
            table = self.method("view", self.capture(self.ids(B, LENGTH)), -1)
            flat = self.call(operator.add, self.call(operator.mul, self.b, LENGTH), self.q)
            if side == "q" and self.rng.random() < 0.8:
                return self.call(operator.getitem, table, flat)
            return self.call(operator.getitem, table, position)
        table = self.capture(self.ids(LENGTH))
        index = position if spelling == 4 else (position,)
        return self.call(operator.getitem, table, index)

    def one_sided(self, side: str) -> fx.Node:
        pool = self.pool(side)
        value = self.recent(pool)
        other = self.rng.choice([self.small(), self.number(), self.recent(pool)])
        batch = self.recent(self.pools.row + self.pools.numbers)
        choice = self.rng.randrange(14)
        if choice < 4 and side != "b":
            return self.look_up(side)
        if choice == 4:
            return self.call(operator.add, value, self.rng.choice([other, batch]))
        if choice == 5:
            return self.call(self.rng.choice([operator.sub, torch.sub]), value, other)
        if choice == 6:
            return self.call(operator.mul, value, self.rng.choice([other, 2, -1]))
        if choice == 7:
            return self.call(operator.floordiv, value, self.rng.choice([2, 3, -3, 7]))
        if choice == 8:
            return self.call(operator.mod, value, self.rng.choice([2, 3, 5, -4]))
        if choice == 9:
            return self.method("clamp", value, self.small(), 4)
        if choice == 10:
            dtype = self.rng.choice(INTEGER_DTYPES)
            return self.method("to", value, dtype)
        if choice == 11:
            flag = self.call(operator.gt, value, self.small())
            return self.call(torch.where, flag, value, other)
        if choice == 12:
            return self.call(
                self.rng.choice([operator.and_, operator.or_, operator.xor]), value, 6
            )
        return self.call(self.rng.choice([operator.neg, operator.invert, torch.abs]), value)

    # Integers of both sides

    def both_sided(self) -> fx.Node:
        query, key = self.recent(self.pools.query), self.recent(self.pools.key)
        if self.rng.random() < 0.04:
            return self.inseparable(query, key)
        choice = self.rng.randrange(12)
        if choice < 4 or not self.pools.mixed:
            if self.rng.random() < 0.3:
                query, key = key, query
            function = self.rng.choice([operator.sub, operator.sub, torch.sub, operator.add])
            return self.call(function, query, key)
        value = self.recent(self.pools.mixed)
        if choice == 4:
            return self.call(operator.add, value, self.rng.choice([self.number(), query, key]))
        if choice == 5:
            other = self.rng.choice([2, -1, 3, self.recent(self.pools.row + self.pools.numbers)])
            return self.call(operator.mul, value, other)
        if choice == 6:
            return self.call(self.rng.choice([torch.abs, operator.neg, operator.invert]), value)
        if choice == 7:
            function = self.rng.choice([torch.maximum, torch.minimum])
            return self.call(function, value, self.rng.choice([query, key, value]))
        if choice == 8:
            return self.method("to", value, self.rng.choice(INTEGER_DTYPES))
        if choice == 9:
            return self.call(torch.where, self.flag(), query, self.rng.choice([key, value, 3]))
        if choice == 10:
            return self.method(self.rng.choice(["int", "long"]), self.flag())
        return self.method("clamp", value, min=self.small())

    def inseparable(self, query: fx.Node, key: fx.Node) -> fx.Node:
        """What no predicate can say, as far as the lowering knows."""
        choice = self.rng.randrange(4)
        if choice == 0:
            table = self.capture(self.ids(LENGTH, LENGTH))
            return self.call(operator.getitem, table, (self.q, self.k))
        if choice == 1:
            return self.call(operator.mul, query, key)
        if choice == 2:
            return self.call(operator.add, query, self.h)
        return self.call(operator.floordiv, self.call(operator.add, query, key), 2)

    # Booleans

    def any_integer(self) -> fx.Node:
        pools = [self.pools.query, self.pools.key, self.pools.query, self.pools.key]
        pools.extend(pool for pool in (self.pools.mixed, self.pools.row) if pool)
        return self.recent(self.rng.choice(pools))

    def comparison(self) -> fx.Node:
        name = self.rng.choice(["eq", "ne", "lt", "le", "gt", "ge"])
        kind = self.rng.randrange(10)
        if kind < 5:
            sides = [self.recent(self.pools.query), self.recent(self.pools.key)]
            self.rng.shuffle(sides)
            left, right = sides
        elif kind < 8 and self.pools.mixed:
            left = self.recent(self.pools.mixed)
            numbers = [self.small(), self.number(), self.any_integer(), *self.pools.numbers]
            right = self.rng.choice(numbers)
        else:
            left, right = self.any_integer(), self.rng.choice([self.small(), self.any_integer()])
        if self.rng.random() < 0.05:
            right = self.rng.choice([2.5, -1.0, 0.0])
        style = self.rng.randrange(3)
        if style == 0:
            return self.call(getattr(operator, name), left, right)
        if style == 1:
            return self.call(getattr(torch, name), left, right)
        return self.method(name, left, right)

    def flag(self) -> fx.Node:
        if not self.pools.flags or self.rng.random() < 0.3:
            return self.comparison()
        return self.recent(self.pools.flags)

    def twins(self) -> Values:
        """Two conditions of one form, of different values: one mask for each batch row."""
        name = self.rng.choice(["eq", "lt", "ge"])
        causal = self.call(operator.ge, self.q, self.k)
        twins = []
        for _ in range(2):
            sides = self.look_up("q"), self.look_up("k")
            condition = self.call(getattr(operator, name), *sides)
            twins.append(self.call(operator.and_, causal, condition))
        return twins

    def boolean(self) -> fx.Node:
        choice = self.rng.randrange(14)
        if choice < 5:
            return self.comparison()
        a, b = self.flag(), self.flag()
        if choice == 5:
            return self.call(self.rng.choice([operator.and_, torch.logical_and]), a, b)
        if choice == 6:
            return self.call(self.rng.choice([operator.or_, torch.logical_or]), a, b)
        if choice == 7:
            return self.call(self.rng.choice([operator.xor, operator.eq, operator.ne]), a, b)
        if choice == 8:
            return self.call(self.rng.choice([operator.invert, torch.logical_not]), a)
        if choice == 9:
            return self.call(torch.where, self.flag(), a, self.rng.choice([b, True, False]))
        if choice == 10:
            position = self.rng.choice([self.q, self.k])
            flags = torch.rand(B, LENGTH, generator=self.generator) < 0.6
            return self.call(operator.getitem, self.capture(flags), (self.b, position))
        if choice == 11:
            row = self.call(operator.eq, self.b, self.rng.randrange(B))
            if self.rng.random() < 0.5:
                a, b = self.twins()
            return self.call(torch.where, row, a, b)
        if choice == 12:
            total = self.call(operator.add, self.method("int", a), self.method("int", b))
            return self.call(self.rng.choice([operator.gt, operator.eq]), total, self.small())
        return self.call(operator.le, self.any_integer(), self.any_integer())

    def build(self) -> tuple[fx.Graph, list[Tensor | int], list[CapturedInfo]]:
        self.pools.row.append(
            self.capture(torch.tensor(abs(self.small()), dtype=self.rng.choice(INTEGER_DTYPES)))
        )
        if self.rng.random() < 0.5:
            self.pools.numbers.append(self.capture(self.rng.choice([1, 2, 3, 2**33])))
        for _ in range(self.rng.randint(1, 4)):
            side = self.rng.choice("qk")
            self.pool(side).append(self.look_up(side))
        for _ in range(self.rng.randint(2, 14)):
            kind = self.rng.randrange(10)
            if kind < 5:
                side = self.rng.choice("qqqkkkb")
                self.pool(side).append(self.one_sided(side))
            elif kind < 7:
                self.pools.mixed.append(self.both_sided())
            else:
                self.pools.flags.append(self.boolean())
        result = self.boolean()
        for _ in range(self.rng.randint(0, 4)):
            function = self.rng.choice([operator.and_, operator.and_, operator.or_, operator.xor])
            result = self.call(function, result, self.boolean())
        self.graph.output(result)
        self.graph.eliminate_dead_code()
        return self.graph, self.captured, self.infos


def random_mask(seed: int) -> RandomMask:
    """The mask of a seed."""
    graph, captured, infos = _Builder(seed).build()
    return RandomMask(seed, fx.GraphModule(torch.nn.Module(), graph), captured, infos)
