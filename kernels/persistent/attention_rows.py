# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005 (a tuple of tensors grows by +)

"""Queries, and the new keys and values of a step: from raw products into shared memory and the cache; see attention_device.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .merge_device import nothing, row_lanes

_AT_ONCE = 8                        # rows that are loaded, normed and rotated at once: one of a warp
ROWS_AT_ONCE = gl.constexpr(_AT_ONCE)


@gluon.constexpr_function
def operand(width):
    """Shared memory of rows of bf16 that a wgmma reads, in blocks of `width` columns or of 64."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def staged_rows(queries):
    """Rows of a half in the loop over new keys and queries."""
    return (8 + queries + 15) // 16 * 16


@gluon.jit
def ask(x_ptr, mask, SPLITS: gl.constexpr, SPLIT: gl.constexpr):
    """What `added` adds, on its way: SPLITS tensors, SPLIT numbers apart."""
    parts = ()
    for split in gl.static_range(SPLITS):
        parts = parts + (gl.load(x_ptr + split * SPLIT, mask=mask, other=0.0, cache_modifier=".cg"),)
    return parts


@gluon.jit
def added(parts, FIRST: gl.constexpr, SPLITS: gl.constexpr):
    """fp32: the sum of SPLITS of the parts, from FIRST on."""
    x = parts[FIRST].to(gl.float32)
    for split in gl.static_range(1, SPLITS):
        x += parts[FIRST + split].to(gl.float32)
    return x


@gluon.jit
def load(x_ptr, mask, SPLITS: gl.constexpr, SPLIT: gl.constexpr):
    """fp32: the sum of SPLITS, SPLIT numbers apart."""
    return added(ask(x_ptr, mask, SPLITS, SPLIT), 0, SPLITS)


@gluon.jit
def ask_rows(i, there, x, item, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, NORM: gl.constexpr, SPLITS: gl.constexpr, SPLIT: gl.constexpr,
             CAUSAL: gl.constexpr, NUM_WARPS: gl.constexpr):
    """What `stage` makes the i-th ROWS_AT_ONCE rows of an item of, on its way: parts of both halves, cosines, sines, and with NORM the norms of both halves.
    Nothing unless `there`, or behind the last.

    Rows are new keys, eight, and then query row t * R + r, head r of the group in the item's column t. Keys are those of the run's columns up to the item's
    last; not causal, of all its columns.
    x: pointers to queries and keys, norms, cosines, sines. item: its run's first column, columns ahead of it, those with its own, all of the run, position,
    group.
    """
    LAYOUT: gl.constexpr = row_lanes(HALF, NUM_WARPS)
    R: gl.constexpr = H // G
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr = x
    first_column, before, total, run, start, group = item
    d = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    row = i * ROWS_AT_ONCE + (nothing() + gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, LAYOUT)))
    query = gl.maximum(row - 8, 0)
    column = gl.where(row < 8, (row - start) & 7, before + query // R)
    head = gl.where(row < 8, H + group, group * R + query % R)
    if CAUSAL:
        live = ((column < total) & there)[:, None]
    else:
        live = ((column < gl.where(row < 8, run, total)) & there)[:, None]
    at = qkv_ptr + (((first_column + column) * (H + 2 * G) + head) * (2 * HALF))[:, None] + d
    angle = ((start + column) * HALF)[:, None] + d
    rows = ask(at, live, SPLITS, SPLIT) + ask(at + HALF, live, SPLITS, SPLIT)
    rows = rows + (gl.load(cos_ptr + angle, mask=live, other=0.0), gl.load(sin_ptr + angle, mask=live, other=0.0))
    if NORM:
        weight = norm_ptr + (head * (2 * HALF))[:, None] + d
        rows = rows + (gl.load(weight, mask=live, other=0.0), gl.load(weight + HALF, mask=live, other=0.0))
    return rows


@gluon.jit
def stage(q, rows, then, x, item, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, EPS: gl.constexpr, NORM: gl.constexpr, SPLITS: gl.constexpr,
          SPLIT: gl.constexpr, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The rows of `ask_rows`, normed and rotated into shared memory. rows, then: the first two; x, item: as of `ask_rows`.

    Three times ROWS_AT_ONCE are on their way at once, all of an item of 16 query rows: that many are what registers hold.
    """
    R: gl.constexpr = H // G
    TILES: gl.constexpr = staged_rows(QUERIES) // ROWS_AT_ONCE
    count = (8 + (item[2] - item[1]) * R + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for i in range(0, count):
        following = then
        if i + 2 < count:       # a branch: else the assembler asks for them when it has waited for these
            following = ask_rows(i + 2, i + 2 < count, x, item, H, G, HALF, NORM, SPLITS, SPLIT, CAUSAL, NUM_WARPS)
        lo = added(rows, 0, SPLITS)
        hi = added(rows, SPLITS, SPLITS)
        cos = rows[2 * SPLITS]
        sin = rows[2 * SPLITS + 1]
        if NORM:
            scale = gl.rsqrt(gl.sum(gl.fma(lo, lo, hi * hi), 1) * (0.5 / HALF) + EPS)[:, None]
            lo = lo * scale * rows[2 * SPLITS + 2].to(gl.float32)
            hi = hi * scale * rows[2 * SPLITS + 3].to(gl.float32)
        q.index(i).store((lo * cos - hi * sin).to(gl.bfloat16))
        q.index(TILES + i).store((hi * cos + lo * sin).to(gl.bfloat16))
        rows = then
        then = following


@gluon.jit
def new_keys(q, HALF: gl.constexpr, QUERIES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Both halves of the new keys that `_stage` left, [8, HALF]."""
    TILES: gl.constexpr = staged_rows(QUERIES) // ROWS_AT_ONCE
    lo = q.index(0)._reinterpret(gl.bfloat16, [8, HALF], operand(HALF))
    hi = q.index(TILES)._reinterpret(gl.bfloat16, [8, HALF], operand(HALF))
    return lo.load(row_lanes(HALF, NUM_WARPS)), hi.load(row_lanes(HALF, NUM_WARPS))


@gluon.jit
def place(buffer, parts, at, first, end, PARTS: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Put new rows, [8, .] of each of the PARTS of a block's keys or values, into the block's rows `first` to `end` that are theirs. at: each row's place."""
    i = gl.maximum(first, 0) // 8
    while i < (gl.minimum(end, KEYS) + 7) // 8:
        live = ((at >> 3 == i) & (at < end))[:, None]
        old = ()
        for part in gl.static_range(PARTS):
            old = old + (buffer.index(part * (KEYS // 8) + i).load(LAYOUT),)
        for part in gl.static_range(PARTS):
            buffer.index(part * (KEYS // 8) + i).store(gl.where(live, parts[part], old[part]))
        i += 1 + nothing()      # not to be unrolled


@gluon.jit
def append(to_ptr, parts, at, first, end, PARTS: gl.constexpr, WIDTH: gl.constexpr, HALF: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store them to the block in the cache, those of the columns that are the item's own."""
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    live = ((at >= gl.maximum(first, 0)) & (at < gl.minimum(end, KEYS)))[:, None]
    to = to_ptr + ((at * (2 * HALF))[:, None] + d)
    for part in gl.static_range(PARTS):
        mask = live
        if WIDTH * PARTS > 2 * HALF:
            mask = live & (part * WIDTH + d < 2 * HALF)
        gl.store(to + part * WIDTH, parts[part], mask=mask)
