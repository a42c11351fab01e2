"""Kept proofs: used again only where tracing would see the same, and right when they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from tree_attn_op.errors import UnsupportedMask
from tree_attn_op.lowering import cache

LENGTH = 24
WINDOW = 5
OFFSETS = [3]


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that were traced, in order; the cache starts empty."""
    calls: list[Any] = []

    def counting(mask_mod: Any, device: Any, lower: Callable = cache.lower_mask_mod) -> Any:
        calls.append(mask_mod)
        return lower(mask_mod, device)

    monkeypatch.setattr(cache, "lower_mask_mod", counting)
    cache._entries.clear()
    return calls


def check(mask_mod: Callable[..., Tensor]) -> None:
    """What is found equals the mask itself."""
    predicate, q_vals, k_vals = cache.values_of_mask_mod(mask_mod, 1, LENGTH, LENGTH, "cpu")
    index = torch.arange(LENGTH)
    b = torch.zeros((), dtype=torch.long)
    expected = torch.stack(
        [torch.stack([mask_mod(b, b, q, k).reshape(()) for k in index]) for q in index]
    )
    assert torch.equal(predicate.dense(q_vals, k_vals, LENGTH, LENGTH)[0], expected)


def ids(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(seed))


def documents(x: Tensor, window: int = 7) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (x[q] == x[k]) & (q >= k) & (q - k < window)


def test_one_proof_for_other_contents(traced: list[Any]) -> None:
    for seed in range(4):
        check(documents(ids(seed)))
    assert len(traced) == 1


def test_changed_in_place(traced: list[Any]) -> None:
    x = ids(0)
    mask_mod = documents(x)
    check(mask_mod)
    x.copy_(ids(1))
    check(mask_mod)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: documents(ids(0), window=3),
        lambda: documents(ids(0).int()),
        lambda: documents(ids(0, LENGTH + 1)),
        lambda: documents(ids(0, 2 * LENGTH)[::2]),
        lambda: and_masks(documents(ids(0)), documents(ids(1))),
    ],
    ids=["number", "dtype", "length", "strides", "composed"],
)
def test_what_tracing_can_see_is_told_apart(other: Callable, traced: list[Any]) -> None:
    check(documents(ids(0)))
    check(other())
    assert len(traced) == 2


def pair(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (x[q] == y[k]) & (q >= k)


def test_one_tensor_twice_is_not_two_tensors(traced: list[Any]) -> None:
    x, y = ids(0), ids(1)
    for first, second in ((x, x), (x, y), (y, x), (y, y)):
        check(pair(first, second))
    assert len(traced) == 2


def test_globals(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < WINDOW) & (q >= OFFSETS[0])

    check(mask_mod)
    check(mask_mod)
    assert len(traced) == 1
    monkeypatch.setitem(globals(), "WINDOW", 9)
    check(mask_mod)
    monkeypatch.setitem(globals(), "OFFSETS", [11])
    check(mask_mod)
    assert len(traced) == 3


def test_defaults_partials_and_closures_of_closures(traced: list[Any]) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, x: Tensor, n: int = 4) -> Tensor:
        return (x[q] >= x[k] - n) & (q >= k)

    def inverted(inner: Callable) -> Callable:
        return lambda b, h, q, k: ~inner(b, h, q, k)

    for seed in range(2):
        check(functools.partial(mask_mod, x=ids(seed)))
        check(functools.partial(mask_mod, x=ids(seed), n=2))
        check(inverted(documents(ids(seed))))
    assert len(traced) == 3


class Stateful:
    def __init__(self, x: Tensor, window: int) -> None:
        self.x, self.window = x, window

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (self.x[q] == self.x[k]) & (q - k < self.window)

    def method(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self(b, h, q, k)


def test_objects_with_state_are_traced_each_time(traced: list[Any]) -> None:
    state = Stateful(ids(0), 4)
    for window in (4, 2):
        state.window = window
        check(state)
        check(state.method)
        check(lambda b, h, q, k: state(b, h, q, k))
    assert len(traced) == 6


def helper(q: Tensor, k: Tensor) -> Tensor:
    return q - k < helper.window


def back_doors(x: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Masks that read a window where a fingerprint could miss it."""

    def imports(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        from tests.lowering.test_cache import WINDOW

        return (x[q] == x[k]) & (q - k < WINDOW)

    def evaluates(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & (q - k < eval("WINDOW"))

    def looks_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & (q - k < globals()["WINDOW"])

    def of_a_function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & helper(q, k)

    def of_a_tensor(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & (q - k < x.window)

    def of_torch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & (q - k < torch.tests_window)

    masks = (imports, evaluates, looks_up, of_a_function, of_a_tensor, of_torch)
    return {mask.__name__: mask for mask in masks}


@pytest.mark.parametrize("name", back_doors(torch.zeros(1)))
def test_hidden_state_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ids(0)
    mask_mod = back_doors(x)[name]
    for window in (3, 9, 2):
        monkeypatch.setitem(globals(), "WINDOW", window)
        monkeypatch.setattr(helper, "window", window, raising=False)
        monkeypatch.setattr(torch, "tests_window", window, raising=False)
        x.window = window
        check(mask_mod)


def test_bound_builtin_is_not_taken_for_a_constant(traced: list[Any]) -> None:
    for seed in range(2):
        equal = ids(seed).eq
        with pytest.raises(UnsupportedMask):
            cache.values_of_mask_mod(
                lambda b, h, q, k, equal=equal: equal(q)[k], 1, LENGTH, LENGTH, "cpu"
            )
    assert len(traced) == 2


def test_the_cache_is_bounded(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_ENTRIES", 3)
    for window in range(6):
        cache.values_of_mask_mod(documents(ids(0), window), 1, LENGTH, LENGTH, "cpu")
    assert len(cache._entries) == 3


def test_an_attribute_of_a_partial_is_seen() -> None:
    x = ids(0)
    window = functools.partial(int)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (x[q] == x[k]) & (q - k < window.width)  # type: ignore[attr-defined]

    for width in (3, 9):
        window.width = width  # type: ignore[attr-defined]
        check(mask_mod)
