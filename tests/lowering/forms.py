"""The mask forms met in public code, each in several spellings.

A mask takes its captured operands as arguments after (b, h, q, k), so that one definition gives
both dialects: symbolic tracing of it yields the pre-grad graph, a closure over the operands is the
mask_mod from which the aten graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

BATCH, Q_LEN, KV_LEN = 2, 20, 24

TABLE = "looks up a q-by-k table"
HEAD = "depends on the head index"


@dataclass(frozen=True)
class Form:
    """One spelling of one row of the table of forms.

    Attributes:
        row: number of the row.
        spelling: what is particular about this spelling.
        mask: the mask, a function of (b, h, q, k) and the captured operands.
        captured: names of the captured operands in OPERANDS.
        expected: the predicate's text, or the reason for which the mask is kept.
        dtype: of the values.
        keep: whether ``expected`` is a reason.
        text_if_symbolic: the text where captured Python ints are run-time operands, if another.
    """

    row: int
    spelling: str
    mask: Callable[..., Tensor]
    captured: tuple[str, ...]
    expected: str
    dtype: torch.dtype = torch.int64
    keep: bool = False
    text_if_symbolic: str | None = None

    @property
    def name(self) -> str:
        return f"row{self.row:02d}-{self.spelling}"

    @property
    def operands(self) -> list[Any]:
        return [OPERANDS[name] for name in self.captured]

    @property
    def mask_mod(self) -> Callable[..., Tensor]:
        operands = self.operands

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.mask(b, h, q, k, *operands)

        return mask_mod


def _operands() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)

    def ids(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    operands: dict[str, Any] = {
        "group": ids(0, 5, BATCH, KV_LEN),
        "parent": ids(0, 5, BATCH, KV_LEN),
        "group1": ids(0, 5, KV_LEN),
        "parent1": ids(0, 5, KV_LEN),
        "position": ids(0, 20, Q_LEN),
        "position2": ids(0, 20, KV_LEN),
        "enter_q": ids(0, 20, Q_LEN),
        "enter_k": ids(0, 20, KV_LEN),
        "exit_k": ids(5, 24, KV_LEN),
        "exit_q": ids(5, 24, KV_LEN),
        "pre": ids(0, 20, BATCH, KV_LEN),
        "post": ids(0, 20, BATCH, KV_LEN),
        "doc": torch.arange(KV_LEN) // 5,
        "parent_doc": torch.tensor([0, 0, 1, 1, 2]),
        "offset": torch.tensor([0, 5, 10, 15, 20, KV_LEN]),
        "chosen": torch.tensor([6, 8]),
        "rejected": torch.tensor([14, 15]),
        "end": ids(0, 26, KV_LEN),
        "count": torch.tensor(17),
        "pad": torch.rand(BATCH, KV_LEN, generator=generator) < 0.7,
        "shift": torch.tensor(4),
        "dense": torch.rand(KV_LEN, KV_LEN, generator=generator) < 0.5,
        "dense_batch": torch.rand(BATCH, KV_LEN, KV_LEN, generator=generator) < 0.5,
        "ancestors": torch.rand(5, 5, generator=generator) < 0.5,
        "window": 7,
        "prefix": 6,
    }
    for name in ("group", "parent", "position", "position2", "pre", "post", "end"):
        operands[name + "_32"] = operands[name].int()
    return operands


OPERANDS = _operands()
FORMS: list[Form] = []


def _form(
    row: int,
    spelling: str,
    mask: Callable[..., Tensor],
    captured: str,
    expected: str,
    dtype: torch.dtype = torch.int64,
    **options: Any,
) -> None:
    names = tuple(captured.split())
    FORMS.append(Form(row, spelling, mask, names, expected, dtype, **options))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _row_1() -> None:
    text = "q >= k & (q0 == k0 | q1 == k0)"
    form = partial(_form, 1)
    both = "group parent"
    form(
        "plain",
        lambda b, h, q, k, g, p: (q >= k) & ((g[b, q] == g[b, k]) | (p[b, q] == g[b, k])),
        both,
        text,
    )
    form(
        "commuted",
        lambda b, h, q, k, g, p: ((g[b, k] == p[b, q]) | (g[b, k] == g[b, q])) & (k <= q),
        both,
        text,
    )
    form(
        "logical",
        lambda b, h, q, k, g, p: torch.logical_and(
            torch.logical_or(g[b, q] == g[b, k], p[b, q] == g[b, k]), torch.ge(q, k)
        ),
        both,
        text,
    )
    form(
        "negated",
        lambda b, h, q, k, g, p: ~((q < k) | ((g[b, q] != g[b, k]) & ~(p[b, q] == g[b, k]))),
        both,
        text,
    )
    form(
        "where",
        lambda b, h, q, k, g, p: torch.where(
            q >= k, torch.where(g[b, q] == g[b, k], True, p[b, q] == g[b, k]), False
        ),
        both,
        text,
    )
    form(
        "counted",
        lambda b, h, q, k, g, p: (
            ((g[b, q] == g[b, k]).int() + (p[b, q] == g[b, k]).int() > 0) & (q - k >= 0)
        ),
        both,
        text,
    )
    form(
        "multiplied",
        lambda b, h, q, k, g, p: (
            ((g[b, q] - g[b, k]) * (p[b, q] == g[b, k]).logical_not() == 0) & (q >= k)
        ),
        both,
        text,
    )
    form(
        "methods",
        lambda b, h, q, k, g, p: q.ge(k).logical_and(
            g[b, q].eq(g[b, k]).logical_or(p[b, q].sub(g[b, k]).eq(0))
        ),
        both,
        text,
    )
    form(
        "rows-first",
        lambda b, h, q, k, g, p: (q >= k) & ((g[b][q] == g[b][k]) | (p[b][q] == g[b][k])),
        both,
        text,
    )
    form(
        "flat",
        lambda b, h, q, k, g, p: (
            (q >= k)
            & (
                (g.view(-1)[b * KV_LEN + q] == g.view(-1)[b * KV_LEN + k])
                | (p.reshape(-1)[b * KV_LEN + q] == g.view(-1)[k + b * KV_LEN])
            )
        ),
        both,
        text,
    )
    form(
        "no-batch",
        lambda b, h, q, k, g, p: (q >= k) & ((g[q] == g[k]) | (p[q] == g[k])),
        "group1 parent1",
        text,
    )
    form(
        "int32",
        lambda b, h, q, k, g, p: (q >= k) & ((g[b, q] == g[b, k]) | (p[b, q] == g[b, k])),
        "group_32 parent_32",
        text,
        torch.int32,
    )
    form(
        "mixed-widths",
        lambda b, h, q, k, g, p: (q >= k) & ((g[b, q] == g[b, k]) | (p[b, q] == g[b, k])),
        "group_32 parent",
        text,
    )
    form(
        "flex-combinators",
        lambda b, h, q, k, g, p: and_masks(
            causal,
            or_masks(lambda b, h, q, k: g[b, q] == g[b, k], lambda b, h, q, k: p[b, q] == g[b, k]),
        )(b, h, q, k),
        both,
        text,
    )


def _row_2() -> None:
    captured = "enter_q enter_k exit_k position position2"

    def plain(b, h, q, k, enter, enter2, exit2, pos, pos2):
        return (pos[q] >= pos2[k]) & (enter2[k] <= enter[q]) & (enter[q] < exit2[k])

    def window(b, h, q, k, enter, enter2, exit2, pos, pos2):
        distance = pos[q] - pos2[k]
        tree = plain(b, h, q, k, enter, enter2, exit2, pos, pos2)
        return tree & (0 <= distance) & (distance < 7)  # noqa: SIM300 - a spelling

    def commuted(b, h, q, k, enter, enter2, exit2, pos, pos2):
        tree = ~((exit2[k] <= enter[q]) | (enter[q] < enter2[k]))
        return ~(pos2[k] > pos[q]) & tree

    text = "q0 >= k0 & q0 < k1 & q1 >= k2"
    windowed = "q0 >= k0 & q0 < k1 & q1 >= k2 & q1 - k2 >= 0 & q1 - k2 < 7"
    _form(2, "plain", plain, captured, text)
    _form(2, "commuted", commuted, captured, text)
    _form(2, "window", window, captured, windowed)
    _form(
        2,
        "window-int32",
        lambda b, h, q, k, pos, pos2: (pos[q] - pos2[k]).clamp(min=-1) < 7,
        "position_32 position2_32",
        "q0 - k0 < 7",
        torch.int32,
    )


def _row_3() -> None:
    captured = "count enter_k exit_k"
    text = "q0 >= k0 & q0 < k1 & q1 != 0 & k2 != 0"

    def plain(b, h, q, k, n, enter, exit_):
        return (q < n) & (k < n) & (enter[k] <= enter[q]) & (enter[q] < exit_[k])

    def commuted(b, h, q, k, n, enter, exit_):
        inside = (exit_[k] > enter[q]) & (enter[q] >= enter[k])
        return inside & (n > k) & torch.logical_not(q >= n)

    def largest(b, h, q, k, n, enter, exit_):
        inside = (enter[k] <= enter[q]) & (enter[q] <= exit_[k] - 1)
        return (torch.maximum(q, k) < n) & inside

    _form(3, "plain", plain, captured, text)
    _form(3, "commuted", commuted, captured, text)
    _form(3, "maximum", largest, captured, text.replace("q0 < k1", "q0 <= k1"))


def _rows_4_to_8() -> None:
    nodes = "enter_k exit_q"
    text = "q >= k & q0 >= k0 & q1 <= k1"
    _form(
        4,
        "plain",
        lambda b, h, q, k, i, o: (i[k] <= i[q]) & (o[q] <= o[k]) & (k <= q),
        nodes,
        text,
    )
    _form(
        4,
        "negated",
        lambda b, h, q, k, i, o: ~((i[k] > i[q]) | (o[q] > o[k]) | (k > q)),
        nodes,
        text,
    )
    for suffix, dtype in (("", torch.int64), ("_32", torch.int32)):
        _form(
            5,
            f"plain{suffix}",
            lambda b, h, q, k, pre, post: (pre[b, k] <= pre[b, q]) & (post[b, k] >= post[b, q]),
            f"pre{suffix} post{suffix}",
            "q0 >= k0 & q1 <= k1",
            dtype,
        )

    def ancestors(b, h, q, k, doc, parent, offset):
        own, up = doc[q], parent[doc[q]]
        in_own = (k >= offset[own]) & (q >= k)
        return in_own | ((own != up) & (offset[up] <= k) & (k < offset[up + 1]))

    def ancestors_where(b, h, q, k, doc, parent, offset):
        own = doc[q]
        up = parent[own]
        from_parent = (offset[:-1][up] <= k) & (offset[1:][up] > k)
        in_own = torch.where(k < offset[own], False, k <= q)
        return torch.where(own == up, in_own, in_own | from_parent)

    text = "(q >= k & q0 <= k) | (q1 > k & q2 <= k & q3 != 0)"
    _form(6, "plain", ancestors, "doc parent_doc offset", text)
    _form(6, "where-and-slices", ancestors_where, "doc parent_doc offset", text)

    pairs = "chosen rejected"
    text = "q >= k & (q0 != 0 | k0 != 0)"
    _form(
        7,
        "plain",
        lambda b, h, q, k, c, r: ~((q >= r[b]) & (c[b] <= k) & (k < r[b])) & (q >= k),
        pairs,
        text,
        torch.int32,
    )
    _form(
        7,
        "spread",
        lambda b, h, q, k, c, r: (k <= q) & ((q < r[b]) | (k < c[b]) | (k >= r[b])),
        pairs,
        text,
        torch.int32,
    )
    text = "q >= k & q < k0"
    _form(8, "plain", lambda b, h, q, k, e: (q >= k) & (q < e[k]), "end", text)
    _form(8, "commuted", lambda b, h, q, k, e: ~(e[k] <= q) & (k <= q), "end", text)
    _form(8, "int32", lambda b, h, q, k, e: (q >= k) & (e[k] > q), "end_32", text, torch.int32)
    _form(
        8,
        "subtracted",
        lambda b, h, q, k, e: (q - k >= 0) & (q - e[k] < 0),
        "end",
        "q >= k & q - k0 < 0",
    )


def _row_9() -> None:
    form = partial(_form, 9)
    form(
        "plain",
        lambda b, h, q, k, d: (d[b, q] == d[b, k]) & (q >= k),
        "group",
        "q >= k & q0 == k0",
    )
    text = "q >= k & q - k < 7 & q0 == k0 & q1 != 0 & k1 != 0"

    def everything(b, h, q, k, d, pad, window):
        seed = q.new_ones((), dtype=torch.bool)
        inside = seed & (q - k < window) & (d[b, q] > 0)
        return inside & (d[b, q] == d[b, k]) & pad[b, k] & (q >= k)

    def other_seed(b, h, q, k, d, pad, window):
        outside = torch.zeros_like(q, dtype=torch.bool) | (q >= k + window) | (d[b, q] <= 0)
        return ~(outside | (d[b, q] != d[b, k]) | ~pad[b, k] | (q < k))

    dynamic = "q >= k & q - k < q0 & q1 == k0 & q2 != 0 & k1 != 0"
    form("everything", everything, "group pad window", text, text_if_symbolic=dynamic)
    form(
        "other-seed",
        other_seed,
        "group pad window",
        text,
        text_if_symbolic="q >= k & q < k0 & q0 == k1 & q1 != 0 & k2 != 0",
    )
    form(
        "offset",
        lambda b, h, q, k, d, shift: (d[b, q] == d[b, k]) & (q + shift >= k),
        "group shift",
        "q0 >= k & q1 == k0",
    )
    form(
        "fixed-offset",
        lambda b, h, q, k, d: (q + 4 >= k) & (d[b, q] == d[b, k]),
        "group",
        "q - k >= -4 & q0 == k0",
    )
    form(
        "two-sided-window",
        lambda b, h, q, k, d: (d[b, q] == d[b, k]) & (torch.abs(q - k) < 4),
        "group",
        "q - k >= -3 & q - k < 4 & q0 == k0",
    )
    form(
        "dilated",
        lambda b, h, q, k, d: (d[b, q] == d[b, k]) & ((q - k).abs() % 3 == 0) & (q >= k),
        "group",
        "q >= k & q0 == k0 & q1 == k1",
    )
    form(
        "bool-segment",
        lambda b, h, q, k, pad: (pad[b, q] == pad[b, k]) & (q >= k),
        "pad",
        "q >= k & q0 == k0",
        torch.int32,
    )


def _row_10() -> None:
    text = "q0 >= k0 & q1 == k1"
    captured = "doc offset"
    _form(
        10,
        "plain",
        lambda b, h, q, k, d, o: (d[q] == d[k]) & ((q - o[d[q]]) >= (k - o[d[k]])),
        captured,
        text,
    )
    _form(
        10,
        "negated",
        lambda b, h, q, k, d, o: ~((d[k] != d[q]) | ((k - o[d[k]]) > (q - o[d[q]]))),
        captured,
        text,
    )


def _kept() -> None:
    keep = partial(_form, keep=True)
    keep(11, "plain", lambda b, h, q, k, m: m[q, k], "dense", TABLE)
    keep(11, "batch", lambda b, h, q, k, m: m[b, q, k] & (q >= k), "dense_batch", TABLE)
    keep(11, "rows-first", lambda b, h, q, k, m: m[b][q][k], "dense_batch", TABLE)
    keep(11, "flat", lambda b, h, q, k, m: m.view(-1)[q * KV_LEN + k], "dense", TABLE)
    keep(11, "as-float", lambda b, h, q, k, m: m.float()[q, k] > 0.5, "dense", TABLE)
    keep(
        12,
        "plain",
        lambda b, h, q, k, n, a, d: (q < n) & (k < n) & (k <= q) & a[d[q], d[k]],
        "count ancestors doc",
        TABLE,
    )
    keep(
        12,
        "rows-first",
        lambda b, h, q, k, a, d: (k <= q) & a[d[q]][d[k]],
        "ancestors doc",
        TABLE,
    )
    head = partial(keep, 14)
    head(
        "plain",
        lambda b, h, q, k, d: (q >= k) & ((h < 4) | (d[q] == d[k])),
        "doc",
        HEAD,
    )
    head("looked-up", lambda b, h, q, k, d: (q >= k) & (d[h] <= k), "doc", HEAD)


def _row_13() -> None:
    _form(13, "causal", causal, "", "q >= k", torch.int32)
    _form(13, "commuted", lambda b, h, q, k: ~(k > q), "", "q >= k", torch.int32)
    text = "q >= k & q - k < 7"
    spellings = {
        "window": lambda b, h, q, k: (q >= k) & (q - k < 7),
        "window-commuted": lambda b, h, q, k: (k + 6 >= q) & (k <= q),
        "window-moved": lambda b, h, q, k: (k > q - 7) & ~(q < k),
        "window-between": lambda b, h, q, k: (0 <= q - k) & (q - k <= 6),  # noqa: SIM300
        "window-float": lambda b, h, q, k: (q - k < 13 / 2) & (q >= k),
        "window-clamped": lambda b, h, q, k: ((q - k).clamp(-1, 8) < 7) & (q >= k),
    }
    for spelling, mask in spellings.items():
        _form(13, spelling, mask, "", text, torch.int32)


def _row_15() -> None:
    form = partial(_form, 15)
    text = "q >= k | k0 != 0"
    form("prefix", lambda b, h, q, k, p: (k < p) | (q >= k), "prefix", text, torch.int32)
    form(
        "prefix-where",
        lambda b, h, q, k, p: torch.where(q < k, p > k, True),
        "prefix",
        text,
        torch.int32,
    )
    form("blocks", lambda b, h, q, k: (q // 4) == (k // 4), "", "q0 == k0")
    form(
        "blocks-divided",
        lambda b, h, q, k: torch.div(q, 4, rounding_mode="floor") - k // 4 == 0,
        "",
        "q0 == k0",
    )

    def diffusion(b, h, q, k, n):
        q_noisy, k_noisy = q >= n, k >= n
        q_block = torch.where(q_noisy, (q - n) // 4, q // 4)
        k_block = torch.where(k_noisy, (k - n) // 4, k // 4)
        diagonal = (q_block == k_block) & (q_noisy == k_noisy)
        offset = (q_block > k_block) & q_noisy & ~k_noisy
        causal_blocks = (q_block >= k_block) & ~q_noisy & ~k_noisy
        return diagonal | offset | causal_blocks

    form(
        "block-diffusion",
        diffusion,
        "count",
        "(q0 == k0 & q1 == k1) | (q0 >= k0 & q1 != 0 & k1 != 0) | (q0 > k0 & q1 == 0 & k1 != 0)",
    )


def _row_16() -> None:
    # The graph is followed, not the intent.
    _form(
        16,
        "and-before-equals",
        lambda b, h, q, k: (q >= k) & b % 2 == 0,
        "",
        "q < k | q0 != 0",
        torch.int32,
    )
    _form(
        16,
        "id-and-mask",
        lambda b, h, q, k, s: s[b, q] == s[b, k] & (q >= k),
        "group",
        "(q >= k & q0 == k0) | (q < k & q1 != 0)",
    )


def _batch_rows() -> None:
    text = "q >= k & q0 == k0"

    def rows(b, h, q, k, g, p):
        first, second = (q >= k) & (g[q] == g[k]), (q >= k) & (p[q] == p[k])
        return torch.where(b == 0, first, torch.where(b == 1, second, False))

    def values(b, h, q, k, g, p):
        ids_q, ids_k = torch.where(b == 0, g[q], p[q]), torch.where(b == 0, g[k], p[k])
        return (ids_q == ids_k) & (q >= k)

    captured = "group1 parent1"
    _form(9, "batch-rows", rows, captured, text + " & q1 != 0")
    _form(9, "batch-values", values, captured, text)


for _define in (
    _row_1,
    _row_2,
    _row_3,
    _rows_4_to_8,
    _row_9,
    _batch_rows,
    _row_10,
    _kept,
    _row_13,
    _row_15,
    _row_16,
):
    _define()
