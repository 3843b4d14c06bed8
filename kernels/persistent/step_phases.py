# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""The phases of a step as a consumer runs them: what lies in shared memory where, and which buffer each reads and writes.

m: (ring, full, empty, area, pair, met, squares, keys, go, done, word, scales of gate and up, scales of down); p: step_code.Pointers.
Columns beyond eight are taken a tile at a time, each with the weights streamed again: a column's operations stay what they are in a step of eight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..moe.device import consume_down, consume_gate_up, first_down_columns
from ..moe.routing import TILE_COLUMNS
from ..moe.stream import cta_barrier, here, program, row_major
from .attention_device import attend, fetch_first_values, operand
from .dense_device import consume_dense, meet
from .fragments import NUM_WARPS
from .plan import CHUNK, plan_step
from .router import choose_and_route
from .sample_device import best_of_column, finish, sample_slices
from .step_code import SLICES

_WARPS = gl.constexpr(NUM_WARPS)
_CHUNK = gl.constexpr(CHUNK)
_COLUMNS = gl.constexpr(TILE_COLUMNS)
_SLICES = gl.constexpr(SLICES)


@gluon.jit
def program_list(WARPS: gl.constexpr, PART: gl.constexpr):
    """Which routing list is a consumer's, and its producer's."""
    return program(WARPS) * 2 + PART


@gluon.jit
def live_of(words_ptr, tile, S: gl.constexpr):
    """A bit for every column of a tile that lives."""
    c = gl.arange(0, 8, gl.BlockedLayout([1], [32], [_WARPS], [0]))
    return gl.sum((gl.load(words_ptr + S.C + tile * 8 + c) >= 0).to(gl.int32) << c, 0)


# --- shared memory ---


@gluon.jit
def attention_buffers(m, S: gl.constexpr):
    """`attention_device.make_buffers`, in memory that products use too, except for the keys."""
    area, keys = m[3], m[7]
    K: gl.constexpr = operand(S.HALF)
    VALUE_UNITS: gl.constexpr = _CHUNK * S.HALF * 2 // 1024
    QUERY_UNITS: gl.constexpr = S.QUERY_ROWS * S.HALF * 2 // 1024
    k_lo = keys.index(0)._reinterpret(gl.bfloat16, [_CHUNK // 8, 8, S.HALF], K)
    k_hi = keys.index(1)._reinterpret(gl.bfloat16, [_CHUNK // 8, 8, S.HALF], K)
    v_lo = area.index(0)._reinterpret(gl.bfloat16, [_CHUNK // 8, 8, S.HALF], K)
    v_hi = area.index(VALUE_UNITS)._reinterpret(gl.bfloat16, [_CHUNK // 8, 8, S.HALF], K)
    q_lo = area.index(S.QUERY_UNIT)._reinterpret(gl.bfloat16, [S.QUERY_ROWS // 32, 32, S.HALF], K)
    q_hi = area.index(S.QUERY_UNIT + QUERY_UNITS)._reinterpret(gl.bfloat16, [S.QUERY_ROWS // 32, 32, S.HALF], K)
    weights = area.index(S.QUERY_UNIT + 2 * QUERY_UNITS)._reinterpret(gl.bfloat16, [S.QUERY_ROWS, _CHUNK], operand(_CHUNK))
    return k_lo, k_hi, v_lo, v_hi, q_lo, q_hi, weights


@gluon.jit
def _exchange(m, S: gl.constexpr, PART: gl.constexpr):
    return m[3].index(S.EXCHANGE_UNIT + PART * S.EXCHANGE_UNITS)._reinterpret(gl.float32, [S.EXCHANGE], row_major(1))


@gluon.jit
def _activations(m, S: gl.constexpr):
    return m[3].index(0)._reinterpret(gl.int32, [S.POSITIONS * 128], row_major(1))


# --- dense ---


@gluon.jit
def _dense_tile(m, slot, phase, turn, x_ptr, norm, out_ptr, live, W: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr,
                PART: gl.constexpr, copy_ptr):
    return consume_dense(m[0], m[1], m[2], slot, phase, _exchange(m, S, PART), m[4], m[5], turn, _activations(m, S), m[6], x_ptr, norm, out_ptr, out_ptr,
                         live, NORM, S.EPS, ADD, W.ROWS, W.DEPTH, W.DEPTH_WARPS, W.NUM_BLOCKS, W.PAIRS, W.SPLITS, W.STAGE_BLOCKS, S.SLOT_UNITS, S.STAGES,
                         PART, 2, S.PROGRAMS, _WARPS, copy_ptr, S.C)


@gluon.jit
def _dense(m, p, slot, phase, turn, x_ptr, norm, out_ptr, live, W: gl.constexpr, NORM: gl.constexpr, ADD: gl.constexpr, S: gl.constexpr,
           PART: gl.constexpr, copy_ptr=None):
    """x_ptr: a row of W.DEPTH numbers a column; with NORM fp32, else pairs of bf16."""
    ROW: gl.constexpr = W.DEPTH if NORM else W.DEPTH // 2
    if S.COLUMN_TILES == 1:
        slot, phase, turn = _dense_tile(m, slot, phase, turn, x_ptr, norm, out_ptr, live, W, NORM, ADD, S, PART, copy_ptr)
    else:
        for tile in range(S.COLUMN_TILES):
            if not NORM:
                turn = meet(m[5], turn)     # a norm begins with one; nobody still reads what the tile before shared
            its_copy = copy_ptr
            if copy_ptr is not None:
                its_copy = copy_ptr + tile * (8 * W.DEPTH)
            slot, phase, turn = _dense_tile(m, slot, phase, turn, x_ptr + tile * (8 * ROW), norm, out_ptr + tile * (8 * W.ROWS),
                                            live_of(p.words, tile, S), W, NORM, ADD, S, PART, its_copy)
    return slot, phase, turn


@gluon.jit
def qkv_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.qkv
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.qkv, live, W, True, False, S, PART)


@gluon.jit
def out_phase(m, p, slot, phase, turn, live, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.out
    return _dense(m, p, slot, phase, turn, p.mixed_pairs, (), p.residual, live, W, False, True, S, PART)


@gluon.jit
def router_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.router
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.router_logits, live, W, True, False, S, PART, p.normed)


@gluon.jit
def head_phase(m, p, slot, phase, turn, live, norm, S: gl.constexpr, PART: gl.constexpr):
    W: gl.constexpr = S.head
    return _dense(m, p, slot, phase, turn, p.residual, norm, p.logits, live, W, True, False, S, PART)


# --- attention, by the first consumer of an SM ---


@gluon.jit
def attention_phase(m, p, layer, table_width, cache_pages, S: gl.constexpr):
    """Behind `fetch_first_keys`."""
    buffers = attention_buffers(m, S)
    cache = p.cache + layer.to(gl.int64) * cache_pages * (2 * S.G * _CHUNK * 2 * S.HALF)
    number = program(_WARPS)
    fetch_first_values(buffers, cache, p.pages, p.plan_rows, p.plan_num_rows, table_width, number, S.G, S.HALF, _WARPS)
    attend(buffers, p.qkv, p.qk_norm + layer * ((S.H + S.G) * 2 * S.HALF), p.cos, p.sin, cache, p.pages, p.plan_rows, p.plan_num_rows, p.span_mixed,
           p.span_stats, p.arrivals, p.mixed, table_width, number, S.PROGRAMS, S.C, S.H, S.G, S.HALF, S.SCALE, S.QK_EPS, S.QK_NORM, S.WINDOW, True, _WARPS,
           S.qkv.SPLITS)


# --- experts ---


@gluon.jit
def gate_up_phase(m, p, slot, phase, layer, S: gl.constexpr, PART: gl.constexpr):
    """The list, a signal to the producer, gate and up. Returns the ring's position and the columns of the first tile of down."""
    number = program_list(_WARPS, PART)
    tiles, experts, pairs = p.list_tiles + number, p.list_experts + number * S.TILES, p.list_pairs + number * (S.TILES * _COLUMNS)
    choose_and_route(p.router_logits, p.words + S.C, tiles, experts, pairs, p.list_weights + number * (S.TILES * _COLUMNS), p.list_counts + number * S.C, S.C,
                     S.E, S.K, S.EXPERTS, S.TILES, S.PADDED_TILES, S.NORMALIZE, _WARPS)
    cta_barrier()   # the list is there for all threads
    mbarrier.arrive(m[8], count=1)
    num_tiles = gl.load(tiles)
    slot, phase = consume_gate_up(m[0], m[11], _exchange(m, S, PART), m[1], m[2], slot, phase, p.normed_pairs, p.inter, p.list_weights, experts, pairs, 0,
                                  num_tiles, S.K, S.F, "silu", False, S.up.DEPTH, S.up.DEPTH_WARPS, S.up.NUM_STEPS, 1, S.up.PARTS, S.up.TILE_STAGES,
                                  S.SLOT_UNITS, S.STAGES, PART, 2, S.PROGRAMS, _WARPS, True)
    if PART == 1:
        if number == 1:
            _count_experts(p, tiles, experts, layer, S)
    return slot, phase, _down_columns(p, S, PART)


@gluon.jit
def _count_experts(p, tiles, experts, layer, S: gl.constexpr):
    """The distinct ones of a list, in which those of one expert are neighbours."""
    tile = here(gl.arange(0, S.PADDED_TILES, gl.BlockedLayout([1], [32], [_WARPS], [0])))
    inside = tile < gl.load(tiles)
    mine = gl.load(experts + tile, mask=inside, other=-1)
    before = gl.load(experts + (tile - 1), mask=inside & (tile > 0), other=-1)
    gl.store(p.distinct + layer, gl.sum((inside & (mine != before)).to(gl.int32), 0))


@gluon.jit
def _down_columns(p, S: gl.constexpr, PART: gl.constexpr):
    number = program_list(_WARPS, PART)
    at = number * (S.TILES * _COLUMNS)
    return first_down_columns(p.list_pairs + at, p.list_weights + at, gl.load(p.list_tiles + number), S.down.DEPTH_WARPS, 1, S.down.PARTS,
                              S.down.TILE_STAGES, PART, 2, S.PROGRAMS, _WARPS)


@gluon.jit
def down_phase(m, p, slot, phase, columns, S: gl.constexpr, PART: gl.constexpr):
    """columns: of `gate_up_phase`; () in a launch of its own."""
    number = program_list(_WARPS, PART)
    at = number * (S.TILES * _COLUMNS)
    if S.PHASE == "down":
        columns = _down_columns(p, S, PART)
    return consume_down(m[0], m[12], _exchange(m, S, PART), m[1], m[2], slot, phase, columns, p.inter_pairs, p.partials, p.list_weights,
                        p.list_experts + number * S.TILES, p.list_pairs + at, p.list_weights + at, 0, gl.load(p.list_tiles + number), S.D, False,
                        S.down.DEPTH, S.down.DEPTH_WARPS, S.down.NUM_STEPS, 1, S.down.PARTS, S.down.TILE_STAGES, S.SLOT_UNITS, S.STAGES, PART, 2, S.PROGRAMS,
                        _WARPS, True)


@gluon.jit
def add_phase(p, layer, num_taps, S: gl.constexpr, PART: gl.constexpr):
    """The residual plus every column's partials, by rank; handed out if the layer is tapped."""
    WIDTH: gl.constexpr = _WARPS * 32
    BLOCKS: gl.constexpr = (S.D + WIDTH - 1) // WIDTH
    RANKS: gl.constexpr = S.K
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    lane = here(gl.arange(0, WIDTH, LANES))
    number = program_list(_WARPS, PART)
    tap = gl.load(p.taps + layer)
    for block in range(number, S.C * BLOCKS, S.PROGRAMS * 2):
        column = block // BLOCKS
        d = (block % BLOCKS) * WIDTH + lane
        count = gl.load(p.list_counts + number * S.C + column)
        live = (d < S.D) & (count > 0)
        before = gl.load(p.residual + column * S.D + d, mask=live, other=0.0, cache_modifier=".cg")
        total = gl.zeros((WIDTH,), gl.float32, LANES)
        for rank in gl.static_range(RANKS):
            total += gl.load(p.partials + (column * S.K + rank) * S.D + d, mask=live & (rank < count), other=0.0, cache_modifier=".cg")
        after = before + total
        gl.store(p.residual + column * S.D + d, after, mask=live)
        gl.store(p.features + (column * num_taps + tap) * S.D + d, after.to(gl.bfloat16), mask=live & (tap >= 0))


# --- both ends of a step ---


@gluon.jit
def embed_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    """The residual of every live column, of its input in the first step and of what it sampled then; and the plan of attention, by the last program."""
    WIDTH: gl.constexpr = _WARPS * 32
    BLOCKS: gl.constexpr = (S.D + WIDTH - 1) // WIDTH
    lane = here(gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [_WARPS], [0])))
    for block in range(program_list(_WARPS, PART), S.C * BLOCKS, S.PROGRAMS * 2):
        column = block // BLOCKS
        d = (block % BLOCKS) * WIDTH + lane
        live = gl.load(p.words + S.C + column) >= 0
        token = gl.load(p.words + column)
        if S.PHASE == "all":
            if step > 0:
                token = best_of_column(p, column, _SLICES, _WARPS)
        token = gl.where((token >= 0) & (token < S.V), token, 0)     # behind a fault it may be anything
        value = gl.load(p.embedding + token.to(gl.int64) * S.D + d, mask=live & (d < S.D), other=0.0)
        gl.store(p.residual + column * S.D + d, value.to(gl.float32), mask=live & (d < S.D))
    if PART == 0:
        if program(_WARPS) == S.PROGRAMS - 1:
            plan_step(p.words + S.C, p.words + 2 * S.C, p.plan_rows, p.plan_num_rows, p.plan_spans, S.C, S.CLASSES, S.WINDOW, _WARPS, step)


@gluon.jit
def sample_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    sample_slices(p, program_list(_WARPS, PART), step, S.C, S.V, _SLICES, S.PROGRAMS, S.PHASE == "all" and PART == 1, _WARPS)


@gluon.jit
def finish_phase(p, step, S: gl.constexpr, PART: gl.constexpr):
    """The tokens of the step, for whoever launched it, by the first program."""
    if PART == 1:
        if program(_WARPS) == 0:
            finish(p, step, S.C, S.V, _SLICES, S.PHASE == "all", _WARPS)
