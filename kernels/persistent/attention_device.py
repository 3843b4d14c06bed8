# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005, SIM102 (a tuple of tensors grows by +; one condition may be known when compiling and the next not)

"""The device code of a step's attention; attention.py says what it computes.

An item is a span of the cache (plan.py), the columns of a part of a run, and one key/value head. Products are transposed: keys, and then the dimensions of
a head, are the rows of a wgmma, and the query rows of all the item's columns (R heads a column) are its few columns. So a thread has KEYS * QUERIES / 256
scores, where a tile of 64 query rows would be filled by one column to an eighth; a sum or maximum over keys is one over rows of the result.

Keys and values come by cp.async, a block of KEYS positions each in flight: the next block's keys while this one's weights are made, its values behind them. A
head of keys and queries is kept as two halves of its dimension: rope pairs element d of one with element d of the other. Halves lie one after the other,
so both are also one matrix. Values are kept in blocks of 64 dimensions.

New keys and queries are rows of one loop that norms and rotates them; row p % 8 of the first eight is the new key at position p, as it lies in the cache's
groups of 8 rows. They are put into the block in shared memory, which only the item whose span has them needs in this step, and stored to the cache when
the products are under way. Positions from the first new one on are never read from the cache.

A load that waits for another costs a trip to the L2 cache, so what an item has to load is asked for before any of it is waited for: its keys and queries, the
next item's row of the plan; behind them that one's page and the new values, which are waited for where weights meet them.

What does not depend on this layer's products, the plan and the old keys, is loaded by `prepare`, ahead of the barrier behind them. So are the old values of
the first item, by other threads that have nothing else to do (AHEAD: `fetch_values`, and behind the barrier `give_values`), or else as far as the L2 cache.

CAUSAL: a column sees the keys of its run up to its own; else those of the whole run, which then every part of it puts into the block and only the columns'
own part stores.

The partial results of a span (maximum, sum, mixed values) go to a workspace, and are added in the order of the spans: by the item of the run and head
that comes last (`merge_arrived`), by all programs behind a barrier over the grid (`merge_columns`), or by other threads that poll for them
(`merge_tagged`); see merge_device.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..moe.stream import cta_barrier, store_tagged
from .attention_rows import ROWS_AT_ONCE, added, append, ask, ask_rows, new_keys, operand, place, stage, staged_rows
from .merge_device import exp2, merge_arrived, merge_columns, nothing, row_lanes, spans_of_row
from .plan import CHUNK, FIELDS

_CHUNK, _FIELDS = gl.constexpr(CHUNK), gl.constexpr(FIELDS)
STAMPS = 8                      # places of a program
_STAMPS = gl.constexpr(STAMPS)
_LOW = gl.constexpr(-1e30)       # below any score: of a row that has seen none, every weight is 2**-inf


@gluon.constexpr_function
def copy_lanes(width, num_warps):
    """[rows, width]: 16 bytes of bf16 a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def products(rows, columns, num_warps):
    """Results of a wgmma; warpgroups share the rows, or where there are only 64 the columns."""
    if rows >= 16 * num_warps:
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 16])
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, num_warps // 4], instr_shape=[16, columns * 4 // num_warps, 16])


@gluon.constexpr_function
def value_width(half):
    """Dimensions of a head of values as a product takes them: at least 64, the rows of a wgmma."""
    return max(64, 2 * half)


@gluon.jit
def make_buffers(HALF: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr):
    """Shared memory of `attend`, for a head of 128: 64 KB for 128 keys, and 0.75 KB for every query row."""
    VALUES: gl.constexpr = value_width(HALF)
    k = gl.allocate_shared_memory(gl.bfloat16, [2 * KEYS // 8, 8, HALF], operand(HALF))
    v = gl.allocate_shared_memory(gl.bfloat16, [VALUES // 64 * KEYS // 8, 8, 64], operand(64))
    q = gl.allocate_shared_memory(gl.bfloat16, [2 * staged_rows(QUERIES) // ROWS_AT_ONCE, ROWS_AT_ONCE, HALF], operand(HALF))
    weights = gl.allocate_shared_memory(gl.bfloat16, [KEYS, QUERIES], operand(QUERIES))
    return k, v, q, weights


# --- the plan ---


@gluon.jit
def _item(pages_ptr, rows_ptr, num_pages, item, items, G: gl.constexpr, HALF: gl.constexpr):
    """What there is to know of an item: (first column of the run, columns before and in the item, position of the run, slot, first and end chunk, span, spans,
    where its keys begin in a cache [page, keys | values, G, 128, head dimension]); behind the last item zeros."""
    there = item < items
    row = rows_ptr + item // G * _FIELDS
    first_column = gl.load(row, mask=there, other=0)
    columns = gl.load(row + 1, mask=there, other=0)
    start = gl.load(row + 2, mask=there, other=0)
    slot = gl.load(row + 3, mask=there, other=0)
    first = gl.load(row + 4, mask=there, other=0)
    end = gl.load(row + 5, mask=there, other=0)
    span = gl.load(row + 6, mask=there, other=0)
    spans = gl.load(row + 7, mask=there, other=0)
    page = gl.load(pages_ptr + slot * num_pages + first, mask=there, other=0)
    return first_column, columns, start, slot, first, end, span, spans, _keys_at(page, item % G, G, HALF)


@gluon.jit
def _keys_at(page, group, G: gl.constexpr, HALF: gl.constexpr):
    return (page.to(gl.int64) * (2 * G) + group) * (_CHUNK * 2 * HALF)


@gluon.jit
def _fetch(buffer, from_ptr, before, WIDTH: gl.constexpr, BLOCK: gl.constexpr, HALF: gl.constexpr, KEYS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Begin to copy the rows below `before` of a block's keys or values, a group of copies; zeros in the others, and beyond the head's dimension."""
    LAYOUT: gl.constexpr = copy_lanes(WIDTH, NUM_WARPS)
    j = gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    mask = j < before + nothing()
    if WIDTH > 2 * HALF:
        mask = mask & (d < 2 * HALF)
    at = from_ptr + (j.to(gl.int64) * (2 * HALF) + d.to(gl.int64))      # 64 bits: so rows are constants apart, in the instructions
    async_copy.async_copy_global_to_shared(buffer._reinterpret(gl.bfloat16, [KEYS, WIDTH], operand(BLOCK)), at, mask=mask)


@gluon.jit
def _to_l2(from_ptr, lines, LINES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Bring the first `lines` of LINES runs of 64 bf16 into the L2 cache."""
    SIZE: gl.constexpr = max(32 * NUM_WARPS, 1 << (LINES - 1).bit_length())
    line = nothing() + gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    gl.inline_asm_elementwise("{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r,r",
                              [from_ptr + line * 64, line, line * 0 + lines], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prepare(k, norm_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr,
            NORM: gl.constexpr, KEYS: gl.constexpr, NUM_WARPS: gl.constexpr, AHEAD: gl.constexpr = False):
    """What program `number` needs of its first item and has before this layer's queries, keys and values: the plan; its keys, on the way; its values, unless
    AHEAD, and the norms, on the way to the L2 cache. Returns the item for `attend`."""
    items = gl.load(num_rows_ptr) * G
    item = _item(pages_ptr, rows_ptr, num_pages, number, items, G, HALF)
    keys = cache_ptr + item[8]
    before = item[2] - item[4] * _CHUNK
    _fetch(k, keys, before, 2 * HALF, HALF, HALF, KEYS, NUM_WARPS)
    async_copy.commit_group()
    if not AHEAD:
        _to_l2(keys + G * _CHUNK * 2 * HALF, gl.minimum(before, KEYS) * 2 * HALF // 64, KEYS * 2 * HALF // 64, NUM_WARPS)
    if NORM:
        _to_l2(norm_ptr, gl.where(number < items, (H + G) * 2 * HALF // 64, 0), (H + G) * 2 * HALF // 64, NUM_WARPS)
    return (items,) + item


@gluon.jit
def fetch_values(v, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G: gl.constexpr, HALF: gl.constexpr, KEYS: gl.constexpr,
                 NUM_WARPS: gl.constexpr):
    """The values of that item, on the way: by threads that do not attend, of `NUM_WARPS` warps, into memory that they have used until now."""
    item = _item(pages_ptr, rows_ptr, num_pages, number, gl.load(num_rows_ptr) * G, G, HALF)
    cta_barrier()       # all warps are done with what was there
    _fetch(v, cache_ptr + (item[8] + G * _CHUNK * 2 * HALF), item[2] - item[4] * _CHUNK, value_width(HALF), 64, HALF, KEYS, NUM_WARPS)
    async_copy.commit_group()


@gluon.jit
def give_values(there):
    """They are there for the wgmma of whoever waits for the mbarrier `there`, of one arrival a layer, item or not."""
    async_copy.wait_group(0)
    _arrived()
    mbarrier.arrive(there, count=1)


# --- an item ---


@gluon.jit
def _arrived():
    """What this thread copied or stored into shared memory is there for every thread's wgmma, behind `wait_group`."""
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _stamp(stamps_ptr, place, number, STAMPED: gl.constexpr, NUM_WARPS: gl.constexpr):
    """When a program has come here the last time, in ns."""
    if STAMPED:
        i = nothing() + gl.arange(0, 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [i], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(stamps_ptr + number * _STAMPS + place + i, now, mask=i == 0)


@gluon.jit
def _four(row, there, a, b, c, d):
    """Four fields of a row, or if it is not there what they are now."""
    return (gl.load(row, mask=there, other=a), gl.load(row + 1, mask=there, other=b), gl.load(row + 2, mask=there, other=c),
            gl.load(row + 3, mask=there, other=d))


@gluon.jit
def _bf16(x):
    """Two at a time."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _store_partial(mixed_ptr, stats_ptr, largest, sums, mixed, first, count, HALF: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr,
                   NUM_WARPS: gl.constexpr, TAGGED: gl.constexpr, tag):
    """`count` rows of a span's partial results, from row `first` of all; TAGGED: as words with a tag, the statistics behind what they weigh."""
    VALUES: gl.constexpr = value_width(HALF)
    SCORES: gl.constexpr = products(KEYS, QUERIES, NUM_WARPS)
    MIXED: gl.constexpr = products(VALUES, QUERIES, NUM_WARPS)
    if not TAGGED:
        row = nothing() + gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES))
        gl.store(stats_ptr + first * 2 + row * 2, largest, mask=row < count)
        gl.store(stats_ptr + first * 2 + row * 2 + 1, gl.sum(sums, 0), mask=row < count)
    row = gl.arange(0, QUERIES, gl.SliceLayout(0, MIXED))[None, :]
    d = gl.arange(0, VALUES, gl.SliceLayout(1, MIXED))[:, None]
    mask = (row < count + nothing()) & (d >= 0)
    if VALUES > 2 * HALF:
        mask = mask & (d < 2 * HALF)
    if TAGGED:
        store_tagged(mixed_ptr + first * (4 * HALF) + (row.to(gl.int64) * (4 * HALF) + d.to(gl.int64) * 2), mixed, tag, mask)
        row = (nothing() + gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES)))[None, :]
        key = gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))[:, None]
        mask = (key == 0) & (row < count)       # by one lane, where a gl.store would see to that
        at = stats_ptr + (first * 4 + row * 4 + key * 0)
        store_tagged(at, gl.where(mask, largest[None, :], 0.0), tag, mask)
        store_tagged(at + 2, gl.where(mask, gl.sum(sums, 0)[None, :], 0.0), tag, mask)
    else:
        gl.store(mixed_ptr + first * (2 * HALF) + (row.to(gl.int64) * (2 * HALF) + d.to(gl.int64)), mixed, mask=mask)


@gluon.jit
def attend(first_item, buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages,
           number, stamps_ptr, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr,
           EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr, LAST_MERGES: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr,
           SPLITS: gl.constexpr, STAMPED: gl.constexpr, NUM_WARPS: gl.constexpr, CAUSAL: gl.constexpr = True, AHEAD: gl.constexpr = False, given=None,
           turn=None, TAGGED: gl.constexpr = False, tag=None):
    """The items of program `number` of PROGRAMS: one from the front of the plan, then one from the back of every further round. first_item: of `prepare`.

    SCALE: of scores, with log2(e) in it. AHEAD: the first item's first values come by `fetch_values`; given: where `give_values` says so, with the parity of
    `turn`. TAGGED: mixed_ptr and stats_ptr are of words, which get the tag, and `merge_tagged` adds them up. Leaves shared memory behind a barrier over the
    program only.
    """
    R: gl.constexpr = H // G
    VALUES: gl.constexpr = value_width(HALF)
    SCORES: gl.constexpr = products(KEYS, QUERIES, NUM_WARPS)
    MIXED: gl.constexpr = products(VALUES, QUERIES, NUM_WARPS)
    ROW: gl.constexpr = row_lanes(HALF, NUM_WARPS)
    VALUE_ROW: gl.constexpr = row_lanes(64, NUM_WARPS)
    STAGED: gl.constexpr = staged_rows(QUERIES)
    TO_VALUES: gl.constexpr = G * _CHUNK * 2 * HALF   # from the keys of a chunk to its values
    SPLIT: gl.constexpr = C * (H + 2 * G) * 2 * HALF
    k, v, q, weights = buffers
    x = (qkv_ptr, norm_ptr, cos_ptr, sin_ptr)
    eights = q._reinterpret(gl.bfloat16, [2 * STAGED // 8, 8, HALF], operand(HALF))     # the first of a half are the new keys
    q_lo = eights.index(1)._reinterpret(gl.bfloat16, [QUERIES, HALF], operand(HALF))
    q_hi = eights.index(STAGED // 8 + 1)._reinterpret(gl.bfloat16, [QUERIES, HALF], operand(HALF))
    k_lo = k._reinterpret(gl.bfloat16, [2, KEYS, HALF], operand(HALF)).index(0)
    k_hi = k._reinterpret(gl.bfloat16, [2, KEYS, HALF], operand(HALF)).index(1)
    v_all = v._reinterpret(gl.bfloat16, [KEYS, VALUES], operand(64))

    items, first_column, columns, start, slot, first, end, span, spans, keys = first_item
    item = number + 0
    block = first * (_CHUNK // KEYS)
    largest = gl.full((QUERIES,), _LOW, gl.float32, gl.SliceLayout(0, SCORES))
    sums = gl.zeros((KEYS, QUERIES), gl.float32, SCORES)
    mixed = gl.zeros((VALUES, QUERIES), gl.float32, MIXED)
    while item < items:     # a block of an item
        group = item % G
        if CAUSAL:
            before = columns >> 8           # columns of the run ahead of the item's; their keys are new too
            total = before + (columns & 255)
            run = total
        else:
            before = (columns >> 8) & 255
            total = before + (columns & 255)
            run = columns >> 16             # all of them
        base = block * KEYS
        opens = block == first * (_CHUNK // KEYS)
        more = block < gl.minimum(end * (_CHUNK // KEYS) - 1, (start + run - 1) // KEYS)
        new, own, behind = start - base, start + before - base, start + run - base      # first new row of the block, first of the item's own, end
        own_end = start + total - base
        has_new = new < KEYS
        # New keys and queries: all are asked for before any is waited for.
        of_item = (first_column, before, total, run, start, group)
        rows = ask_rows(0, opens, x, of_item, H, G, HALF, NORM, SPLITS, SPLIT, CAUSAL, NUM_WARPS)
        then = ask_rows(1, opens, x, of_item, H, G, HALF, NORM, SPLITS, SPLIT, CAUSAL, NUM_WARPS)
        into = cache_ptr + (keys + base % _CHUNK * (2 * HALF))
        fetched = (item == number) & opens      # with AHEAD
        if AHEAD:
            if not fetched:
                _fetch(v, into + TO_VALUES, new, VALUES, 64, HALF, KEYS, NUM_WARPS)
        else:
            _fetch(v, into + TO_VALUES, new, VALUES, 64, HALF, KEYS, NUM_WARPS)
        async_copy.commit_group()

        # What the block behind this one needs, of the item or of the next.
        next_item = gl.where(more, item, gl.where(item < PROGRAMS, 2 * PROGRAMS - 1 - number, item + PROGRAMS))
        there = (next_item < items) & (next_item != item)
        row = rows_ptr + next_item // G * _FIELDS
        next_column, next_columns, next_start, next_slot = _four(row, there, first_column, columns, start, slot)
        next_first, next_end, next_span, next_spans = _four(row + 4, there, first, end, span, spans)
        next_block = gl.where(more, block + 1, next_first * (_CHUNK // KEYS))
        if opens:
            stage(q, rows, then, x, of_item, H, G, HALF, EPS, NORM, SPLITS, SPLIT, QUERIES, CAUSAL, NUM_WARPS)
        # Behind them: the page waits for the plan's row. New values, row j of eight is the new position of which it is the remainder, are awaited where used.
        page = gl.load(pages_ptr + next_slot * num_pages + next_block // (_CHUNK // KEYS), mask=more | there, other=0)
        value_at = new + ((nothing() + gl.arange(0, 8, gl.SliceLayout(1, VALUE_ROW)) - start) & 7)
        e = gl.arange(0, 64, gl.SliceLayout(0, VALUE_ROW))[None, :]
        at = qkv_ptr + (((first_column + value_at - new) * (H + 2 * G) + (H + G) + group) * (2 * HALF))[:, None] + e
        value_parts = ()
        for i in gl.static_range(VALUES // 64):
            mask = (value_at < gl.minimum(behind, KEYS))[:, None] & (i * 64 + e < 2 * HALF)
            value_parts = value_parts + ask(at + i * 64, mask, SPLITS, SPLIT)
        _stamp(stamps_ptr, 1, number, STAMPED, NUM_WARPS)

        new_at = new + ((nothing() + gl.arange(0, 8, gl.SliceLayout(1, ROW)) - start) & 7)
        async_copy.wait_group(1)
        if has_new:
            cta_barrier()
            place(k, new_keys(q, HALF, QUERIES, NUM_WARPS), new_at, new, behind, 2, KEYS, ROW)
        _arrived()
        scores = warpgroup_mma(k_lo, q_lo.permute((1, 0)), gl.zeros((KEYS, QUERIES), gl.float32, SCORES), use_acc=False, is_async=True)
        scores = warpgroup_mma(k_hi, q_hi.permute((1, 0)), scores, is_async=True)
        if has_new:
            append(into, new_keys(q, HALF, QUERIES, NUM_WARPS), new_at, own, own_end, 2, HALF, HALF, KEYS, ROW)
        scores = warpgroup_mma_wait(0, deps=[scores])
        next_keys = _keys_at(page, next_item % G, G, HALF)
        cta_barrier()   # all warps have read the keys
        _fetch(k, cache_ptr + (next_keys + next_block * KEYS % _CHUNK * (2 * HALF)), gl.where(more | there, next_start - next_block * KEYS, 0), 2 * HALF, HALF,
               HALF, KEYS, NUM_WARPS)
        async_copy.commit_group()

        query = nothing() + gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES))
        limit = gl.where(query < (total - before) * R, own + query // R, -1)      # its own key, the last that a row sees
        key = nothing() + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
        if CAUSAL:
            visible = key[:, None] <= limit[None, :]
        else:
            visible = (key < behind)[:, None] & (query < (total - before) * R)[None, :]
        if WINDOW > 0:
            visible = visible & (key[:, None] > limit[None, :] - WINDOW)
        scores = gl.where(visible, scores, -float("inf"))
        peak = gl.maximum(gl.where(opens, _LOW, largest), gl.max(scores, 0) * SCALE)
        kept = exp2(largest - peak)
        largest = peak
        weight = _bf16(exp2(gl.fma(scores, SCALE, 0.0 - peak[None, :])))
        weights.store(weight)
        sums = gl.where(opens, 0.0, sums * kept[None, :]) + weight.to(gl.float32)
        mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(0, MIXED))[None, :]
        _stamp(stamps_ptr, 2, number, STAMPED, NUM_WARPS)
        new_values = ()
        for i in gl.static_range(VALUES // 64):
            new_values = new_values + (added(value_parts, i * SPLITS, SPLITS).to(gl.bfloat16),)
        async_copy.wait_group(1)
        if AHEAD:
            if fetched:
                mbarrier.wait(given, turn & 1)
        if has_new:
            cta_barrier()
            place(v, new_values, value_at, new, behind, VALUES // 64, KEYS, VALUE_ROW)
        _arrived()
        mixed = warpgroup_mma(v_all.permute((1, 0)), weights, mixed, use_acc=block != first * (_CHUNK // KEYS), is_async=True)
        if has_new:
            append(into + TO_VALUES, new_values, value_at, own, own_end, VALUES // 64, 64, HALF, KEYS, VALUE_ROW)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        cta_barrier()   # all warps have read the values
        _stamp(stamps_ptr, 3, number, STAMPED, NUM_WARPS)

        if next_item != item:
            _store_partial(mixed_ptr, stats_ptr, largest, sums, mixed, (span * C * G + group * C + first_column + before) * R, (total - before) * R, HALF, KEYS,
                           QUERIES, NUM_WARPS, TAGGED, tag)
            _stamp(stamps_ptr, 4, number, STAMPED, NUM_WARPS)
            if LAST_MERGES and not TAGGED:
                merge_arrived(mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, first_column + before, total - before, spans, group, C, H, G, HALF, NUM_WARPS)
                _stamp(stamps_ptr, 5, number, STAMPED, NUM_WARPS)
        first_column, columns, start, slot, first, end, span, spans, keys, block, item = (
            next_column, next_columns, next_start, next_slot, next_first, next_end, next_span, next_spans, next_keys, next_block, next_item)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["num_pages"])
def attend_kernel(qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages,
                  stamps_ptr, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr,
                  EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr, LAST_MERGES: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr,
                  STAMPED: gl.constexpr, CAUSAL: gl.constexpr, NUM_WARPS: gl.constexpr):
    number = gl.program_id(0)
    _stamp(stamps_ptr, 0, number, STAMPED, NUM_WARPS)
    buffers = make_buffers(HALF, KEYS, QUERIES)
    item = prepare(buffers[0], norm_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, H, G, HALF, NORM, KEYS, NUM_WARPS)
    attend(item, buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages, number,
           stamps_ptr, PROGRAMS, C, H, G, HALF, SCALE, EPS, NORM, WINDOW, LAST_MERGES, KEYS, QUERIES, 1, STAMPED, NUM_WARPS, CAUSAL)


@gluon.jit
def merge_kernel(mixed_ptr, stats_ptr, spans_ptr, out_ptr, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr,
                 NUM_WARPS: gl.constexpr):
    number = gl.program_id(0)
    merge_columns(mixed_ptr, stats_ptr, spans_ptr, out_ptr, number, spans_of_row(spans_ptr, number, C, H, G), PROGRAMS, C, H, G, HALF, NUM_WARPS)
