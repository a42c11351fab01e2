"""Running the Hopper kernels' source in Python, on the CPU.

The functions run as they are, with stand-ins for what they import from Gluon: every warp group is
a thread, barriers count arrivals and bytes, and shared memory is a tensor of 64 x 64 boxes. Loads
through TMA land as late as their barrier allows or at once, a matrix product reads its operands
when it is issued and again when it is waited for, and a store is read when it is waited for. So an
index, a count or a phase that is wrong shows as an error, a wrong result, NaN or a deadlock. What
the compiler makes of the source is not covered.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tree_attn_op.kernels.hopper  # noqa: F401 - the package is run below
from tree_attn_op.kernels.launching import Output
from tree_attn_op.predicate import Op

PACKAGE = "tree_attn_op.kernels.hopper."
MODULES = (
    "schedule", "queue", "masking", "pair_masks", "packing", "loading", "forward_kernel",
    "dq_kernel", "dkdv_kernel", "fast_backward_kernel",
)  # fmt: skip


class SimulationError(AssertionError):
    """The kernel did what the hardware would not survive or would not define."""


class _Int(int):
    """A scalar of a kernel: an int whose arithmetic gives its own kind."""

    def to(self, dtype: torch.dtype) -> _Int:
        return self


def _integer_method(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: _Int, other: Any) -> Any:
        result = original(self, other)
        return _Int(result) if type(result) is int else result

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Int, f"__{_name}__", _integer_method(f"__{_name}__"))
    setattr(_Int, f"__r{_name}__", _integer_method(f"__r{_name}__"))


class _Values(Tensor):
    """A tensor in registers."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)


def _values(x: Tensor) -> Tensor:
    return x.as_subclass(_Values)


class _Pointer:
    """Global memory of a tensor, with an offset in elements."""

    def __init__(self, tensor: Tensor, offset: Any = 0):
        self.tensor, self.offset = tensor, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.tensor, self.offset + offset)

    @property
    def flat(self) -> Tensor:
        extent = sum(
            (n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return self.tensor.as_strided((extent + 1,), (1,))

    def check(self, offset: Tensor) -> Tensor:
        if offset.numel() and not 0 <= int(offset.min()) <= int(offset.max()) < len(self.flat):
            raise SimulationError("a global access out of bounds")
        return offset.as_subclass(Tensor).long()


class _Descriptor:
    def __init__(self, descriptor: Any):
        self.tensor = descriptor.base
        if descriptor.strides != list(self.tensor.stride()):
            self.tensor = self.tensor.as_strided(descriptor.shape, descriptor.strides)
        self.block = descriptor.block_shape
        self.dtype, self.layout = self.tensor.dtype, None
        self.written = torch.zeros(self.tensor.shape, dtype=torch.bool)

    def region(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of a box at ``at`` lies within the tensor: slices of the tensor, of the box."""
        outer, inner = [], []
        for size, start, length in zip(self.tensor.shape, at, self.block, strict=True):
            low, high = min(max(start, 0), size), min(max(start + length, 0), size)
            outer.append(slice(low, high))
            inner.append(slice(low - start, high - start))
        return tuple(outer), tuple(inner)


class _Barrier:
    def __init__(self) -> None:
        self.count = self.arrivals = self.bytes = self.phase = 0
        self.late: list[Callable[[], None]] = []

    def settle(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.arrivals, self.phase = self.count, self.phase + 1
            _machine.changed.notify_all()


class _Barriers:
    def __init__(self, count: int):
        self.barriers = [_Barrier() for _ in range(count)]

    def index(self, i: int) -> _Barrier:
        return self.barriers[_inside(i, len(self.barriers))]


def _inside(i: int, count: int) -> int:
    if not 0 <= i < count:
        raise SimulationError(f"shared memory: index {i} of {count}")
    return int(i)


class _Boxes:
    """Shared memory in boxes, or rows, as TMA sees it."""

    def __init__(self, dtype: torch.dtype, shape: list[int]):
        self.memory = torch.full(shape, math.nan, dtype=dtype)

    def index(self, i: int) -> Tensor:
        return self.memory[_inside(i, len(self.memory))]

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if self.memory.dim() == 3:
            return _Tile(self.memory.view(shape))
        if dtype != self.memory.dtype:
            return _Tile(self.memory.flatten().view(dtype).view(shape))
        *many, rows, width = shape
        boxes = self.memory.view(*many, width // 64, rows // 64, 64, 64)
        return _Tile(boxes.movedim(-4, -2))


class _Tile:
    """Shared memory as the matrix units see it: ``[(tiles,) rows / 64, 64, width / 64, 64]``."""

    def __init__(self, view: Tensor, transposed: bool = False):
        self.view, self.transposed, self.dtype = view, transposed, view.dtype

    @property
    def shape(self) -> list[int]:
        if self.view.dim() < 4:
            return list(self.view.shape)
        *many, blocks, rows, chunks, columns = self.view.shape
        return [*many, blocks * rows, chunks * columns]

    def index(self, i: int) -> _Tile:
        return _Tile(self.view[_inside(i, len(self.view))])

    def slice(self, start: int, length: int, dim: int) -> _Tile:
        if dim == 0:
            return _Tile(self.view[start // 64 : (start + length) // 64])
        chunks = self.view[:, :, start // 64 : -(-(start + length) // 64)]
        return _Tile(chunks[..., start % 64 : start % 64 + min(length, 64)])

    def permute(self, order: tuple[int, int]) -> _Tile:
        return _Tile(self.view, not self.transposed)

    def load(self, layout: Any = None) -> Tensor:
        x = self.view.reshape(self.shape)
        return _values((x.mT if self.transposed else x).clone())

    def store(self, x: Tensor) -> None:
        self.view.copy_(x.as_subclass(Tensor).reshape(self.view.shape))


class _Numbers:
    """Integers in shared memory."""

    def __init__(self, count: int):
        self.memory: list[Any] = [None] * count

    def index(self, i: int) -> Any:
        at = _inside(i, len(self.memory))

        def store(x: Tensor) -> None:
            self.memory[at] = int(x)

        def load(layout: Any) -> Tensor:
            if self.memory[at] is None:
                raise SimulationError("a number is read that was not written")
            return _values(torch.tensor([self.memory[at]]))

        return types.SimpleNamespace(store=store, load=load)


class _Product:
    """A matrix product in flight."""

    def __init__(self, a: Any, b: _Tile, acc: Any, use_acc: bool):
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.issued = self.compute()
        self.result: Tensor | None = None

    def compute(self) -> Tensor:
        a, b = (x.load() if isinstance(x, _Tile) else x for x in self.operands)
        return a.float() @ b.float()

    def finish(self) -> None:
        product = self.compute()
        if not torch.equal(product.nan_to_num(3e38), self.issued.nan_to_num(3e38)):
            raise SimulationError("an operand changed under a matrix product")
        acc = self.acc.result if isinstance(self.acc, _Product) else self.acc
        self.result = product + acc if self.use_acc else product


class _Machine:
    """The thread block that runs now."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.local = threading.local()
        self.block = self.blocks = self.running = 0
        self.waits: dict[int, tuple[_Barrier, int]] = {}
        self.late = False
        self.taken = 0
        self.error: BaseException | None = None

    def stuck(self) -> bool:
        """Whether every warp group that runs waits for what nobody will do."""
        return len(self.waits) == self.running and all(
            barrier.phase % 2 == phase and not barrier.late
            for barrier, phase in self.waits.values()
        )

    def own(self, name: str) -> list[Any]:
        return self.local.__dict__.setdefault(name, [])


_machine = _Machine()


def _init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.arrivals = count


def _arrive(barrier: _Barrier) -> None:
    with _machine.changed:
        if barrier.arrivals == 0:
            raise SimulationError("an arrival at a barrier that expects none")
        barrier.arrivals -= 1
        barrier.settle()


def _expect(barrier: _Barrier, size: int) -> None:
    with _machine.changed:
        barrier.bytes += int(size)
    _arrive(barrier)


def _wait(barrier: _Barrier, phase: int, pred: bool = True) -> None:
    if not pred:
        return
    with _machine.changed:
        _machine.waits[threading.get_ident()] = barrier, phase
        while barrier.phase % 2 == phase:
            if barrier.late:
                barrier.late.pop(0)()
                continue
            if _machine.stuck():
                _machine.error = _machine.error or SimulationError("deadlock")
                _machine.changed.notify_all()
            if _machine.error:
                raise SimulationError("stopped") from _machine.error
            _machine.changed.wait()
        del _machine.waits[threading.get_ident()]


def _load_box(desc: _Descriptor, at: list[int], barrier: _Barrier, box: Tensor) -> None:
    def land() -> None:
        outer, inner = desc.region(at)
        box.zero_()
        box[inner] = desc.tensor[outer]
        barrier.bytes -= box.numel() * box.element_size()
        barrier.settle()

    with _machine.changed:
        if list(box.shape) != list(desc.block):
            raise SimulationError("a box of the wrong shape")
        box.fill_(math.nan)
        if _machine.late:
            barrier.late.append(land)
            _machine.changed.notify_all()
        else:
            land()


def _store_box(desc: _Descriptor, at: list[int], box: Tensor) -> None:
    def land() -> None:
        outer, inner = desc.region(at)
        if bool(desc.written[outer].any()):
            raise SimulationError("a result is written twice")
        desc.written[outer] = True
        desc.tensor[outer] = box[inner]

    _machine.own("stores").append(land)


def _add_box(desc: _Descriptor, at: list[int], box: _Tile) -> None:
    def land() -> None:
        if list(box.shape) != list(desc.block):
            raise SimulationError("a box of the wrong shape")
        outer, inner = desc.region(at)
        desc.tensor[outer] += box.view[inner]

    _machine.own("stores").append(land)


def _store_wait(pending: int) -> None:
    stores = _machine.own("stores")
    while len(stores) > pending:
        stores.pop(0)()


def _mma(a: Any, b: _Tile, acc: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
    product = _Product(a, b, acc, use_acc)
    _machine.own("products").append(product)
    return product


def _mma_wait(pending: int, deps: list[Any]) -> Any:
    products = _machine.own("products")
    while len(products) > pending:
        products.pop(0).finish()
    results = [x.result if isinstance(x, _Product) else x for x in deps]
    if any(x is None for x in results):
        raise SimulationError("a matrix product is used before it is waited for")
    return results[0] if len(results) == 1 else tuple(results)


def _load(pointer: _Pointer, mask: Any = None) -> Any:
    if isinstance(pointer.offset, Tensor):
        return _values(pointer.flat[pointer.check(pointer.offset)])
    return _Int(pointer.flat[pointer.check(torch.tensor(int(pointer.offset)))])


def _store(pointer: _Pointer, value: Tensor, mask: Tensor) -> None:
    chosen = mask.as_subclass(Tensor)
    offset = pointer.check(pointer.offset[chosen])
    pointer.flat[offset] = value.as_subclass(Tensor)[chosen]


def _atomic_add(pointer: _Pointer, value: int, sem: str) -> _Int:
    """Blocks run one after another: now and then one finds that others have taken all."""
    _machine.taken += 1
    if _machine.block < _machine.blocks - 1 and _machine.taken % 3 == 0:
        return _Int(2**30)
    at = pointer.check(torch.tensor(int(pointer.offset)))
    before = int(pointer.flat[at])
    pointer.flat[at] += value
    return _Int(before)


def _largest(x: Tensor, axis: int) -> Any:
    return _Int(x) if x.dim() == 1 and not x.is_floating_point() else x.amax(axis)


def _select(program: tuple[int, ...], scores: Any, gate: Any, operands: Any, GATED: bool) -> Any:
    """What the assembly of ``masking.py`` does."""
    sides = iter(operands)

    def value(at: int) -> Any:
        op = Op(program[at])
        if op in (Op.TRUE, Op.FALSE):
            return torch.tensor(op == Op.TRUE)
        if op in (Op.AND, Op.OR):
            join = torch.logical_and if op == Op.AND else torch.logical_or
            parts = [value(part) for part in program[at + 2 : at + 2 + program[at + 1]]]
            return functools.reduce(join, parts)
        lhs, rhs = next(sides), next(sides)
        return torch.as_tensor(getattr(operator, op.name.lower())(lhs, rhs))

    seen = value(0)
    if GATED:
        seen = seen & (gate != 0)
    return torch.where(seen, scores, -math.inf)


def _either(function: Callable[..., Tensor], scalar: Callable[..., int]) -> Callable[..., Any]:
    def call(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return function(*(x if isinstance(x, Tensor) else torch.tensor(x) for x in (a, b)))
        return _Int(scalar(a, b))

    return call


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int32:
        return _Numbers(shape[0])
    if dtype != torch.int64:
        return _Boxes(dtype, shape)
    return _Barrier() if len(shape) == 1 else _Barriers(shape[0])


def _warp_specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
            if _machine.own("stores") or _machine.own("products"):
                raise SimulationError("something is in flight at the end")
        except BaseException as error:
            with _machine.changed:
                _machine.error = _machine.error or error
        with _machine.changed:
            _machine.running -= 1
            if _machine.waits and _machine.stuck():
                _machine.error = _machine.error or SimulationError("deadlock")
            _machine.changed.notify_all()

    _machine.running, _machine.waits, _machine.error = len(parts), {}, None
    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _machine.error:
        raise _machine.error


def _language() -> Any:
    def no_layout(*args: Any, **kwargs: Any) -> None:
        return None

    return types.SimpleNamespace(
        constexpr=lambda x: x,
        float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
        int32=torch.int32, int64=torch.int64,
        NVMMADistributedLayout=no_layout, NVMMASharedLayout=no_layout, DotOperandLayout=no_layout,
        SliceLayout=no_layout, SwizzledSharedLayout=no_layout, BlockedLayout=no_layout,
        num_warps=lambda: 4,
        program_id=lambda axis: _Int(_machine.block),
        num_programs=lambda axis: _Int(_machine.blocks),
        static_range=range, static_assert=lambda condition: None,
        load=_load, store=_store, atomic_add=_atomic_add, allocate_shared_memory=_allocate,
        warp_specialize=_warp_specialize,
        minimum=_either(torch.minimum, min), maximum=_either(torch.maximum, max),
        to_tensor=_Int,
        arange=lambda start, end, layout: _values(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout: _values(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: _values(torch.full(shape, value, dtype=dtype)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        split=lambda x: x.unbind(-1), join=lambda x, y: torch.stack((x, y), -1),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        where=torch.where, zeros_like=torch.zeros_like,
        sum=lambda x, axis: x.sum(axis),
        max=_largest,
        exp2=torch.exp2, log2=torch.log2,
    )  # fmt: skip


def as_python() -> dict[str, Callable[..., Any]]:
    """The kernels and all that they call as Python functions over the stand-ins."""
    barrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=_init, arrive=_arrive, expect=_expect, wait=_wait
    )
    tma = types.SimpleNamespace(
        async_copy_global_to_shared=_load_box, async_copy_shared_to_global=_store_box,
        store_wait=_store_wait,
    )  # fmt: skip
    known: dict[str, Any] = {
        "gl": _language(), "mbarrier": barrier, "tma": tma, "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait, "fence_async_shared": lambda: None,
        "async_add_shared_to_global": _add_box,
    }  # fmt: skip
    # In inline assembly, which a 16-bit tensor stands in for.
    replaced: dict[str, Any] = {
        "_select": _select,
        "pack_pairs": lambda x, dtype: x.to(dtype),
        "unpack_pairs": lambda x, dtype, layout: x,
        "hidden_from_assembler": lambda x: x,
    }
    functions: dict[str, Callable[..., Any]] = {}
    for module in MODULES:
        space = dict(sys.modules[PACKAGE + module].__dict__)
        for name, value in list(space.items()):
            if name in known:
                space[name] = known[name]
            elif hasattr(value, "fn") and hasattr(value, "params"):
                own = value.fn.__module__ == PACKAGE + module
                code = types.FunctionType(value.fn.__code__, space, name) if own else None
                space[name] = replaced.get(name) or code or functions[name]
                functions[name] = space[name]
            elif type(value).__name__ == "constexpr":
                space[name] = value.value
    return functions


class _Launcher:
    """Stands for a kernel: a launch runs its blocks one after another."""

    def __init__(self, function: Callable[..., None], names: list[str], late: bool):
        self.function, self.names, self.late = function, names, late

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **kwargs: Any) -> None:
            def convert(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return _Pointer(value)
                if hasattr(value, "block_shape"):
                    return _Descriptor(value)
                return _Int(value) if type(value) is int else value

            arguments = {
                name: convert(value)
                for name, value in (dict(zip(self.names, args, strict=False)) | kwargs).items()
            }
            _machine.blocks, _machine.late = grid[0], self.late
            for _machine.block in range(grid[0]):
                self.function(**arguments)
            for value in arguments.values():
                if isinstance(value, _Descriptor) and value.written.any():
                    assert value.written.all(), "a result is not written"

        return launch


def _heaviest_first(cost: Tensor) -> Tensor:
    return cost.argsort(dim=1, descending=True, stable=True).int()


def _heads_together(cost: Tensor, blocks: int) -> int:
    """Enough heads that the heaviest item takes 1.5 times as long as they all, or less."""
    return max(math.ceil(2 * int(cost.max()) * blocks / (3 * max(int(cost.sum()), 1))), 1)


def _pair_order(by_query: Any, blocks: int) -> Tensor:
    counts, _, full, _ = _of_tiles(by_query)
    cost = torch.nn.functional.pad(counts + full, (0, counts.shape[1] % 2)).unflatten(1, (-1, 2))
    order = _heaviest_first(cost.sum(-1))
    listed = (cost > 0).int() @ torch.tensor([1, 2], dtype=torch.int32)
    codes = 4 * order + listed.gather(1, order.long())
    head = torch.tensor([_heads_together(cost[0].sum(-1), blocks), 0])
    return torch.cat([head, codes.flatten()]).int()


def _row_schedule(
    counts: Tensor, tiles: Tensor, full: Tensor, full_tiles: Tensor, blocks: int, least: int
) -> Tensor:
    entries = []
    for b, order in enumerate(_heaviest_first(counts + full).tolist()):
        for row in order:
            lists = {1: tiles[b, row, : counts[b, row]], 2: full_tiles[b, row, : full[b, row]]}
            odd = {state: len(listed) % 2 for state, listed in lists.items()}
            if any(odd.values()):
                first = [
                    (int(lists[state][0]), state) if odd[state] else (0, 0) for state in (2, 1)
                ]
            else:
                state = next((state for state, listed in lists.items() if len(listed)), 0)
                first = (
                    [(int(tile), state) for tile in lists[state][:2]] if state else [(0, 0)] * 2
                )
            codes = [4 * tile + state for tile, state in first]
            together = _heads_together(counts[b] + full[b], blocks)
            long = int((counts[b] + full[b]).float().mean() >= least)
            entries.append([row, len(lists[1]), len(lists[2]), *codes, together, 0, long])
    return torch.tensor(entries, dtype=torch.int32).view(*counts.shape, 8)


def _merge_lists(counts: Tensor, tiles: Tensor, full: Tensor, full_tiles: Tensor) -> Any:
    batch, key_tiles, width = tiles.shape
    pairs = (key_tiles + 1) // 2
    merged = torch.zeros(batch, pairs, 2, dtype=torch.int32)
    entries = torch.full((batch, pairs, width), 2**31 - 1, dtype=torch.int32)
    state = torch.zeros(batch, 2 * pairs, width, dtype=torch.int32)
    for b in range(batch):
        for key in range(key_tiles):
            state[b, key, tiles[b, key, : int(counts[b, key])].long()] = 1
            state[b, key, full_tiles[b, key, : int(full[b, key])].long()] = 2
        for pair in range(pairs):
            for tile in reversed(range(width)):
                x, y = state[b, 2 * pair : 2 * pair + 2, tile].tolist()
                kind = int(x == y == 2)
                if x + y:
                    at = int(merged[b, pair, kind])
                    entries[b, pair, width - 1 - at if kind else at] = 16 * tile + 4 * x + y
                    merged[b, pair, kind] += 1
    return merged, entries


def _row_statistics(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, tiles: int
) -> Tensor:
    stats = torch.zeros(*lse.shape[:2], 2, tiles * 64)
    stats[:, :, 0] = math.inf
    length = lse.shape[2]
    seen = lse > -math.inf
    delta = (out.float() * grad_out.float()).sum(-1) - (0 if grad_lse is None else grad_lse)
    stats[:, :, 0, :length] = torch.where(seen, lse * math.log2(math.e), math.inf)
    stats[:, :, 1, :length] = delta.where(seen, torch.zeros(()))
    return stats.unflatten(-1, (tiles, 64)).transpose(2, 3).contiguous()


def _of_tiles(lists: Any) -> list[Tensor]:
    """Lists without their head dimension; full ones that are missing list nothing."""
    counts, tiles, full, full_tiles = lists
    if full is None:
        full, full_tiles = torch.zeros_like(counts), tiles
    return [tensor.squeeze(1) for tensor in (counts, tiles, full, full_tiles)]


class _RowSchedule:
    """Stands for the class of ``prepare.py``."""

    def __init__(self, lists: Any, blocks: int, least: int):
        self.given = blocks, least

    def __call__(self, lists: Any) -> Tensor:
        return _row_schedule(*_of_tiles(lists), *self.given)


class _BackwardPreparation:
    """Stands for the class of ``prepare.py``."""

    def __init__(self, out: Tensor, *arguments: Any):
        self.tiles, self.blocks, self.blocks_a_row = arguments[-3:]
        self.stats = Output.dense((*out.shape[:2], self.tiles, 2, 64), torch.float32, out.device)

    def __call__(
        self,
        out: Tensor,
        grad_out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        by_query: Any,
        by_key: Any,
    ) -> tuple[Tensor, ...]:
        counts, entries = _merge_lists(*_of_tiles(by_query))
        schedule = counts
        if by_key is not None:
            schedule = _row_schedule(*_of_tiles(by_key), self.blocks_a_row, 0)
        stats = _row_statistics(out, grad_out, lse, grad_lse, self.tiles)
        return _pair_order(by_query, self.blocks), counts, entries, schedule, stats


def _form_launch(count: int, step_tiles: int, least: int) -> Callable[..., None]:
    def launch(counts: Tensor, active: Tensor) -> None:
        fast = int(counts.double().sum() * step_tiles >= least * count)
        active.copy_(torch.tensor([fast, 1 - fast]))

    return launch


def _zero_launch(count: int) -> Callable[..., None]:
    def launch(sums: Tensor, active: Tensor) -> None:
        sums.fill_(0.0 if active[0] else float("nan"))

    return launch


def _finish_launch(acc: Tensor, dq: Tensor, scale: float, conditional: bool) -> Any:
    def launch(acc: Tensor, dq: Tensor, active: Tensor) -> None:
        if conditional and not active[0]:
            return
        rows = acc.permute(0, 1, 2, 4, 7, 5, 3, 6, 8).flatten(-3).flatten(2, 5)
        dq.copy_(scale * rows[:, :, : dq.shape[2], : dq.shape[3]])

    return launch


@contextmanager
def simulated(blocks: int, late: bool) -> Iterator[None]:
    """Within it ``forward`` and ``backward`` run on the CPU.

    Args:
        blocks: multiprocessors, and so thread blocks, of the simulated GPU.
        late: loads land when their barrier is waited for, instead of at once.
    """
    functions = as_python()
    hosts = {name: sys.modules[PACKAGE + name] for name in ("forward", "backward")}
    patches = [
        mock.patch.object(host, "multiprocessors", return_value=blocks) for host in hosts.values()
    ]
    for host, kernel in (
        ("forward", "forward_kernel"), ("backward", "dq_kernel"), ("backward", "dkdv_kernel"),
        ("backward", "fast_backward_kernel"),
    ):  # fmt: skip
        names = [p.name for p in getattr(hosts[host], kernel).params]
        launcher = _Launcher(functions[kernel], names, late)
        patches.append(mock.patch.object(hosts[host], kernel, launcher))
    patches += [
        mock.patch.object(hosts["forward"], "RowSchedule", _RowSchedule),
        mock.patch.object(hosts["backward"], "BackwardPreparation", _BackwardPreparation),
        mock.patch.object(hosts["backward"], "form_launch", _form_launch),
        mock.patch.object(hosts["backward"], "zero_launch", _zero_launch),
        mock.patch.object(hosts["backward"], "finish_launch", _finish_launch),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
