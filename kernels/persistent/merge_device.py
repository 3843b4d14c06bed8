# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005 (a tuple of tensors grows by +)
"""How the partial results of a span are added up: by the item of a run and head that comes last, or by all programs; see attention_device.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import cta_barrier, here

_AT_ONCE = gl.constexpr(4)   # spans whose partial results are loaded before the first is added


@gluon.constexpr_function
def row_lanes(width, num_warps):
    """[rows, width]: a warp has whole rows (two where they are 16 wide)."""
    vector = max(1, width // 32)
    return gl.BlockedLayout([1, vector], [32 * vector // width, width // vector], [num_warps, 1], [1, 0])


@gluon.jit
def _merge_rows(mixed_ptr, stats_ptr, out_ptr, row, live, spans, most_spans, C: gl.constexpr, H: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Add the spans of rows, a row being column * H + head: row, live and spans [NUM_WARPS] (or more) in the layout of rows."""
    LAYOUT: gl.constexpr = row_lanes(2 * HALF, NUM_WARPS)
    largest = gl.full(row.shape, -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    s = here(gl.arange(0, 32, gl.SliceLayout(0, LAYOUT)))[None, :]
    for base in range(0, most_spans, 32):
        mask = live[:, None] & (base + s < spans[:, None])
        some = gl.load(stats_ptr + ((base + s) * (C * H) + row[:, None]) * 2, mask=mask, other=-float("inf"), cache_modifier=".cg")
        largest = gl.maximum(largest, gl.max(some, 1))
    d = gl.arange(0, 2 * HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    total = gl.zeros(row.shape, gl.float32, gl.SliceLayout(1, LAYOUT))
    mixed = gl.zeros((row.shape[0], 2 * HALF), gl.float32, LAYOUT)
    for base in range(0, most_spans, _AT_ONCE):
        parts = ()
        for i in gl.static_range(_AT_ONCE):
            mask = live & (base + i < spans)
            at = (base + i) * (C * H) + row
            peak = gl.load(stats_ptr + at * 2, mask=mask, other=-float("inf"), cache_modifier=".cg")
            sum_ = gl.load(stats_ptr + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            part = gl.load(mixed_ptr + (at * (2 * HALF))[:, None] + d, mask=mask[:, None], other=0.0, cache_modifier=".cg")
            parts = parts + (peak, sum_, part)
        for i in gl.static_range(_AT_ONCE):
            share = gl.where(live, gl.exp2(parts[3 * i] - largest), 0.0)
            total = gl.fma(share, parts[3 * i + 1], total)
            mixed = gl.fma(gl.broadcast(share[:, None], mixed)[0], parts[3 * i + 2], mixed)
    gl.store(out_ptr + (row * (2 * HALF))[:, None] + d, (mixed / total[:, None]).to(gl.bfloat16), mask=live[:, None])


@gluon.jit
def merge_arrived(mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, row_ptr, group, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    """Behind `attend_item`: the item of a run and head that comes last adds up all of them."""
    R: gl.constexpr = H // G
    first_column = gl.load(row_ptr)
    num_columns = gl.load(row_ptr + 1)
    spans = gl.load(row_ptr + 7)
    arrivals = arrivals_ptr + first_column * G + group
    cta_barrier()   # the atomic below is one thread's, and releases what all have stored
    if gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == spans - 1:
        i = here(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, row_lanes(2 * HALF, NUM_WARPS))))
        for base in range(0, num_columns * R, NUM_WARPS):
            row = (first_column + (base + i) // R) * H + group * R + (base + i) % R
            _merge_rows(mixed_ptr, stats_ptr, out_ptr, row, base + i < num_columns * R, spans + i * 0, spans, C, H, HALF, NUM_WARPS)
        gl.store(arrivals, 0)   # for the next layer


@gluon.jit
def merge_columns(mixed_ptr, stats_ptr, spans_ptr, out_ptr, number, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, HALF: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    """All partial results, by all programs, behind a barrier over the grid."""
    i = gl.arange(0, NUM_WARPS, gl.SliceLayout(1, row_lanes(2 * HALF, NUM_WARPS)))
    for base in range(number * NUM_WARPS, C * H, PROGRAMS * NUM_WARPS):
        row = base + i
        spans = gl.load(spans_ptr + row // H, mask=row < C * H, other=0)
        _merge_rows(mixed_ptr, stats_ptr, out_ptr, row, spans > 0, spans, gl.max(spans, 0), C, H, HALF, NUM_WARPS)
