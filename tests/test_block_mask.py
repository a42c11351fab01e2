"""create_block_mask: equal to flex's own builder, in linear memory."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from tree_attn_op import create_block_mask

from .attention_cases import tree_case

LISTS = [
    f"{prefix}{side}_{kind}"
    for prefix in ("", "full_")
    for side in ("kv", "q")
    for kind in ("num_blocks", "indices")
]


def assert_same(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.seq_lengths == theirs.seq_lengths
    for name in LISTS:
        got, want = getattr(ours, name), getattr(theirs, name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want), name


def forms(length: int) -> dict:
    end = tree_case(length, leaves=5).k_vals[0, 0].long()
    document = torch.arange(length) // 37
    batched = torch.stack([document, torch.arange(length) // 50])
    return {
        "tree": lambda b, h, q, k: (q >= k) & (q < end[k]),
        "document": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "window": lambda b, h, q, k: (document[q] == document[k]) & (q >= k) & (q - k < 20),
        "batch": lambda b, h, q, k: (batched[b, q] == batched[b, k]) & (q >= k),
    }


@pytest.mark.parametrize("form", ["tree", "document", "window", "batch"])
@pytest.mark.parametrize("length", [128, 300])
@pytest.mark.parametrize("sizes", [(None, None), (2, 3)])
def test_equals_flex(form: str, length: int, sizes: tuple) -> None:
    mask_mod = forms(length)[form]
    arguments = (mask_mod, *sizes, length, length)
    ours = create_block_mask(*arguments, device="cpu", BLOCK_SIZE=32)
    theirs = flex_attention.create_block_mask(*arguments, device="cpu", BLOCK_SIZE=32)
    assert_same(ours, theirs)
    assert ours.mask_mod is mask_mod


def test_default_device_and_block_size() -> None:
    mask_mod = forms(300)["tree"]
    ours = create_block_mask(mask_mod, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=(64, 32))
    assert ours.BLOCK_SIZE == (64, 32)
    assert create_block_mask(mask_mod, 1, 1, 300, 300, device="cpu").BLOCK_SIZE == (128, 128)


def _kept(reason: str, caplog: pytest.LogCaptureFixture, *arguments, **options) -> None:
    with caplog.at_level(logging.WARNING, logger="tree_attn_op.block_mask"):
        ours = create_block_mask(*arguments, device="cpu", **options)
    assert "flex_attention's own builder" in caplog.text
    assert reason in caplog.text
    assert_same(ours, flex_attention.create_block_mask(*arguments, device="cpu", **options))


def test_what_cannot_be_proven_is_flexs(caplog: pytest.LogCaptureFixture) -> None:
    table = torch.rand(64, 64) < 0.5
    _kept("", caplog, lambda b, h, q, k: table[q, k], 1, 1, 64, 64, BLOCK_SIZE=32)


def test_odd_block_sizes_are_flexs(caplog: pytest.LogCaptureFixture) -> None:
    _kept("multiples of 16", caplog, forms(64)["tree"], 1, 1, 64, 64, BLOCK_SIZE=24)


def test_partial_for_full_never_the_reverse() -> None:
    """Ids in no order: bounds decide little, and what they do not decide stays partial."""
    ids = torch.randint(0, 2, (128,))
    ids[:64] = 1

    def mask_mod(b, h, q, k):
        return (ids[q] != 5) & (ids[k] * 2 != 7)

    ours = create_block_mask(mask_mod, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=32)
    theirs = flex_attention.create_block_mask(mask_mod, 1, 1, 128, 128, "cpu", BLOCK_SIZE=32)
    full = set(map(tuple, _pairs(ours, "full_kv")))
    assert full <= set(map(tuple, _pairs(theirs, "full_kv")))
    listed = full | set(map(tuple, _pairs(ours, "kv")))
    assert listed >= set(map(tuple, _pairs(theirs, "full_kv") + _pairs(theirs, "kv")))


def _pairs(block_mask: BlockMask, name: str) -> list[tuple[int, int]]:
    number = getattr(block_mask, f"{name}_num_blocks")[0, 0].tolist()
    indices = getattr(block_mask, f"{name}_indices")[0, 0].tolist()
    return [(i, j) for i, row in enumerate(indices) for j in row[: number[i]]]


@pytest.mark.parametrize("lengths", [(0, 70), (70, 0), (0, 0)])
def test_no_tokens(lengths: tuple[int, int]) -> None:
    """Also for a mask that can't be proven: there is nothing to prove."""

    def per_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (h == 0)

    for mask_mod in (forms(70)["tree"], per_head):
        block_mask = create_block_mask(mask_mod, 2, 3, *lengths, device="cpu", BLOCK_SIZE=32)
        rows, columns = (-(-length // 32) for length in lengths)
        assert block_mask.seq_lengths == lengths
        assert block_mask.kv_indices.shape == (2, 3, rows, columns)
        assert block_mask.full_q_indices is not None
        assert block_mask.full_q_indices.shape == (2, 3, columns, rows)
        for counts in (block_mask.kv_num_blocks, block_mask.full_q_num_blocks):
            assert counts is not None
            assert not counts.any()


def test_one_block_for_everything() -> None:
    mask_mod = forms(300)["tree"]
    block_mask = create_block_mask(mask_mod, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=1 << 30)
    assert block_mask.kv_num_blocks.tolist() == [[[1]]]
    assert block_mask.full_kv_num_blocks is not None
    assert block_mask.full_kv_num_blocks.tolist() == [[[0]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE"),
        ({"BLOCK_SIZE": (32, -16)}, "BLOCK_SIZE"),
        ({"BLOCK_SIZE": (32, 32, 32)}, "BLOCK_SIZE"),
        ({"BLOCK_SIZE": 32.0}, "BLOCK_SIZE"),
        ({"B": -1}, "B must be"),
        ({"H": 1.5}, "H must be"),
        ({"Q_LEN": -3}, "Q_LEN must be"),
        ({"KV_LEN": "9"}, "KV_LEN must be"),
    ],
)
def test_sizes_that_are_none(options: dict, message: str) -> None:
    sizes = {"B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        create_block_mask(forms(64)["tree"], device="cpu", **sizes)


def test_compiled() -> None:
    end = tree_case(300, leaves=5).k_vals[0, 0].long()

    def build(end: Tensor) -> BlockMask:
        def mask_mod(b, h, q, k):
            return (q >= k) & (q < end[k])

        return create_block_mask(mask_mod, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=32)

    assert_same(torch.compile(build, backend="aot_eager")(end), build(end))
