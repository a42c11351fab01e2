"""Who works on what: a warp of each thread block hands its items to the others.

A persistent block takes an item when it is about to need one, by an addition to a counter in
global memory; so blocks end together, whatever their items cost. The *dispatcher* warp does so,
loads what there is to know of the item, and puts it into a slot of shared memory, from which the
producer and the two consumers read it. None of them waits for global memory between items.

Items go by K/V heads, a few at a time (``_heads_together`` in ``prepare.py``): what the blocks
read, and in the fast backward what they add to, is then in the L2 cache. Within these heads the
heaviest items come first, those of one rank for all heads side by side.
"""

from __future__ import annotations

from tree_attn_op.predicate import Kind, Op

from .compat import gl, gluon, mbarrier
from .schedule import KEY_TILE

FIELDS = gl.constexpr(16)
"""Numbers in a slot: seven of the item, whether there is one, and one that nobody reads."""
ROW_SLOTS = gl.constexpr(2)
"""Rows of queries are short: the next one must be known early."""
TOUCHED = gl.constexpr(8)
"""Partial tiles of a row whose values are brought into the L1 cache: most rows have no more."""
ITEM_SLOTS = gl.constexpr(1)
"""Items of keys are long: a block shall not hold on to more than one that it has not begun."""


@gluon.jit
def make_queue(SLOTS: gl.constexpr):
    """Slots in shared memory, with the barriers that say of each that it is filled, and read."""
    slots = gl.allocate_shared_memory(
        gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(read.index(i), count=3)
    return slots, filled, read


@gluon.jit
def _put(queue, turn, field, number, SLOTS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = queue[0].index(turn % SLOTS * FIELDS + field)
    place.store(gl.full([1], 0, gl.int32, LAYOUT) + number)


@gluon.jit
def _get(queue, turn, field, SLOTS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(queue[0].index(turn % SLOTS * FIELDS + field).load(LAYOUT), 0)


@gluon.jit
def _await_free(queue, turn, SLOTS: gl.constexpr):
    mbarrier.wait(queue[2].index(turn % SLOTS), ((turn // SLOTS) & 1) ^ 1)


@gluon.jit
def _hand_out(queue, turn, a, b, c, d, e, f, g, more, SLOTS: gl.constexpr):
    """Fill the slot of a turn, which must be free."""
    _put(queue, turn, 0, a, SLOTS)
    _put(queue, turn, 1, b, SLOTS)
    _put(queue, turn, 2, c, SLOTS)
    _put(queue, turn, 3, d, SLOTS)
    _put(queue, turn, 4, e, SLOTS)
    _put(queue, turn, 5, f, SLOTS)
    _put(queue, turn, 6, g, SLOTS)
    _put(queue, turn, 7, more, SLOTS)
    mbarrier.arrive(queue[1].index(turn % SLOTS))


@gluon.jit
def look_up(queue, turn, SLOTS: gl.constexpr):
    """The eight numbers of a turn. Whoever calls it must call ``release`` once."""
    mbarrier.wait(queue[1].index(turn % SLOTS), (turn // SLOTS) & 1)
    return (
        _get(queue, turn, 0, SLOTS), _get(queue, turn, 1, SLOTS), _get(queue, turn, 2, SLOTS),
        _get(queue, turn, 3, SLOTS), _get(queue, turn, 4, SLOTS), _get(queue, turn, 5, SLOTS),
        _get(queue, turn, 6, SLOTS), _get(queue, turn, 7, SLOTS),
    )  # fmt: skip


@gluon.jit
def release(queue, turn, SLOTS: gl.constexpr):
    """Say that this role needs the turn's slot no more."""
    mbarrier.arrive(queue[2].index(turn % SLOTS))


@gluon.jit
def _group_width(heads, together):
    """How many of ``heads`` K/V heads of all batches make a group, of ``together`` or more, so
    that groups are of one size, but for the first."""
    groups = gl.maximum(heads // together, 1)
    return (heads + groups - 1) // groups


@gluon.jit
def _rank_and_column(position, ranks, columns, width):
    """Rank and column (batch and head) of the ``position``-th item, ``width`` columns at a time.

    If they do not divide all columns, the first group is the narrow one: at the end there must be
    enough to do for all blocks.
    """
    missing = (width - columns % width) % width
    group = (position + ranks * missing) // (ranks * width)
    first = gl.maximum(group * width - missing, 0)
    if group == 0:
        width -= missing
    rest = position - ranks * first
    return rest // width, first + rest % width


@gluon.constexpr_function
def _key_rows(program):
    """Numbers of the rows of key values that a predicate's program reads."""
    rows = set()
    at = 0
    while at < len(program):
        op = program[at]
        if op in (Op.AND, Op.OR):
            at += 2 + program[at + 1]
        elif op in (Op.TRUE, Op.FALSE):
            at += 2
        else:
            terms = (program[at + i : at + i + 2] for i in (1, 3, 5, 7))
            rows |= {number for kind, number in terms if kind == Kind.K_ROW}
            at += 9
    return tuple(sorted(rows))


@gluon.jit
def _touch_values(
    touched, tile, batch, values, kv_len, PROGRAM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Read the key values that the predicate wants of a tile; adds them to what was read."""
    _q_vals, _q_batch_stride, _q_stride, k_vals, k_batch_stride, k_stride = values
    ROWS: gl.constexpr = _key_rows(PROGRAM)
    key = gl.minimum(tile * KEY_TILE + 2 * gl.arange(0, 32, LAYOUT), kv_len - 1)
    base = k_vals + batch.to(gl.int64) * k_batch_stride
    for i in gl.static_range(len(ROWS)):
        touched += gl.load(base + ROWS[i] * k_stride + key).to(gl.int32)
    return touched


@gluon.jit
def _touch_row(
    touched, list_row, partials, fulls, first_0, first_1, batch, lists, values, kv_len,
    PROGRAM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Read what the others will want of a row next: so they find it in the L1 cache."""
    kv_tiles = lists[5]
    # A line of the cache holds 32 numbers of a list.
    line = 32 * gl.arange(0, 32, LAYOUT)
    row = list_row.to(gl.int64) * kv_tiles
    touched += gl.load(lists[1] + row + gl.minimum(line, gl.maximum(partials - 1, 0)))
    touched += gl.load(lists[2] + row + gl.minimum(line, gl.maximum(fulls - 1, 0)))
    touched = _touch_values(touched, first_0 >> 2, batch, values, kv_len, PROGRAM, LAYOUT)
    touched = _touch_values(touched, first_1 >> 2, batch, values, kv_len, PROGRAM, LAYOUT)
    for i in range(gl.minimum(partials, TOUCHED)):
        tile = gl.load(lists[1] + row + i)
        touched = _touch_values(touched, tile, batch, values, kv_len, PROGRAM, LAYOUT)
    return touched


@gluon.jit
def dispatch_rows(queue, lists, values, rows, kv_len, ITEMS: gl.constexpr, PROGRAM: gl.constexpr):
    """Hand out query rows: ``(q_tile, partials, fulls, first_0, first_1, batch, head_item)``.

    Args:
        lists: ``(schedule, partial_tiles, full_tiles, list_batch_rows, q_tiles, kv_tiles, batches,
            head_items)``. ``schedule`` is what ``RowSchedule`` returns; the next two are BlockMask
            lists without their head dimension. ``list_batch_rows`` is ``q_tiles``, or 0 where all
            batches share one list.
        values: see ``pair_masks.py``.
        rows: their number in all, or 0.
        ITEMS: head items (heads, or pairs of them) of a K/V head.
    """
    schedule, list_batch_rows, q_tiles, head_items = lists[0], lists[3], lists[4], lists[7]
    columns = lists[6] * head_items
    position = gl.program_id(0)
    width = _group_width(columns // ITEMS, gl.load(schedule + 5)) * ITEMS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    touched = gl.zeros([32], gl.int32, LAYOUT)
    turn = 0
    while position < rows:
        rank, column = _rank_and_column(position, q_tiles, columns, width)
        batch = column // head_items
        entry = schedule + (batch * list_batch_rows + rank).to(gl.int64) * 8
        q_tile = gl.load(entry)
        partials = gl.load(entry + 1)
        fulls = gl.load(entry + 2)
        first_0 = gl.load(entry + 3)
        first_1 = gl.load(entry + 4)
        _hand_out(
            queue, turn, q_tile, partials, fulls, first_0, first_1, batch, column % head_items, 1,
            ROW_SLOTS,
        )  # fmt: skip
        touched = _touch_row(
            touched, batch * list_batch_rows + q_tile, partials, fulls, first_0, first_1, batch,
            lists, values, kv_len, PROGRAM, LAYOUT,
        )  # fmt: skip
        turn += 1
        _await_free(queue, turn, ROW_SLOTS)
        position = gl.num_programs(0) + gl.atomic_add(schedule + 6, 1, sem="relaxed")
    # Written, so that nobody leaves out the loads.
    _put(queue, turn, 8, gl.sum(touched, 0), ROW_SLOTS)
    _hand_out(queue, turn, 0, 0, 0, 0, 0, 0, 0, 0, ROW_SLOTS)


@gluon.jit
def dispatch_items(queue, codes):
    """Hand out pairs of key tiles: ``(batch, kv_head, key_pair, listed, mixed, total, 0)``.

    Of ``listed`` bit 0 and bit 1 say whether any query sees the pair's first and second key tile.

    Args:
        codes: ``(order, counts, entries, list_batch_rows, key_pairs, q_tiles, batches,
            kv_heads)``; the first three are what ``BackwardPreparation`` returns.
    """
    order, counts, _, list_batch_rows, key_pairs, _, batches, kv_heads = codes
    columns = batches * kv_heads
    position = gl.program_id(0)
    width = _group_width(columns, gl.load(order))
    turn = 0
    while position < key_pairs * columns:
        rank, column = _rank_and_column(position, key_pairs, columns, width)
        batch = column // kv_heads
        code = gl.load(order + 2 + (batch * list_batch_rows + rank))
        key_pair = code >> 2
        count = counts + 2 * (batch * list_batch_rows + key_pair)
        mixed = gl.load(count)
        total = mixed + gl.load(count + 1)
        _hand_out(
            queue, turn, batch, column % kv_heads, key_pair, code & 3, mixed, total, 0, 1,
            ITEM_SLOTS,
        )  # fmt: skip
        turn += 1
        _await_free(queue, turn, ITEM_SLOTS)
        position = gl.num_programs(0) + gl.atomic_add(order + 1, 1, sem="relaxed")
    _hand_out(queue, turn, 0, 0, 0, 0, 0, 0, 0, 0, ITEM_SLOTS)
