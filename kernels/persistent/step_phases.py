# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""The phases of a step as a consumer runs them: what lies in shared memory where, and which buffer each reads and writes.

m: (ring, full, empty, area, pair, met, squares, keys, go, done, word, scales of gate and up, scales of down, ends of tiles,
the other's go, listed, the other's done); p: step_code.Pointers. With S.VALUES_AHEAD no products need pair and squares: in their places are the area of the
second consumer, where values of attention lie, and two signals: that the first ones of a layer do, and that the layer's have been used.
Columns beyond eight are taken a tile at a time, each with the weights streamed again: a column's operations stay what they are in a step of eight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..moe.device import consume_down, consume_gate_up, first_down_columns
from ..moe.rolled import begin_tile, first_pairs, parts_at_once, roll_down, roll_gate_up
from ..moe.routing import TILE_COLUMNS
from ..moe.stream import column_lanes, columns_of, cta_barrier, here, program, row_major, stage_range, stamp_time, tiles_of_ends
from .attention_device import attend, fetch_values, give_values, prepare, value_width
from .attention_rows import ROWS_AT_ONCE, operand, staged_rows
from .fragments import NUM_WARPS
from .merge_device import merge_columns, merge_tagged, spans_of_row
from .plan import CHUNK, plan_step, words_cache
from .router import choose_experts, clear_list, columns_of_tile, write_list, write_weights
from .sample_device import best_of_column, finish, sample_slices
from .step_code import SLICES
from .step_dense import exchange_of
from .tagged import load_tagged

_WARPS = gl.constexpr(NUM_WARPS)
_CHUNK = gl.constexpr(CHUNK)
_COLUMNS = gl.constexpr(TILE_COLUMNS)
_SLICES = gl.constexpr(SLICES)


@gluon.jit
def program_list(WARPS: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    """Which routing list is a consumer's, and its producer's."""
    return program(WARPS) * S.PARTITIONS + PART


# --- shared memory ---


@gluon.jit
def keys_of(m, HALF: gl.constexpr, S: gl.constexpr):
    """Keys of heads of 2 * HALF; the memory is of the largest there are."""
    if HALF == S.KEYS_HALF:
        return m[7]
    else:
        return m[7].index(0)._reinterpret(gl.bfloat16, [2 * S.KEYS // 8, 8, HALF], operand(HALF))


@gluon.jit
def attention_buffers(m, HALF: gl.constexpr, QUERY_UNIT: gl.constexpr, S: gl.constexpr):
    """`attention_device.make_buffers`, in memory that products use too, except for the keys."""
    area, keys = m[3], keys_of(m, HALF, S)
    K: gl.constexpr = operand(HALF)
    VALUES: gl.constexpr = value_width(HALF)
    STAGED: gl.constexpr = staged_rows(S.QUERIES)
    of_values = area
    if S.VALUES_AHEAD:
        of_values = m[4]
    v = of_values.index(0)._reinterpret(gl.bfloat16, [VALUES // 64 * S.KEYS // 8, 8, 64], operand(64))
    q = area.index(QUERY_UNIT)._reinterpret(gl.bfloat16, [2 * STAGED // ROWS_AT_ONCE, ROWS_AT_ONCE, HALF], K)
    weights = area.index(QUERY_UNIT + 2 * STAGED * HALF * 2 // 1024)._reinterpret(gl.bfloat16, [S.KEYS, S.QUERIES], operand(S.QUERIES))
    return keys, v, q, weights


# --- attention, by the first consumer of an SM ---


@gluon.jit
def _cache_of(p, layer, cache_pages, S: gl.constexpr):
    return p.cache + layer.to(gl.int64) * cache_pages * (2 * S.G * _CHUNK * 2 * S.HALF)


@gluon.jit
def _norms_of(p, layer, S: gl.constexpr):
    return p.qk_norm + layer * ((S.H + S.G) * 2 * S.HALF)


@gluon.jit
def _attending(S: gl.constexpr):
    """A program's number among those with items, or one that has none."""
    number = program(_WARPS)
    if S.ATTENDING < S.PROGRAMS:
        number = gl.where(number < S.ATTENDING, number, 0x3FFFFFFF)
    return number


@gluon.jit
def prepare_attention(m, p, layer, table_width, cache_pages, S: gl.constexpr):
    """What does not need this layer's queries, keys and values, ahead of the barrier."""
    return prepare(keys_of(m, S.HALF, S), _norms_of(p, layer, S), _cache_of(p, layer, cache_pages, S), p.pages, p.plan_rows, p.plan_num_rows, table_width,
                   _attending(S), S.H, S.G, S.HALF, S.QK_NORM, S.KEYS, _WARPS, ahead(S))


@gluon.constexpr_function
def ahead(code):
    """Whether a second consumer fetches the values of a layer's first item: not in a launch of attention alone."""
    return code.VALUES_AHEAD and code.PHASE in ("all", "rounds")


@gluon.jit
def wait_for_values_used(m, turn):
    """Those of the layer before: long so, but where the barrier over the grid was given up. Else a consumer could be two signals ahead of the other."""
    mbarrier.wait(m[6].index(1), (turn & 1) ^ 1)


@gluon.jit
def values_used(m, AHEAD: gl.constexpr):
    if AHEAD:
        mbarrier.arrive(m[6].index(1), count=1)


@gluon.jit
def prepare_values(m, p, layer, table_width, cache_pages, turn, S: gl.constexpr):
    """By the second consumer, when its products are done, with S.VALUES_AHEAD; behind the barrier `give_values`."""
    wait_for_values_used(m, turn)
    v = m[4].index(0)._reinterpret(gl.bfloat16, [value_width(S.HALF) // 64 * S.KEYS // 8, 8, 64], operand(64))
    fetch_values(v, _cache_of(p, layer, cache_pages, S), p.pages, p.plan_rows, p.plan_num_rows, table_width, _attending(S), S.G, S.HALF, S.KEYS, _WARPS)


@gluon.jit
def values_given(m, AHEAD: gl.constexpr):
    if AHEAD:
        return m[6].index(0)
    else:
        return m[6]


@gluon.jit
def values_arrive(m):
    give_values(m[6].index(0))


@gluon.jit
def attention_phase(m, p, item, layer, table_width, cache_pages, turn, tag, S: gl.constexpr):
    """item: of `prepare_attention`. turn: of attention in this launch."""
    span_mixed = p.span_mixed
    span_stats = p.span_stats
    if S.TAGGED:
        span_mixed = p.span_words
        span_stats = p.stats_words
    attend(item, attention_buffers(m, S.HALF, S.QUERY_UNIT, S), p.qkv, _norms_of(p, layer, S), p.cos, p.sin, _cache_of(p, layer, cache_pages, S), p.pages,
           p.plan_rows, span_mixed, span_stats, p.arrivals, p.mixed, table_width, _attending(S), p.stamps, S.ATTENDING, S.C, S.H, S.G, S.HALF, S.SCALE,
           S.QK_EPS, S.QK_NORM, S.WINDOW, S.LAST_MERGES, S.KEYS, S.QUERIES, S.qkv.SPLITS, False, _WARPS, True, ahead(S), values_given(m, ahead(S)), turn,
           S.TAGGED, tag)
    values_used(m, ahead(S))


@gluon.jit
def merge_words(p, tag, polls, S: gl.constexpr):
    """With S.TAGGED, by one consumer of every program: while the others attend, or in a launch behind theirs."""
    merge_tagged(p.span_words, p.stats_words, p.plan_spans, p.mixed, program(_WARPS), tag, p.fault, polls, S.PROGRAMS, S.C, S.H, S.G, S.HALF, _WARPS)


@gluon.jit
def spans_to_merge(p, S: gl.constexpr, PART: gl.constexpr):
    """For `merge_phase`, ahead of the barrier."""
    return spans_of_row(p.plan_spans, program_list(_WARPS, S, PART), S.C, S.H, S.G)


@gluon.jit
def merge_phase(p, spans, S: gl.constexpr, PART: gl.constexpr):
    """Behind the attention of all programs, unless the last item of each run and head has merged."""
    merge_columns(p.span_mixed, p.span_stats, p.plan_spans, p.mixed, program_list(_WARPS, S, PART), spans, S.PROGRAMS * S.PARTITIONS, S.C, S.H, S.G, S.HALF,
                  _WARPS)


# --- experts ---


@gluon.jit
def _table(m, S: gl.constexpr, PART: gl.constexpr):
    return m[3].index(0 if S.ROLLED_DENSE else PART * S.TABLE_UNITS)._reinterpret(gl.int32, [S.C * S.EXPERTS // 4], row_major(1))


@gluon.jit
def list_number(WARPS: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    """The routing list that a consumer, and its producer, goes by."""
    OWNER: gl.constexpr = 0 if S.ONE_LIST else PART
    return program_list(WARPS, S, OWNER)


@gluon.jit
def _list(p, S: gl.constexpr, PART: gl.constexpr):
    """Pairs and weights of a consumer's routing list."""
    at = list_number(_WARPS, S, PART) * (S.TILES * _COLUMNS)
    return p.list_pairs + at, p.list_weights + at


@gluon.jit
def _stamp_launch(p, place, PART: gl.constexpr):
    """In a launch of gate and up: when the first consumer begins, has its list, has its first weights, and ends, in ns."""
    if PART == 0:
        stamp_time(p.stamps + place, _WARPS)


@gluon.jit
def _make_list(m, p, layer, S: gl.constexpr, PART: gl.constexpr):
    """The choice, a signal to the producer, the list. Returns the number of tiles and what gate and up begin with, which does not wait for the list."""
    number = list_number(_WARPS, S, PART)
    pairs, weights = _list(p, S, PART)
    clear_list(pairs, weights, S.TILES, S.PADDED_TILES, S.PHASE == "gate_up", _WARPS)
    table = _table(m, S, PART)
    num_tiles, distinct, chosen = choose_experts(p.router_logits, p.words + S.C, table, m[13], S.C, S.E, S.K, S.EXPERTS, _WARPS, S.router.SPLITS,
                                                 S.WORDS_CHANGE)
    cta_barrier()   # where tiles end is there for the producer, and the list is clear for all threads
    mbarrier.arrive(m[8], count=1)
    if S.ONE_LIST:
        mbarrier.arrive(m[14], count=1)
    begun = _begin_gate_up(p, _first_columns(table, m[13], num_tiles, S, PART), S)
    written = write_list(p.router_logits, p.words + S.C, table, chosen, num_tiles, p.list_tiles + number, p.list_experts + number * S.TILES, pairs, weights,
                         p.list_counts + number * S.C, S.C, S.E, S.K, S.EXPERTS, S.TILES, S.PADDED_TILES, S.NORMALIZE, S.PHASE == "gate_up", _WARPS,
                         S.router.SPLITS, S.WORDS_CHANGE)
    cta_barrier()   # the pairs are there for all threads
    write_weights(written, weights, S.C, S.E, S.EXPERTS, S.NORMALIZE, _WARPS)
    if S.ONE_LIST:
        cta_barrier()
        mbarrier.arrive(m[15], count=1)
    if number <= 1:
        gl.store(p.distinct + layer, distinct)     # by both consumers of the first program, if both have it: the same
    return num_tiles, begun


@gluon.jit
def _first_columns(table, ends, num_tiles, S: gl.constexpr, PART: gl.constexpr):
    """A pair of each column of the first tile, as `first_pairs`: a list that was just written comes back from L2 behind the weights that are asked for."""
    if S.ROLLED:
        first, last = stage_range(num_tiles, S.up.TILE_STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
        column = columns_of_tile(table, ends, first // S.up.TILE_STAGES, columns_of(_WARPS), column_lanes(_WARPS), S.C, S.EXPERTS, _WARPS)
        return gl.where(first < last, column, -1) * S.K
    else:
        return ()


@gluon.jit
def _begin_gate_up(p, pair_g, S: gl.constexpr):
    if S.ROLLED:
        return begin_tile(pair_g, p.normed_pairs, S.K, S.up.DEPTH, S.up.DEPTH_WARPS, S.up.NUM_STEPS, _WARPS)
    else:
        return ()


@gluon.jit
def gate_up_phase(m, p, slot, phase, layer, lists, S: gl.constexpr, PART: gl.constexpr):
    """The list, and gate and up. lists: how many were made before. Returns the ring's position and what down begins with."""
    if S.PROFILE and S.PHASE == "gate_up":
        _stamp_launch(p, 0, PART)
    pairs, _ = _list(p, S, PART)
    if S.ONE_LIST and PART == 1:
        mbarrier.wait(m[15], lists & 1)
        num_tiles = tiles_of_ends(m[13], _WARPS)
        begun = _begin_gate_up(p, first_pairs(pairs, num_tiles, S.up.TILE_STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS), S)
    else:
        num_tiles, begun = _make_list(m, p, layer, S, PART)
    if S.PROFILE and S.PHASE == "gate_up":
        _stamp_launch(p, 1, PART)
        first, last = stage_range(num_tiles, S.up.TILE_STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
        if first < last:
            mbarrier.wait(m[1].index(slot), phase)
        _stamp_launch(p, 2, PART)
    if S.ROLLED:
        slot, phase = roll_gate_up(m[0], m[11], exchange_of(m, S, PART), m[1], m[2], slot, phase, begun, p.normed_pairs, p.inter, pairs, num_tiles, S.K, S.F,
                                   "silu", S.up.DEPTH, S.up.DEPTH_WARPS, S.up.NUM_STEPS, S.up.PARTS, S.up.TILE_STAGES, S.SLOT_UNITS, S.STAGES, PART,
                                   S.PARTITIONS, S.PROGRAMS, _WARPS)
    else:
        slot, phase = consume_gate_up(m[0], m[11], exchange_of(m, S, PART), m[1], m[2], slot, phase, p.normed_pairs, p.inter, p.list_weights, p.list_experts,
                                      pairs, 0, num_tiles, S.K, S.F, "silu", False, S.up.DEPTH, S.up.DEPTH_WARPS, S.up.NUM_STEPS, 1, S.up.PARTS,
                                      S.up.TILE_STAGES, S.SLOT_UNITS, S.STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS, True)
    if S.PROFILE and S.PHASE == "gate_up":
        _stamp_launch(p, 3, PART)
    cta_barrier()   # the weights are there for all threads
    return slot, phase, (num_tiles, _down_columns(p, num_tiles, S, PART))


@gluon.jit
def _down_columns(p, num_tiles, S: gl.constexpr, PART: gl.constexpr):
    pairs, weights = _list(p, S, PART)
    PARTS: gl.constexpr = parts_at_once(S.down.PARTS, S.down.DEPTH_WARPS) if S.ROLLED else S.down.PARTS
    return first_down_columns(pairs, weights, num_tiles, S.down.DEPTH_WARPS, 1, PARTS, S.down.TILE_STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)


@gluon.jit
def down_phase(m, p, slot, phase, begin, tag, S: gl.constexpr, PART: gl.constexpr):
    """begin: of `gate_up_phase`; () in a launch of its own. tag: of the partials."""
    pairs, weights = _list(p, S, PART)
    if S.PHASE == "down":
        num_tiles = gl.load(p.list_tiles + list_number(_WARPS, S, PART))
        columns = _down_columns(p, num_tiles, S, PART)
    else:
        num_tiles, columns = begin
    if S.ROLLED:
        return roll_down(m[0], m[12], exchange_of(m, S, PART), m[1], m[2], slot, phase, columns, p.inter_pairs, p.partials, pairs, weights, num_tiles, S.D,
                         S.down.DEPTH, S.down.DEPTH_WARPS, S.down.NUM_STEPS, S.down.PARTS, S.down.TILE_STAGES, S.SLOT_UNITS, S.STAGES, PART, S.PARTITIONS,
                         S.PROGRAMS, _WARPS, tag)
    else:
        return consume_down(m[0], m[12], exchange_of(m, S, PART), m[1], m[2], slot, phase, columns, p.inter_pairs, p.partials, p.list_weights, p.list_experts,
                            pairs, weights, 0, num_tiles, S.D, False, S.down.DEPTH, S.down.DEPTH_WARPS, S.down.NUM_STEPS, 1, S.down.PARTS,
                            S.down.TILE_STAGES, S.SLOT_UNITS, S.STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS, True, tag)


@gluon.jit
def leave_squares(p, column, block, values, live, S: gl.constexpr):
    """For the norm of rolled products: the sum of squares of a block of a column's residual."""
    if S.ROLLED_DENSE:
        gl.store(p.squares + column * S.SQUARES + block, gl.sum(values * values, 0), mask=live)


@gluon.jit
def add_phase(p, layer, num_taps, live, tag, polls, place, S: gl.constexpr, PART: gl.constexpr):
    """The residual plus every column's partials, by rank, as soon as they have the tag; handed out if the layer is tapped. live: of the columns, if there is
    one tile. place: of the stamp when the first partials are there. No load waits for another.

    It and its boundary would go if an SM had 16 rows of every expert (128 of 132 SMs, at 2048 rows): it would meet a column's experts in the order of ranks
    and add them itself, without partials (66 KB a column written and read). But then every stage has other activations, which a down product loads for some
    24 KB of weights: not done.
    """
    WIDTH: gl.constexpr = _WARPS * 32
    BLOCKS: gl.constexpr = (S.D + WIDTH - 1) // WIDTH
    RANKS: gl.constexpr = S.K
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    lane = here(gl.arange(0, WIDTH, LANES))
    tap = gl.load(p.taps + layer)
    for block in range(program_list(_WARPS, S, PART), S.C * BLOCKS, S.PROGRAMS * S.PARTITIONS):
        column = block // BLOCKS
        d = (block % BLOCKS) * WIDTH + lane
        if S.COLUMN_TILES == 1:
            lives = (live >> column) & 1 != 0
        else:
            lives = gl.load(p.words + S.C + column, cache_modifier=words_cache(S.WORDS_CHANGE)) >= 0
        before = gl.load(p.residual + column * S.D + d, mask=d < S.D, other=0.0, cache_modifier=".cg")
        inside = (d < S.D) & lives      # such a column has S.K experts
        parts = load_tagged(p.partials + 2 * (column * S.K * S.D + d), inside, tag, p.fault, polls, 1, RANKS, S.D)
        if S.PROFILE and S.ROLLED_DENSE and PART == 0 and S.PHASE != "add":
            stamp_time(p.stamps + place, _WARPS)
        total = gl.zeros((WIDTH,), gl.float32, LANES)
        for rank in gl.static_range(RANKS):
            total += parts[rank]
        after = before + total
        gl.store(p.residual + column * S.D + d, after, mask=inside)
        leave_squares(p, column, block % BLOCKS, gl.where(inside, after, 0.0), lives, S)
        gl.store(p.features + (column * num_taps + tap) * S.D + d, after.to(gl.bfloat16), mask=inside & (tap >= 0))


# --- both ends of a step ---


@gluon.jit
def embed_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    """The residual of every live column, of its input in the first step and of what it sampled then; and the plan of attention, by the last program."""
    WIDTH: gl.constexpr = _WARPS * 32
    BLOCKS: gl.constexpr = (S.D + WIDTH - 1) // WIDTH
    lane = here(gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [_WARPS], [0])))
    for block in range(program_list(_WARPS, S, PART), S.C * BLOCKS, S.PROGRAMS * S.PARTITIONS):
        column = block // BLOCKS
        d = (block % BLOCKS) * WIDTH + lane
        live = gl.load(p.words + S.C + column, cache_modifier=words_cache(S.WORDS_CHANGE)) >= 0
        token = gl.load(p.words + column, cache_modifier=words_cache(S.WORDS_CHANGE))
        if S.PHASE == "all":
            if step > 0:
                token = best_of_column(p, column, _SLICES, _WARPS)
        token = gl.where((token >= 0) & (token < S.V), token, 0)     # behind a fault it may be anything
        value = gl.load(p.embedding + token.to(gl.int64) * S.D + d, mask=live & (d < S.D), other=0.0)
        gl.store(p.residual + column * S.D + d, value.to(gl.float32), mask=live & (d < S.D))
        leave_squares(p, column, block % BLOCKS, value.to(gl.float32), live, S)
    if PART == 0:
        if program(_WARPS) == S.PROGRAMS - 1:
            plan_step(p.words + S.C, p.words + 2 * S.C, p.plan_rows, p.plan_num_rows, p.plan_spans, S.C, S.CLASSES, S.WINDOW,
                      S.ATTENDING // S.G, S.PART_COLUMNS, _WARPS, step, True, S.WORDS_CHANGE)


@gluon.jit
def sample_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    sample_slices(p, program_list(_WARPS, S, PART), step, S.C, S.V, _SLICES, S.PARTITIONS, S.PROGRAMS,
                  (S.PHASE == "all" or S.PHASE == "rounds") and PART == S.PARTITIONS - 1, _WARPS, S.WORDS_CHANGE)


@gluon.jit
def finish_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    """The tokens of the step, for whoever launched it, by the first program."""
    if PART == S.PARTITIONS - 1:
        if program(_WARPS) == 0:
            finish(p, step, S.C, S.V, _SLICES, S.PHASE == "all", _WARPS)
