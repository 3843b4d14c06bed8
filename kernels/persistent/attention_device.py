# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

"""The device code of a step's attention; attention.py says what it computes.

An item is a span of the cache (plan.py) of one run and one key/value head. Its query rows, R query heads of each column, are 64 rows of a
wgmma whether one column lives or eight, so a product always has one shape. A head is kept as two halves of its dimension everywhere: rope pairs
element d of one with element d of the other, and 8 rows of a half are contiguous in shared memory also where it is swizzled.

Keys and values come by cp.async, one chunk each in flight: the next chunk's keys while this one's weights are made, its values behind them.
New keys and values are normed and rotated in registers, stored to the cache, and put into the chunk's 8-row groups in shared memory: the item
whose chunk has a new position is the only one that needs it in this step. Positions from the first new one on are never read from the cache.

The partial results of a span (maximum, sum, mixed values) go to a workspace, and are added in the order of the spans: by the item of the
run and head that comes last (`merge_arrived`), or by all programs behind a barrier over the grid (`merge_columns`). Both run the
same code, `_merge_rows`, and give the same bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from ..moe.stream import cta_barrier, here
from .merge_device import merge_arrived, merge_columns, row_lanes
from .plan import CHUNK, FIELDS, RUN_COLUMNS

_CHUNK, _FIELDS = gl.constexpr(CHUNK), gl.constexpr(FIELDS)
_QUERIES = gl.constexpr(32)  # query rows that are loaded, normed and rotated at once


@gluon.constexpr_function
def copy_lanes(width, num_warps):
    """[rows, width]: 16 bytes of bf16 a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def products(width, num_warps):
    """Results [64 n, width] of a wgmma; warpgroups share the width."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, num_warps // 4], instr_shape=[16, width * 4 // num_warps, 16])


@gluon.constexpr_function
def operand(width):
    """Shared memory of [rows, width] bf16 that a wgmma reads."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def num_rows(heads_per_group):
    """Query rows of an item: whole wgmmas."""
    return (RUN_COLUMNS * heads_per_group + 63) // 64 * 64


@gluon.jit
def make_buffers(HALF: gl.constexpr, ROWS: gl.constexpr):
    """Shared memory of `attend`: for a head of 128 and 64 rows 96 KB."""
    GROUPS: gl.constexpr = _CHUNK // 8
    k_lo = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 8, HALF], operand(HALF))
    k_hi = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 8, HALF], operand(HALF))
    v_lo = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 8, HALF], operand(HALF))
    v_hi = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 8, HALF], operand(HALF))
    q_lo = gl.allocate_shared_memory(gl.bfloat16, [ROWS // _QUERIES, _QUERIES, HALF], operand(HALF))
    q_hi = gl.allocate_shared_memory(gl.bfloat16, [ROWS // _QUERIES, _QUERIES, HALF], operand(HALF))
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, _CHUNK], operand(_CHUNK))
    return k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, weights


@gluon.jit
def _whole(groups, ROWS: gl.constexpr, HALF: gl.constexpr):
    """The groups of rows of a buffer as one [ROWS, HALF]."""
    return groups._reinterpret(gl.bfloat16, [ROWS, HALF], operand(HALF))


@gluon.jit
def _load_head(x_ptr, offset, live, SPLITS: gl.constexpr, SPLIT: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Both halves of heads at `offset`, fp32 [rows, HALF]: the sum of SPLITS, SPLIT numbers apart."""
    at = x_ptr + offset[:, None] + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    lo = gl.load(at, mask=live[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    hi = gl.load(at + HALF, mask=live[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    for split in gl.static_range(1, SPLITS):
        lo += gl.load(at + split * SPLIT, mask=live[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
        hi += gl.load(at + split * SPLIT + HALF, mask=live[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    return lo, hi


@gluon.jit
def _norm_and_rotate(lo, hi, head, position, live, norm_ptr, cos_ptr, sin_ptr, EPS: gl.constexpr, NORM: gl.constexpr, HALF: gl.constexpr,
                     LAYOUT: gl.constexpr):
    d = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    if NORM:
        scale = gl.rsqrt((gl.sum(lo * lo, 1) + gl.sum(hi * hi, 1)) * (0.5 / HALF) + EPS)[:, None]
        weight = norm_ptr + head[:, None] * (2 * HALF) + d
        lo = lo * scale * gl.load(weight, mask=live[:, None], other=0.0).to(gl.float32)
        hi = hi * scale * gl.load(weight + HALF, mask=live[:, None], other=0.0).to(gl.float32)
    angle = position[:, None] * HALF + d
    cos = gl.load(cos_ptr + angle, mask=live[:, None], other=0.0)
    sin = gl.load(sin_ptr + angle, mask=live[:, None], other=0.0)
    return lo * cos - hi * sin, hi * cos + lo * sin


@gluon.jit
def _store_queries(q_lo, q_hi, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, first_column, num_columns, start, group, H: gl.constexpr, G: gl.constexpr,
                   HALF: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, NUM_WARPS: gl.constexpr, SPLITS: gl.constexpr, SPLIT: gl.constexpr):
    """Row t * R + r is query head r of the group in column t of the run. Rows that no column has stay what they were: nothing of theirs is stored."""
    LAYOUT: gl.constexpr = row_lanes(HALF, NUM_WARPS)
    R: gl.constexpr = H // G
    for i in range(0, (num_columns * R + _QUERIES - 1) // _QUERIES):
        row = i * _QUERIES + here(gl.arange(0, _QUERIES, gl.SliceLayout(1, LAYOUT)))
        column = row // R
        head = group * R + row % R
        live = column < num_columns
        lo, hi = _load_head(qkv_ptr, (first_column + column) * ((H + 2 * G) * 2 * HALF) + head * (2 * HALF), live, SPLITS, SPLIT, HALF,
                            LAYOUT)
        lo, hi = _norm_and_rotate(lo, hi, head, start + column, live, norm_ptr, cos_ptr, sin_ptr, EPS, NORM, HALF, LAYOUT)
        q_lo.index(i).store(lo.to(gl.bfloat16))
        q_hi.index(i).store(hi.to(gl.bfloat16))


@gluon.jit
def _place(groups, i, value, live, LAYOUT: gl.constexpr):
    """Put the live rows of a [8, HALF] into an 8-row group."""
    group = groups.index(i)
    group.store(gl.where(live[:, None], value, group.load(LAYOUT)))


@gluon.jit
def _append(k_lo, k_hi, v_lo, v_hi, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, keys, chunk, first_column, num_columns, start, group,
            H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, NUM_WARPS: gl.constexpr, SPLITS: gl.constexpr,
            SPLIT: gl.constexpr):
    """The new positions of a chunk, into the cache and into shared memory, where the chunk has arrived. keys: offset of the chunk's keys in the cache."""
    LAYOUT: gl.constexpr = row_lanes(HALF, NUM_WARPS)
    j = here(gl.arange(0, 8, gl.SliceLayout(1, LAYOUT)))
    d = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    first = gl.maximum(start - chunk * _CHUNK, 0)
    end = gl.minimum(start + num_columns - chunk * _CHUNK, _CHUNK)
    for i in range(first // 8, (end + 7) // 8):
        place = i * 8 + j
        live = (place >= first) & (place < end)
        position = chunk * _CHUNK + place
        row = (first_column + position - start) * ((H + 2 * G) * 2 * HALF)
        head = H + group + j * 0
        lo, hi = _load_head(qkv_ptr, row + (H + group) * (2 * HALF), live, SPLITS, SPLIT, HALF, LAYOUT)
        lo, hi = _norm_and_rotate(lo, hi, head, position, live, norm_ptr, cos_ptr, sin_ptr, EPS, NORM, HALF, LAYOUT)
        lo, hi = lo.to(gl.bfloat16), hi.to(gl.bfloat16)
        at = cache_ptr + keys + place[:, None] * (2 * HALF) + d
        gl.store(at, lo, mask=live[:, None])
        gl.store(at + HALF, hi, mask=live[:, None])
        _place(k_lo, i, lo, live, LAYOUT)
        _place(k_hi, i, hi, live, LAYOUT)
        lo, hi = _load_head(qkv_ptr, row + (H + G + group) * (2 * HALF), live, SPLITS, SPLIT, HALF, LAYOUT)
        lo, hi = lo.to(gl.bfloat16), hi.to(gl.bfloat16)
        at += G * _CHUNK * (2 * HALF)
        gl.store(at, lo, mask=live[:, None])
        gl.store(at + HALF, hi, mask=live[:, None])
        _place(v_lo, i, lo, live, LAYOUT)
        _place(v_hi, i, hi, live, LAYOUT)


@gluon.jit
def _keys_of(pages_ptr, slot, chunk, group, num_pages, G: gl.constexpr, HALF: gl.constexpr):
    """Where the keys of a chunk and head begin in a cache [page, keys | values, G, 128, head dimension]."""
    return (gl.load(pages_ptr + slot * num_pages + chunk).to(gl.int64) * (2 * G) + group) * (_CHUNK * 2 * HALF)


@gluon.jit
def _fetch(lo, hi, from_ptr, before, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Copy the rows below `before` of a chunk's keys or values; zeros in the others."""
    LAYOUT: gl.constexpr = copy_lanes(HALF, NUM_WARPS)
    j = here(gl.arange(0, _CHUNK, gl.SliceLayout(1, LAYOUT)))[:, None]
    at = from_ptr + j * (2 * HALF) + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(_whole(lo, _CHUNK, HALF), at, mask=j < before)
    async_copy.async_copy_global_to_shared(_whole(hi, _CHUNK, HALF), at + HALF, mask=j < before)


@gluon.jit
def _arrived():
    """What this thread copied or stored into shared memory is there for every thread's wgmma, behind `wait_group`."""
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _first_keys(cache_ptr, pages_ptr, row_ptr, num_pages, group, G: gl.constexpr, HALF: gl.constexpr):
    """Where the keys of an item's first chunk begin, and how many of its positions were there before this step."""
    first = gl.load(row_ptr + 4)
    return cache_ptr + _keys_of(pages_ptr, gl.load(row_ptr + 3), first, group, num_pages, G, HALF), gl.load(row_ptr + 2) - first * _CHUNK


@gluon.jit
def fetch_keys(buffers, cache_ptr, pages_ptr, row_ptr, num_pages, group, G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Begin to copy the keys of an item's first chunk: a group of copies."""
    keys, before = _first_keys(cache_ptr, pages_ptr, row_ptr, num_pages, group, G, HALF)
    _fetch(buffers[0], buffers[1], keys, before, HALF, NUM_WARPS)
    async_copy.commit_group()


@gluon.jit
def fetch_values(buffers, cache_ptr, pages_ptr, row_ptr, num_pages, group, G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Begin to copy its values, behind `fetch_keys`: another group."""
    keys, before = _first_keys(cache_ptr, pages_ptr, row_ptr, num_pages, group, G, HALF)
    _fetch(buffers[2], buffers[3], keys + G * _CHUNK * 2 * HALF, before, HALF, NUM_WARPS)
    async_copy.commit_group()


@gluon.jit
def fetch_item(buffers, cache_ptr, pages_ptr, row_ptr, num_pages, group, G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Begin to copy the keys and the values of an item's first chunk: two groups of copies."""
    fetch_keys(buffers, cache_ptr, pages_ptr, row_ptr, num_pages, group, G, HALF, NUM_WARPS)
    fetch_values(buffers, cache_ptr, pages_ptr, row_ptr, num_pages, group, G, HALF, NUM_WARPS)


@gluon.jit
def attend_item(buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, row_ptr, mixed_ptr, stats_ptr, num_pages, group, C: gl.constexpr,
                H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr,
                NUM_WARPS: gl.constexpr, SPLITS: gl.constexpr):
    """The partial results of one span for the columns of a run, one key/value head, behind `fetch_item`. SCALE: of scores, with log2(e) in it.

    When it returns, all warps are done with shared memory.
    """
    R: gl.constexpr = H // G
    ROWS: gl.constexpr = num_rows(R)
    SCORES: gl.constexpr = products(_CHUNK, NUM_WARPS)
    MIXED: gl.constexpr = products(HALF, NUM_WARPS)
    k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, weights = buffers
    SPLIT: gl.constexpr = C * (H + 2 * G) * 2 * HALF
    VALUES: gl.constexpr = G * _CHUNK * 2 * HALF   # from the keys of a chunk to its values
    first_column = gl.load(row_ptr)
    num_columns = gl.load(row_ptr + 1)
    start = gl.load(row_ptr + 2)
    slot = gl.load(row_ptr + 3)
    first = gl.load(row_ptr + 4)
    end = gl.load(row_ptr + 5)
    keys = _keys_of(pages_ptr, slot, first, group, num_pages, G, HALF)
    _store_queries(q_lo, q_hi, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, first_column, num_columns, start, group, H, G, HALF, EPS, NORM, NUM_WARPS,
                   SPLITS, SPLIT)

    column = here(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // R
    position = start + column
    j = here(gl.arange(0, _CHUNK, gl.SliceLayout(0, SCORES)))
    largest = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    mixed_lo = gl.zeros((ROWS, HALF), gl.float32, MIXED)
    mixed_hi = gl.zeros((ROWS, HALF), gl.float32, MIXED)
    for chunk in range(first, end):
        async_copy.wait_group(1)
        if (chunk + 1) * _CHUNK > start:
            async_copy.wait_group(0)
            cta_barrier()
            _append(k_lo, k_hi, v_lo, v_hi, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, keys, chunk, first_column, num_columns, start, group, H, G, HALF,
                    EPS, NORM, NUM_WARPS, SPLITS, SPLIT)
        _arrived()
        scores = gl.zeros((ROWS, _CHUNK), gl.float32, SCORES)
        scores = warpgroup_mma(_whole(q_lo, ROWS, HALF), _whole(k_lo, _CHUNK, HALF).permute((1, 0)), scores)
        scores = warpgroup_mma(_whole(q_hi, ROWS, HALF), _whole(k_hi, _CHUNK, HALF).permute((1, 0)), scores)
        cta_barrier()   # all warps have read the keys
        keys = _keys_of(pages_ptr, slot, gl.minimum(chunk + 1, end - 1), group, num_pages, G, HALF)
        before = start - (chunk + 1) * _CHUNK
        if chunk + 1 < end:
            _fetch(k_lo, k_hi, cache_ptr + keys, before, HALF, NUM_WARPS)
        async_copy.commit_group()

        key = chunk * _CHUNK + j
        visible = (key[None, :] <= position[:, None]) & (column < num_columns)[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        scores = gl.where(visible, scores * SCALE, -float("inf"))
        new = gl.maximum(largest, gl.max(scores, 1))
        finite = gl.where(new == -float("inf"), 0.0, new)   # of a chunk that a row does not see, every weight is exp2(-inf)
        kept = gl.exp2(largest - finite)
        weight = gl.exp2(scores - finite[:, None]).to(gl.bfloat16)
        total = gl.fma(total, kept, gl.sum(weight.to(gl.float32), 1))
        largest = new
        weights.store(weight)
        kept = gl.convert_layout(kept, gl.SliceLayout(1, MIXED))[:, None]
        mixed_lo = mixed_lo * kept
        mixed_hi = mixed_hi * kept
        async_copy.wait_group(1)
        _arrived()
        mixed_lo = warpgroup_mma(weights, _whole(v_lo, _CHUNK, HALF), mixed_lo)
        mixed_hi = warpgroup_mma(weights, _whole(v_hi, _CHUNK, HALF), mixed_hi)
        cta_barrier()   # all warps have read the values
        if chunk + 1 < end:
            _fetch(v_lo, v_hi, cache_ptr + keys + VALUES, before, HALF, NUM_WARPS)
        async_copy.commit_group()
    async_copy.wait_group(0)

    partial = gl.load(row_ptr + 6) * C + first_column
    row = here(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)))
    at = ((partial + row // R) * H + group * R + row % R) * 2
    gl.store(stats_ptr + at, largest, mask=row // R < num_columns)
    gl.store(stats_ptr + at + 1, total, mask=row // R < num_columns)
    row = here(gl.arange(0, ROWS, gl.SliceLayout(1, MIXED)))
    d = gl.arange(0, HALF, gl.SliceLayout(0, MIXED))[None, :]
    at_row = mixed_ptr + (((partial + row // R) * H + group * R + row % R) * (2 * HALF))[:, None] + d
    gl.store(at_row, mixed_lo, mask=(row // R < num_columns)[:, None])
    gl.store(at_row + HALF, mixed_hi, mask=(row // R < num_columns)[:, None])


@gluon.jit
def fetch_first_keys(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """`fetch_keys` of program `number`'s first item. It needs the plan, and what the steps before stored: not this layer's queries, keys and values."""
    if number < gl.load(num_rows_ptr) * G:
        fetch_keys(buffers, cache_ptr, pages_ptr, rows_ptr + number // G * _FIELDS, num_pages, number % G, G, HALF, NUM_WARPS)


@gluon.jit
def fetch_first_values(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G: gl.constexpr, HALF: gl.constexpr,
                       NUM_WARPS: gl.constexpr):
    """`fetch_values` of the same, behind `fetch_first_keys`."""
    if number < gl.load(num_rows_ptr) * G:
        fetch_values(buffers, cache_ptr, pages_ptr, rows_ptr + number // G * _FIELDS, num_pages, number % G, G, HALF, NUM_WARPS)


@gluon.jit
def fetch_first(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Keys and values of program `number`'s first item."""
    fetch_first_keys(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G, HALF, NUM_WARPS)
    fetch_first_values(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, number, G, HALF, NUM_WARPS)


@gluon.jit
def attend(buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr,
           num_pages, number, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr,
           EPS: gl.constexpr, NORM: gl.constexpr, WINDOW: gl.constexpr, LAST_MERGES: gl.constexpr, NUM_WARPS: gl.constexpr, SPLITS: gl.constexpr = 1):
    """The items of program `number` of PROGRAMS, behind `fetch_first`: one from the front of the plan, then one from the back of every further round."""
    items = gl.load(num_rows_ptr) * G
    for base in range(0, items, PROGRAMS):
        item = base + gl.where(base == 0, number, PROGRAMS - 1 - number)
        if item < items:
            row_ptr = rows_ptr + item // G * _FIELDS
            attend_item(buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, row_ptr, mixed_ptr, stats_ptr, num_pages, item % G, C, H, G,
                        HALF, SCALE, EPS, NORM, WINDOW, NUM_WARPS, SPLITS)
            next_item = base + 2 * PROGRAMS - 1 - number
            if next_item < items:
                fetch_item(buffers, cache_ptr, pages_ptr, rows_ptr + next_item // G * _FIELDS, num_pages, next_item % G, G, HALF, NUM_WARPS)
            if LAST_MERGES:
                merge_arrived(mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, row_ptr, item % G, C, H, G, HALF, NUM_WARPS)


@gluon.jit(do_not_specialize=["num_pages"])
def attend_kernel(qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages,
                  PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SCALE: gl.constexpr, EPS: gl.constexpr,
                  NORM: gl.constexpr, WINDOW: gl.constexpr, LAST_MERGES: gl.constexpr, NUM_WARPS: gl.constexpr):
    buffers = make_buffers(HALF, num_rows(H // G))
    fetch_first(buffers, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, num_pages, gl.program_id(0), G, HALF, NUM_WARPS)
    attend(buffers, qkv_ptr, norm_ptr, cos_ptr, sin_ptr, cache_ptr, pages_ptr, rows_ptr, num_rows_ptr, mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, num_pages,
           gl.program_id(0), PROGRAMS, C, H, G, HALF, SCALE, EPS, NORM, WINDOW, LAST_MERGES, NUM_WARPS)


@gluon.jit
def merge_kernel(mixed_ptr, stats_ptr, spans_ptr, out_ptr, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, HALF: gl.constexpr,
                 NUM_WARPS: gl.constexpr):
    merge_columns(mixed_ptr, stats_ptr, spans_ptr, out_ptr, gl.program_id(0), PROGRAMS, C, H, HALF, NUM_WARPS)
