"""This torch lays flex_attention calls out as the pass reads them; from one that doesn't, the pass
keeps its hands off.

If a test here fails on a new release of torch, read its ``BlockMask.as_tuple`` and its
``FlexAttentionHOP.__call__`` and teach ``passes/flex_call.py`` the new layout. Until then every
call stays flex.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import passes
from passes import flex_call


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The layout is asked for once a process: ask again, before and after."""
    flex_call.unknown_layout.cache_clear()
    yield
    flex_call.unknown_layout.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_this_torch_writes_calls_as_the_pass_reads_them() -> None:
    assert flex_call.unknown_layout() is None


def test_the_tuple_of_a_real_block_mask_is_read_by_its_places() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 384, "cpu", BLOCK_SIZE=(64, 32))
    parts = mask.as_tuple()
    assert len(parts) in flex_call._BLOCK_MASK_SIZES
    read = {name: parts[place] for name, place in flex_call._BLOCK_MASK_PLACES.items()}
    sizes = ("q_len", "kv_len", "q_block_size", "kv_block_size")
    assert tuple(read.pop(name) for name in sizes) == (256, 384, 64, 32)
    for name, part in read.items():
        assert part is getattr(mask, name), name


def reason_of_a_good_call() -> str | None:
    end = torch.full((256,), 256)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q < end[k]), None, None, 256, 256, device="cpu"
    )
    query = torch.randn(1, 1, 256, 16)
    torch._dynamo.reset()
    with torch.no_grad():
        report = passes.explain(
            lambda query: flex_attention(query, query, query, block_mask=mask), query
        )
    (call,) = report
    assert call.rewritten is (call.reason is None)
    return call.reason


@pytest.mark.usefixtures("asked_anew")
def test_a_good_call_is_rewritten() -> None:
    assert reason_of_a_good_call() is None


@pytest.mark.usefixtures("asked_anew")
def test_the_same_number_of_parts_in_another_order_keeps_flex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = BlockMask.as_tuple

    def swapped(self: BlockMask, flatten: bool = True) -> tuple:
        parts = original(self, flatten)
        # Only the layout that is asked for: flex itself shall still work.
        if type(self) is BlockMask:
            return parts
        return (*parts[:2], *parts[4:6], *parts[2:4], *parts[6:])

    monkeypatch.setattr(BlockMask, "as_tuple", swapped)
    assert reason_of_a_good_call() == (
        "unknown layout of the block mask: this torch has full_kv_num_blocks where kv_num_blocks "
        "is known to be"
    )


@pytest.mark.usefixtures("asked_anew")
def test_another_number_of_parts_keeps_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_call, "_BLOCK_MASK_SIZES", {3: "torch 1.0"})
    reason = reason_of_a_good_call()
    assert reason is not None
    assert reason.startswith("unknown layout of the block mask: ")
    assert reason.endswith(" entries, known are 3 (torch 1.0)")


@pytest.mark.usefixtures("asked_anew")
def test_another_argument_of_the_call_keeps_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_call, "_PARAMETERS", flex_call._PARAMETERS[:-1])
    reason = reason_of_a_good_call()
    assert reason is not None
    assert reason.startswith("unknown arguments of flex_attention: query, key, value")
