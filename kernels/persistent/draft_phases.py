# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""The phases of a draft that are no dense products, as a consumer runs them: its input, its attention, and the keys and values of its context.

m, p, S: as step_phases.py; q: draft_code.DraftPointers, T: DraftCode. A block's slots are the columns of its sequence's tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import here, program
from .attention_device import attend, fetch_values, prepare, value_width
from .attention_rows import load, operand
from .fragments import NUM_WARPS
from .merge_device import merge_columns, merge_tagged, nothing, row_lanes, spans_of_row
from .plan import CHUNK, plan_step
from .step_phases import attention_buffers, keys_of, leave_squares, program_list, values_given, values_used, wait_for_values_used

_WARPS = gl.constexpr(NUM_WARPS)
_CHUNK = gl.constexpr(CHUNK)


@gluon.jit
def draft_words(p, S: gl.constexpr):
    """Anchor, slots and positions of the block."""
    return p.words + 8 * S.C


@gluon.jit
def context_words(p, S: gl.constexpr):
    """Slots and positions of committed columns."""
    return p.words + 16 * S.C


@gluon.jit
def draft_embed_phase(p, q, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """The draft's residual: the anchor's embedding, then the mask's vector; and the plan of its attention, by the last program."""
    WIDTH: gl.constexpr = _WARPS * 32
    BLOCKS: gl.constexpr = (S.D + WIDTH - 1) // WIDTH
    words = draft_words(p, S)
    lane = here(gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [_WARPS], [0])))
    for block in range(program_list(_WARPS, S, PART), S.C * BLOCKS, S.PROGRAMS * S.PARTITIONS):
        column = block // BLOCKS
        d = (block % BLOCKS) * WIDTH + lane
        live = gl.load(words + S.C + column, cache_modifier=".cg") >= 0
        token = gl.load(words + column, cache_modifier=".cg")
        token = gl.where((token >= 0) & (token < S.V), token, 0)     # behind a fault it may be anything
        inside = live & (d < S.D)
        anchor = column % 8 == 0
        value = gl.load(p.embedding + token.to(gl.int64) * S.D + d, mask=inside & anchor, other=0.0).to(gl.float32)
        value += gl.load(q.mask + d, mask=inside & (column % 8 != 0), other=0.0).to(gl.float32)
        gl.store(q.residual + column * S.D + d, value, mask=inside)
        leave_squares(p, column, block % BLOCKS, value, live, S)
    if PART == 0:
        if program(_WARPS) == S.PROGRAMS - 1:
            plan_step(words + S.C, words + 2 * S.C, q.plan_rows, q.plan_num_rows, q.plan_spans, S.C, T.CLASSES, T.WINDOW, S.PROGRAMS // T.G, T.PART_COLUMNS,
                      _WARPS, 0, T.CAUSAL, True)


# --- attention, by the first consumer of an SM ---


@gluon.jit
def _cache_of(q, layer, cache_pages, T: gl.constexpr):
    return q.cache + layer.to(gl.int64) * cache_pages * (2 * T.G * _CHUNK * 2 * T.HALF)


@gluon.jit
def _norms_of(q, layer, T: gl.constexpr):
    return q.qk_norm + layer * ((T.H + T.G) * 2 * T.HALF)


@gluon.jit
def prepare_draft_attention(m, p, q, layer, table_width, cache_pages, S: gl.constexpr, T: gl.constexpr):
    """What does not need this layer's queries, keys and values, ahead of the barrier."""
    return prepare(keys_of(m, T.HALF, S), _norms_of(q, layer, T), _cache_of(q, layer, cache_pages, T), p.pages, q.plan_rows, q.plan_num_rows, table_width,
                   program(_WARPS), T.H, T.G, T.HALF, True, S.KEYS, _WARPS, S.VALUES_AHEAD and T.PHASE == "rounds")


@gluon.jit
def prepare_draft_values(m, p, q, layer, table_width, cache_pages, turn, S: gl.constexpr, T: gl.constexpr):
    """As `prepare_values`."""
    wait_for_values_used(m, turn)
    v = m[4].index(0)._reinterpret(gl.bfloat16, [value_width(T.HALF) // 64 * S.KEYS // 8, 8, 64], operand(64))
    fetch_values(v, _cache_of(q, layer, cache_pages, T), p.pages, q.plan_rows, q.plan_num_rows, table_width, program(_WARPS), T.G, T.HALF, S.KEYS, _WARPS)


@gluon.jit
def draft_attention_phase(m, p, q, item, layer, table_width, cache_pages, turn, tag, S: gl.constexpr, T: gl.constexpr):
    """item: of `prepare_draft_attention`, turn: as of `attention_phase`. The block's own keys and values lie in the cache until those of its committed columns'
    features do."""
    span_mixed = q.span_mixed
    span_stats = q.span_stats
    if S.TAGGED:
        span_mixed = q.span_words
        span_stats = q.stats_words
    attend(item, attention_buffers(m, T.HALF, T.QUERY_UNIT, S), q.qkv, _norms_of(q, layer, T), q.cos, q.sin, _cache_of(q, layer, cache_pages, T), p.pages,
           q.plan_rows, span_mixed, span_stats, q.arrivals, q.mixed, table_width, program(_WARPS), p.stamps, S.PROGRAMS, S.C, T.H, T.G, T.HALF, T.SCALE,
           T.QK_EPS, True, T.WINDOW, S.LAST_MERGES, S.KEYS, S.QUERIES, T.qkv.SPLITS, False, _WARPS, T.CAUSAL,
           S.VALUES_AHEAD and T.PHASE == "rounds", values_given(m, S.VALUES_AHEAD and T.PHASE == "rounds"), turn, S.TAGGED, tag)
    values_used(m, S.VALUES_AHEAD and T.PHASE == "rounds")


@gluon.jit
def draft_merge_words(p, q, tag, polls, S: gl.constexpr, T: gl.constexpr):
    """As `merge_words`."""
    merge_tagged(q.span_words, q.stats_words, q.plan_spans, q.mixed, program(_WARPS), tag, p.fault, polls, S.PROGRAMS, S.C, T.H, T.G, T.HALF, _WARPS)


@gluon.jit
def draft_spans_to_merge(p, q, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """For `draft_merge_phase`, ahead of the barrier."""
    return spans_of_row(q.plan_spans, program_list(_WARPS, S, PART), S.C, T.H, T.G)


@gluon.jit
def draft_merge_phase(p, q, spans, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """Behind the attention of all programs, unless the last item of each run and head has merged."""
    merge_columns(q.span_mixed, q.span_stats, q.plan_spans, q.mixed, program_list(_WARPS, S, PART), spans, S.PROGRAMS * S.PARTITIONS, S.C, T.H, T.G, T.HALF,
                  _WARPS)


# --- the context ---


@gluon.jit
def append_phase(p, q, table_width, cache_pages, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """Keys and values of all layers, of committed columns, to the cache: keys normed and rotated as `attention_rows.stage` does. A warp has a head."""
    LAYOUT: gl.constexpr = row_lanes(T.HALF, _WARPS)
    HEADS: gl.constexpr = S.C * T.LAYERS * T.G
    WIDTH: gl.constexpr = T.LAYERS * 2 * T.G * 2 * T.HALF
    AT_ONCE: gl.constexpr = 8
    words = context_words(p, S)
    d = gl.arange(0, T.HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    row = nothing() + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
    for base in range(program_list(_WARPS, S, PART) * AT_ONCE, HEADS, S.PROGRAMS * S.PARTITIONS * AT_ONCE):
        head = base + row
        column, layer, group = head // (T.LAYERS * T.G), head // T.G % T.LAYERS, head % T.G
        slot = gl.load(words + S.C + column, mask=head < HEADS, other=-1, cache_modifier=".cg")
        position = gl.load(words + 2 * S.C + column, mask=slot >= 0, other=0, cache_modifier=".cg")
        page = gl.load(p.pages + slot * table_width + position // _CHUNK, mask=slot >= 0, other=0)
        live = (slot >= 0)[:, None] & (d >= 0)
        at = q.keys + (column * WIDTH + (layer * (2 * T.G) + group) * (2 * T.HALF))[:, None] + d
        weight = q.qk_norm + ((layer * (T.H + T.G) + T.H + group) * (2 * T.HALF))[:, None] + d
        angle = (position * T.HALF)[:, None] + d
        lo = load(at, live, T.keys.SPLITS, S.C * WIDTH)
        hi = load(at + T.HALF, live, T.keys.SPLITS, S.C * WIDTH)
        value_lo = load(at + T.G * 2 * T.HALF, live, T.keys.SPLITS, S.C * WIDTH)
        value_hi = load(at + (T.G * 2 + 1) * T.HALF, live, T.keys.SPLITS, S.C * WIDTH)
        cos = gl.load(q.cos + angle, mask=live, other=0.0)
        sin = gl.load(q.sin + angle, mask=live, other=0.0)
        scale = gl.rsqrt(gl.sum(gl.fma(lo, lo, hi * hi), 1) * (0.5 / T.HALF) + T.QK_EPS)[:, None]
        lo = lo * scale * gl.load(weight, mask=live, other=0.0).to(gl.float32)
        hi = hi * scale * gl.load(weight + T.HALF, mask=live, other=0.0).to(gl.float32)
        place = ((layer.to(gl.int64) * cache_pages + page) * (2 * T.G) + group) * (_CHUNK * 2 * T.HALF) + position % _CHUNK * (2 * T.HALF)
        to = q.cache + (place[:, None] + d)
        gl.store(to, (lo * cos - hi * sin).to(gl.bfloat16), mask=live)
        gl.store(to + T.HALF, (hi * cos + lo * sin).to(gl.bfloat16), mask=live)
        gl.store(to + T.G * _CHUNK * 2 * T.HALF, value_lo.to(gl.bfloat16), mask=live)
        gl.store(to + T.G * _CHUNK * 2 * T.HALF + T.HALF, value_hi.to(gl.bfloat16), mask=live)
