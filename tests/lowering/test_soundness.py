"""Whatever is lowered equals the mask evaluated by PyTorch, and the check would notice if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lowering.checks import verdict
from tests.lowering.generator import random_mask
from tree_attn_op.lowering import arithmetic, comparison, emission, formula, indexing, mixed, rows
from tree_attn_op.lowering.values import Deps, Expr
from tree_attn_op.predicate.nodes import Op

SEED = 20_261_130


def run(first: int, count: int) -> Counter[str]:
    """Check masks of both dialects; every fourth is traced to aten, which takes longer."""
    found: Counter[str] = Counter()
    unequal = []
    for seed in range(first, first + count):
        result = verdict(random_mask(seed), traced=seed % 4 == 3)
        found[result] += 1
        if result == "unequal":
            unequal.append(seed)
    assert not unequal, f"lowered masks that differ from PyTorch's, by seed: {unequal}"
    return found


def check_share(found: Counter[str]) -> None:
    """The check means something only if most masks are lowered, and some are refused."""
    total = sum(found.values())
    assert found["equal"] > 0.8 * total, found
    assert found["refused"] > 0.01 * total, found


def test_random_masks(record_property: Callable[[str, object], None]) -> None:
    found = run(SEED, 500)
    record_property("seed", SEED)
    record_property("verdicts", dict(found))
    check_share(found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(20))
def test_random_masks_nightly(part: int, record_property: Callable[[str, object], None]) -> None:
    first = SEED + 1_000_000 + 1000 * part
    found = run(first, 1000)
    record_property("seed", first)
    record_property("verdicts", dict(found))
    check_share(found)


WIDER = {Op.LT: Op.LE, Op.LE: Op.LT, Op.GT: Op.GE, Op.GE: Op.GT}


def _drop_clause(original: Callable[..., Any]) -> Callable[..., Any]:
    def connect(kind: Any, parts: Any) -> Any:
        parts = list(parts)
        return original(kind, parts[:-1] if kind is formula.And and len(parts) > 1 else parts)

    return connect


def _keep_connective(original: Callable[..., Any]) -> Callable[..., Any]:
    def negation(f: Any) -> Any:
        if isinstance(f, formula.Connective):
            return type(f)(tuple(part.negation for part in f.parts))
        return original(f)

    return negation


def _clamp_from_zero(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(self: Any, base: Expr, dim: int, item: Expr) -> Any:
        node = original(self, base, dim, item)
        return node if item.op == "index" else self.call(torch.clamp, node, 0)

    return bounded


def _first_batch_row(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(base: Expr, indices: tuple[Any, ...]) -> Expr:
        of_batch = [isinstance(i, Expr) and i.deps == Deps.B for i in indices]
        if not all(of_batch):
            indices = tuple(0 if b else i for b, i in zip(of_batch, indices, strict=True))
        return original(base, indices)

    return gather


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "an index comparison wider by one": (
        comparison,
        "_compare_indices",
        lambda f: lambda op, number: f(op, number + 1),
    ),
    "strict for non-strict": (
        comparison,
        "_compare_sides",
        lambda f: lambda op, a, b: f(WIDER.get(op, op), a, b),
    ),
    "strict for non-strict on one side": (
        comparison,
        "_compare_pure",
        lambda f: lambda op, a, b: f(WIDER.get(op, op), a, b),
    ),
    "sides swapped": (
        comparison,
        "Comparison",
        lambda f: lambda op, lhs, rhs, bits=None: f(op, rhs, lhs, bits),
    ),
    "a clause dropped": (formula, "_connect", _drop_clause),
    "negation without De Morgan": (formula, "_negation", _keep_connective),
    "a folded condition not negated": (rows, "fold", lambda f: lambda x: (f(x)[0], True)),
    "the other branch dropped": (arithmetic, "select", lambda f: lambda c, yes, no: yes),
    "branches merged the wrong way round": (
        formula,
        "_merge_comparisons",
        lambda f: lambda c, yes, no: f(c, no, yes),
    ),
    "a number left out": (
        comparison,
        "linear",
        lambda f: lambda value, ring: (*f(value, ring)[:2], 0),
    ),
    "a term moved with the wrong sign": (
        comparison,
        "combine",
        lambda f: lambda op, a, b: f("add", a, b),
    ),
    "a factor left out": (arithmetic, "_scale", lambda f: lambda a, b, ring: a),
    "narrow differences not shifted": (
        rows._Rows,
        "term",
        lambda f: lambda self, term, shift: f(self, term, 0),
    ),
    "values cut to 32 bits": (rows, "_value_dtype", lambda f: lambda *_: torch.int32),
    "a wide value cut to a narrow difference": (
        comparison,
        "_compare_beyond",
        lambda f: lambda op, a, b: comparison.compare(op, a, arithmetic.cast(b, a.ring)),
    ),
    "the greatest for the least": (
        arithmetic,
        "Extremum",
        lambda f: lambda greatest, values, dtype: f(not greatest, values, dtype),
    ),
    "a case chosen without its condition": (
        comparison,
        "make_branches",
        lambda f: lambda branches: f(branches[:1] * 2),
    ),
    "a wrapped index difference taken as exact": (
        mixed,
        "never_wraps",
        lambda f: lambda value: True,
    ),
    "negative look-ups clamped to zero": (emission._Emitter, "bounded", _clamp_from_zero),
    "the first batch row for all": (indexing, "gather", _first_batch_row),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, attribute, mutate = MUTANTS[name]
    monkeypatch.setattr(home, attribute, mutate(getattr(home, attribute)))
    for seed in range(SEED, SEED + 1500):
        try:
            if verdict(random_mask(seed), traced=False) == "unequal":
                return
        except Exception:
            continue
    pytest.fail(f"no random mask notices {name}")
