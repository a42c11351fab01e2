"""Lowering a mask_mod once for all calls that look alike.

A training step that builds its mask anew calls with the same function over other tensors. Tracing
it costs milliseconds, more than the rest of building a mask, so what was proven is kept under a
fingerprint of everything that tracing can see: code, captured numbers and functions, and of each
captured tensor all but its contents, which tracing never reads. A mask_mod that could see anything
else (an object with a state, an import, an attribute of a function) has no fingerprint and is
lowered with every call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.attention import flex_attention

from ..predicate import Predicate
from . import lower_mask_mod
from .emission import evaluator
from .values import CapturedInfo

_MAX_ENTRIES = 64
_MAX_DEPTH = 32

# Looked up by attribute in masks. Functions and types in them are taken to stay what they are.
_CONSTANT_MODULES = (torch, math, operator, functools)
# Builtins that see nothing but their arguments.
_PURE_BUILTINS = frozenset(
    (
        abs,
        all,
        any,
        bool,
        enumerate,
        float,
        int,
        isinstance,
        len,
        list,
        max,
        min,
        range,
        sum,
        tuple,
    )
)
_PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device)


class _Opaque(Exception):
    """The mask can see something whose state is not known."""


class _Reader:
    """Collects the fingerprint of a callable, and the tensors that it captures, in order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.depth = 0

    def read(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return type(value), value
        if type(value) is float:
            return float, value.hex()  # 0.0 equals -0.0, and NaN not even itself
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _Opaque
        try:
            return self.read_composite(value)
        finally:
            self.depth -= 1

    def read_composite(self, value: Any) -> Any:
        if type(value) in (Tensor, torch.nn.Parameter):
            return self.read_tensor(value)
        if type(value) in (tuple, list):
            return type(value), tuple(self.read(item) for item in value)
        if isinstance(value, types.FunctionType):
            return self.read_function(value)
        if type(value) is functools.partial and not value.__dict__:
            keywords = tuple((name, self.read(item)) for name, item in value.keywords.items())
            return "partial", self.read(value.func), self.read(value.args), keywords
        if any(value is module for module in _CONSTANT_MODULES) or _is_unbound(value):
            return "constant", value
        raise _Opaque

    def read_tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.__dict__:
            raise _Opaque
        # Two names of one tensor are one operand, so which are the same is part of the key.
        same = next((i for i, other in enumerate(self.tensors) if other is tensor), None)
        self.tensors.append(tensor)
        shape = tuple(tensor.shape)
        return "tensor", same, tensor.dtype, tensor.device, shape, tensor.stride(), type(tensor)

    def read_function(self, function: types.FunctionType) -> Any:
        if function.__dict__:
            raise _Opaque
        return (
            function.__code__,
            tuple(self.read(cell.cell_contents) for cell in function.__closure__ or ()),
            self.read(function.__defaults__ or ()),
            tuple((k, self.read(v)) for k, v in (function.__kwdefaults__ or {}).items()),
            self.read_globals(function),
        )

    def read_globals(self, function: types.FunctionType) -> Any:
        if function.__globals__ is flex_attention.__dict__:
            # flex's own and_masks, or_masks, ...: only what they close over can differ.
            return ()
        names, attributes = _lookups(function.__code__)
        found: list[Any] = []
        for name in names:
            if name in function.__globals__:
                found.append((name, self.read(function.__globals__[name])))
            elif builtins.__dict__.get(name) not in _PURE_BUILTINS:
                raise _Opaque
        # Which object an attribute is read from is not known, so each module is asked for it.
        for module in _CONSTANT_MODULES:
            for name in attributes:
                value = module.__dict__.get(name)
                if value is not None and not callable(value):
                    found.append((module.__name__, name, self.read(value)))
        return tuple(found)


def _is_unbound(value: Any) -> bool:
    """Whether ``value`` is a builtin function that is bound to no object with a state."""
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    owner = value.__self__
    return owner is None or isinstance(owner, types.ModuleType)


@functools.lru_cache(maxsize=256)
def _lookups(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Global names and attribute names that the code, or code nested in it, reads.

    Raises:
        _Opaque: it uses names in another way: imports, assignments to globals or attributes.
    """
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode not in dis.hasname:
            continue
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
        else:
            raise _Opaque
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_attributes = _lookups(constant)
            names.update(inner_names)
            attributes.update(inner_attributes)
    return tuple(sorted(names)), tuple(sorted(attributes))


@dataclass(eq=False)
class Proof:
    """What a mask_mod means, and how its values follow from the tensors that it captures.

    Attributes:
        predicate: the mask predicate.
    """

    predicate: Predicate
    _evaluator: Callable[[bool], Callable[..., tuple[Tensor, Tensor]]]
    _order: tuple[int, ...] = ()

    @cached_property
    def _compute(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self._evaluator(False)

    @cached_property
    def _borrow(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return self._evaluator(True)


class Proven(NamedTuple):
    """A proof, and the tensors that this mask_mod captures."""

    proof: Proof
    captured: tuple[Tensor, ...]

    @property
    def predicate(self) -> Predicate:
        return self.proof.predicate

    def values(self) -> tuple[Tensor, Tensor]:
        """``q_vals`` and ``k_vals`` as they are now, contiguous and of their own memory.

        Raises:
            UnsupportedMask: a captured tensor is too short.
        """
        with torch.no_grad():
            return self.proof._compute(*self.captured)

    def borrowed_values(self) -> tuple[Tensor, Tensor]:
        """The same for who reads them at once: maybe views of what the mask_mod captures."""
        with torch.no_grad():
            return self.proof._borrow(*self.captured)


_entries: OrderedDict[Any, Proof] = OrderedDict()
_lock = threading.Lock()


def _fingerprint(mask_mod: Any) -> tuple[Any, list[Tensor]] | None:
    reader = _Reader()
    try:
        return reader.read(mask_mod), reader.tensors
    except (_Opaque, ValueError):  # ValueError: a cell that is still empty
        return None


def prove(
    mask_mod: Callable[..., Tensor],
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> Proven:
    """What a mask_mod means; the proof is taken from the cache where one of its like is there.

    Raises:
        UnsupportedMask: the mask is no separable predicate; ``.reason`` says why.
    """
    device = torch.device(device)
    key = None
    found = _fingerprint(mask_mod)
    if found is not None:
        key = (found[0], batch, q_len, kv_len, device, torch.get_default_dtype())
        try:
            with _lock:
                proof = _entries.get(key)
                if proof is not None:
                    _entries.move_to_end(key)
        except TypeError:  # something that it captures can't be hashed
            key = proof = None
        if proof is not None:
            tensors = found[1]
            return Proven(proof, tuple([tensors[i] for i in proof._order]))
    lowered, captured = lower_mask_mod(mask_mod, device)
    infos = tuple(map(CapturedInfo.of, captured))

    def evaluator_of(borrow: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        return evaluator(lowered, infos, batch, q_len, kv_len, device, borrow).forward

    proof = Proof(lowered.predicate, evaluator_of)
    if key is not None and found is not None:
        at = {id(tensor): i for i, tensor in reversed(list(enumerate(found[1])))}
        if all(id(tensor) in at for tensor in captured):
            proof._order = tuple(at[id(tensor)] for tensor in captured)
            with _lock:
                _entries[key] = proof
                while len(_entries) > _MAX_ENTRIES:
                    _entries.popitem(last=False)
    return Proven(proof, tuple(captured))


@_disable_dynamo  # as torch.compiler.disable, but Dynamo is imported with the first call only
def values_of_mask_mod(
    mask_mod: Callable[..., Tensor],
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str,
) -> tuple[Predicate, Tensor, Tensor]:
    """What a mask_mod means: its predicate and the values ``(predicate, q_vals, k_vals)``.

    Under torch.compile this is a graph break: Dynamo can't trace the tracing of a mask.

    Raises:
        UnsupportedMask: the mask is no separable predicate; ``.reason`` says why.
    """
    proven = prove(mask_mod, batch, q_len, kv_len, device)
    return proven.predicate, *proven.values()
