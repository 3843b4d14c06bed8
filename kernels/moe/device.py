# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: RUF005 (a tuple of tensors grows by +)
"""The device code of the two expert products; product.py says what they compute.

A kernel has one or two pairs of partitions: consumers, and the producer of stream.py that fills their ring. Two pairs share an SM like two
programs: while one waits at a barrier the other multiplies. `consume_gate_up` and `consume_down` take and return the position in the ring,
so that layer.py can run one after the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .routing import TILE_COLUMNS
from .stream import (
    advance,
    columns_of,
    lanes,
    load_activations,
    make_ring,
    make_scale_ring,
    multiply,
    program,
    release,
    result_coordinates,
    stage_range,
    store_tagged,
    stream_weights,
    sum_over_warps,
)
from .weights import CLAMP_ALPHA, CLAMP_LIMIT

_LIMIT = gl.constexpr(CLAMP_LIMIT)
_ALPHA = gl.constexpr(CLAMP_ALPHA)
_COLUMNS = gl.constexpr(TILE_COLUMNS)
# -log2(e) is 0xBFB8AA3B
_SIGMOID_PTX = gl.constexpr("{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }")


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) to about 2**-22, without the range reductions of exp and division: its limits come out right without them."""
    ptx: gl.constexpr = _SIGMOID_PTX
    return gl.inline_asm_elementwise(ptx, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gate_and_up(values, ROW_TILES: gl.constexpr):
    """[row tiles, 128] to two of [row tiles, 64]: even elements are gate, odd ones up."""
    return gl.split(gl.reshape(values, (ROW_TILES, 64, 2)))


@gluon.jit
def _multiply_all(ring, scale_ring, full, empty, slot, phase, x_even, x_odd, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
                  PARTS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The next PARTS stages."""
    parts = ()
    for _part in gl.static_range(PARTS):
        mbarrier.wait(full.index(slot), phase)
        parts = parts + multiply(ring, scale_ring, slot, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, NUM_STEPS, NUM_WARPS)
        release(empty, slot)
        slot, phase = advance(slot, phase, STAGES)
    return parts, slot, phase


@gluon.jit
def _multiply_rest(ring, scale_ring, full, empty, slot, phase, left, x_even, x_odd, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
                   PARTS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The next PARTS stages, or the 1 to PARTS - 1 that are left; zeros for the others."""
    parts, slot, phase = _multiply_all(ring, scale_ring, full, empty, slot, phase, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, 1, NUM_STEPS, NUM_WARPS)
    for part in gl.static_range(1, PARTS):
        gl.static_assert(GROUPS <= 2, "a stage that may be left out has 1 or 2 groups")
        sums_0 = gl.zeros((NUM_WARPS, 8, 4, 4), gl.float32, lanes(NUM_WARPS))
        sums_1 = sums_0
        if part < left:
            mbarrier.wait(full.index(slot), phase)
            more = multiply(ring, scale_ring, slot, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, NUM_STEPS, NUM_WARPS)
            sums_0 = more[0]
            if GROUPS == 2:
                sums_1 = more[1]
            release(empty, slot)
            slot, phase = advance(slot, phase, STAGES)
        if GROUPS == 2:
            parts = parts + (sums_0, sums_1)
        else:
            parts = parts + (sums_0,)
    return parts, slot, phase


@gluon.jit
def store_channels(sums, out_ptr, bias_ptr, expert, tile, stage, end, live, channel, pair_column, F: gl.constexpr, ACTIVATION: gl.constexpr,
                   HAS_BIAS: gl.constexpr, DEPTH_WARPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, ALL: gl.constexpr,
                   NUM_WARPS: gl.constexpr):
    """Bias, activation, store, of what `sum_over_warps` gave. ALL: every row of the parts is one."""
    STAGE_TILES: gl.constexpr = GROUPS * (NUM_WARPS // DEPTH_WARPS)
    gate, up = gate_and_up(sums, STAGE_TILES * PARTS)
    f = stage * (STAGE_TILES * 8) + channel
    mask = live
    if not ALL:
        mask = live & (f < gl.minimum(end * (STAGE_TILES * 8), F))
    if ACTIVATION == "none":
        offset = (tile * _COLUMNS + pair_column) * (2 * F) + f
        gl.store(out_ptr + offset, gate, mask=mask)
        gl.store(out_ptr + offset + F, up, mask=mask)
    else:
        if HAS_BIAS:
            gate += gl.load(bias_ptr + expert * (2 * F) + f, mask=mask, other=0.0)
            up += gl.load(bias_ptr + expert * (2 * F) + F + f, mask=mask, other=0.0)
        if ACTIVATION == "silu":
            value = gate * sigmoid(gate) * up
        else:
            gl.static_assert(ACTIVATION == "clamped_swiglu")
            gate = gl.minimum(gate, _LIMIT)
            up = gl.minimum(gl.maximum(up, -_LIMIT), _LIMIT)
            value = (up + 1.0) * gate * sigmoid(_ALPHA * gate)
        gl.store(out_ptr + (tile * _COLUMNS + pair_column) * F + f, value.to(gl.bfloat16), mask=mask)


@gluon.jit
def consume_gate_up(ring, scale_ring, exchange, full, empty, slot, phase, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, first_expert, num_tiles,
                    K: gl.constexpr, F: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr,
                    NUM_STEPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, TILE_STAGES: gl.constexpr, SLOT_UNITS: gl.constexpr,
                    STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr, SHORT: gl.constexpr):
    """The consumers' part of gate and up: returns the ring's position.

    SHORT: one body for whole batches of PARTS stages and for what is left of them. Two bodies cost fewer instructions, but made a kernel of
    several products slower, presumably by fetching both again and again.
    """
    STAGE_TILES: gl.constexpr = GROUPS * (NUM_WARPS // DEPTH_WARPS)
    ROW_TILES: gl.constexpr = STAGE_TILES * PARTS
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    row, column = result_coordinates(ROW_TILES, DEPTH_WARPS, NUM_WARPS)
    channel = gate_and_up((row >> 4) * 8 + (row & 7), ROW_TILES)[0]
    pair_column = gate_and_up(column + row * 0, ROW_TILES)[0]
    column_g = columns_of(NUM_WARPS)
    pair_g = gl.load(pairs_ptr + (first // TILE_STAGES) * _COLUMNS + column_g, mask=(first < last) & (column_g >= 0), other=-1)
    for tile in range(first // TILE_STAGES, (last + TILE_STAGES - 1) // TILE_STAGES):
        x_even, x_odd = load_activations(x_ptr, pair_g // K, pair_g >= 0, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
        live = gl.load(pairs_ptr + tile * _COLUMNS + pair_column) >= 0
        pair_g = gl.load(pairs_ptr + (tile + 1) * _COLUMNS + column_g, mask=((tile + 1) * TILE_STAGES < last) & (column_g >= 0), other=-1)
        expert = 0
        if HAS_BIAS:
            expert = first_expert + gl.load(experts_ptr + tile)
        begin = gl.maximum(first - tile * TILE_STAGES, 0)
        end = gl.minimum(last - tile * TILE_STAGES, TILE_STAGES)
        rest = begin if SHORT else end - (end - begin) % PARTS
        if not SHORT:
            for stage in range(begin, rest, PARTS):
                parts, slot, phase = _multiply_all(ring, scale_ring, full, empty, slot, phase, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, PARTS, NUM_STEPS,
                                                   NUM_WARPS)
                sums = sum_over_warps(parts, exchange, GROUPS * PARTS, DEPTH_WARPS, NUM_WARPS)
                store_channels(sums, out_ptr, bias_ptr, expert, tile, stage, end, live, channel, pair_column, F, ACTIVATION, HAS_BIAS,
                               DEPTH_WARPS, GROUPS, PARTS, F % (STAGE_TILES * 8) == 0, NUM_WARPS)
        if SHORT or PARTS > 1:
            for stage in range(rest, end, PARTS):
                parts, slot, phase = _multiply_rest(ring, scale_ring, full, empty, slot, phase, end - stage, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, PARTS,
                                                    NUM_STEPS, NUM_WARPS)
                sums = sum_over_warps(parts, exchange, GROUPS * PARTS, DEPTH_WARPS, NUM_WARPS)
                store_channels(sums, out_ptr, bias_ptr, expert, tile, stage, end, live, channel, pair_column, F, ACTIVATION, HAS_BIAS,
                               DEPTH_WARPS, GROUPS, PARTS, False, NUM_WARPS)
    return slot, phase


@gluon.jit
def down_columns(pairs_ptr, weights_ptr, tile, inside, ROW_TILES: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Of a column tile: which columns live, in the layout of the activations, and their pairs and weights in that of the results."""
    column_g = columns_of(NUM_WARPS)
    _, column = result_coordinates(ROW_TILES, DEPTH_WARPS, NUM_WARPS)
    live_g = gl.load(pairs_ptr + tile * _COLUMNS + column_g, mask=inside & (column_g >= 0), other=-1) >= 0
    pair = gl.load(pairs_ptr + tile * _COLUMNS + column, mask=inside & (column >= 0), other=-1)
    weight = gl.load(weights_ptr + tile * _COLUMNS + column, mask=inside & (column >= 0), other=0.0)
    return live_g, pair, weight


@gluon.jit
def first_down_columns(pairs_ptr, weights_ptr, num_tiles, DEPTH_WARPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, TILE_STAGES: gl.constexpr,
                       PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    return down_columns(pairs_ptr, weights_ptr, first // TILE_STAGES, first < last, GROUPS * PARTS * (NUM_WARPS // DEPTH_WARPS), DEPTH_WARPS, NUM_WARPS)


@gluon.jit
def store_partials(sums, partials_ptr, bias_ptr, expert, stage, end, row, pair, weight, D: gl.constexpr, HAS_BIAS: gl.constexpr,
                   DEPTH_WARPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, ALL: gl.constexpr, NUM_WARPS: gl.constexpr, tag=None):
    """Bias, weight, store, of what `sum_over_warps` gave. ALL: every row of the parts is one. With a tag to words of fp32 [..., 2] (`store_tagged`)."""
    STAGE_TILES: gl.constexpr = GROUPS * (NUM_WARPS // DEPTH_WARPS)
    d = stage * (STAGE_TILES * 16) + row
    mask = (pair >= 0) & (row >= 0)
    if not ALL:
        mask = (pair >= 0) & (d < gl.minimum(end * (STAGE_TILES * 16), D))
    if HAS_BIAS:
        sums += gl.load(bias_ptr + expert * D + d, mask=mask, other=0.0)
    if tag is not None:
        store_tagged(partials_ptr + 2 * (pair * D + d), sums * weight, tag, mask)
    else:
        gl.store(partials_ptr + pair * D + d, sums * weight, mask=mask)


@gluon.jit
def consume_down(ring, scale_ring, exchange, full, empty, slot, phase, columns, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr,
                 first_expert, num_tiles, D: gl.constexpr, HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr,
                 GROUPS: gl.constexpr, PARTS: gl.constexpr, TILE_STAGES: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
                 PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr, SHORT: gl.constexpr, tag=None):
    """The consumers' part of down, up to the partials: returns the ring's position.

    columns: `down_columns` of its first tile, which can be read before what gate and up give is there. SHORT: as in `consume_gate_up`. tag: of the partials.
    """
    STAGE_TILES: gl.constexpr = GROUPS * (NUM_WARPS // DEPTH_WARPS)
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    row, _ = result_coordinates(STAGE_TILES * PARTS, DEPTH_WARPS, NUM_WARPS)
    column_g = columns_of(NUM_WARPS)
    for tile in range(first // TILE_STAGES, (last + TILE_STAGES - 1) // TILE_STAGES):
        live_g, pair, weight = columns
        x_even, x_odd = load_activations(inter_ptr, tile * _COLUMNS + column_g, live_g, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
        columns = down_columns(pairs_ptr, weights_ptr, tile + 1, (tile + 1) * TILE_STAGES < last, STAGE_TILES * PARTS, DEPTH_WARPS, NUM_WARPS)
        expert = 0
        if HAS_BIAS:
            expert = first_expert + gl.load(experts_ptr + tile)
        begin = gl.maximum(first - tile * TILE_STAGES, 0)
        end = gl.minimum(last - tile * TILE_STAGES, TILE_STAGES)
        rest = begin if SHORT else end - (end - begin) % PARTS
        if not SHORT:
            for stage in range(begin, rest, PARTS):
                parts, slot, phase = _multiply_all(ring, scale_ring, full, empty, slot, phase, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, PARTS, NUM_STEPS,
                                                   NUM_WARPS)
                sums = sum_over_warps(parts, exchange, GROUPS * PARTS, DEPTH_WARPS, NUM_WARPS)
                store_partials(sums, partials_ptr, bias_ptr, expert, stage, end, row, pair, weight, D, HAS_BIAS, DEPTH_WARPS, GROUPS, PARTS,
                               D % (STAGE_TILES * 16) == 0, NUM_WARPS, tag)
        if SHORT or PARTS > 1:
            for stage in range(rest, end, PARTS):
                parts, slot, phase = _multiply_rest(ring, scale_ring, full, empty, slot, phase, end - stage, x_even, x_odd, SLOT_UNITS, STAGES, GROUPS, PARTS,
                                                    NUM_STEPS, NUM_WARPS)
                sums = sum_over_warps(parts, exchange, GROUPS * PARTS, DEPTH_WARPS, NUM_WARPS)
                store_partials(sums, partials_ptr, bias_ptr, expert, stage, end, row, pair, weight, D, HAS_BIAS, DEPTH_WARPS, GROUPS, PARTS,
                               False, NUM_WARPS, tag)
    return slot, phase


@gluon.jit
def add_partials(partials_ptr, y_ptr, num_experts_ptr, num_tokens, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, K: gl.constexpr,
                 D: gl.constexpr, NUM_WARPS: gl.constexpr):
    """y, every token's partials by rank; behind a barrier over the grid."""
    COLUMNS: gl.constexpr = NUM_WARPS * 32
    BLOCKS: gl.constexpr = (D + COLUMNS - 1) // COLUMNS
    lane = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
    for block in range(program(NUM_WARPS) * PARTITIONS + PART, num_tokens * BLOCKS, PROGRAMS * PARTITIONS):
        token = block // BLOCKS
        d = (block % BLOCKS) * COLUMNS + lane
        count = gl.load(num_experts_ptr + token)
        total = gl.zeros((COLUMNS,), gl.float32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
        for rank in gl.static_range(K):
            total += gl.load(partials_ptr + (token * K + rank) * D + d, mask=(rank < count) & (d < D), other=0.0, cache_modifier=".cg")
        gl.store(y_ptr + token * D + d, total, mask=d < D)


@gluon.jit
def _gate_up_consumer(ring, scale_ring, exchange, full, empty, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, num_tiles_ptr, K: gl.constexpr,
                      F: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr,
                      NUM_STEPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, TILE_STAGES: gl.constexpr, STAGES: gl.constexpr,
                      PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    num_tiles = gl.load(num_tiles_ptr)
    consume_gate_up(ring, scale_ring, exchange, full, empty, gl.to_tensor(0), gl.to_tensor(0), x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, 0,
                    num_tiles, K, F, ACTIVATION, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, GROUPS * NUM_STEPS, STAGES, PART,
                    PARTITIONS, PROGRAMS, NUM_WARPS, False)


@gluon.jit
def _down_consumer(ring, scale_ring, exchange, full, empty, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_tiles_ptr,
                   D: gl.constexpr, HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, GROUPS: gl.constexpr,
                   PARTS: gl.constexpr, TILE_STAGES: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr,
                   PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    num_tiles = gl.load(num_tiles_ptr)
    columns = first_down_columns(pairs_ptr, weights_ptr, num_tiles, DEPTH_WARPS, GROUPS, PARTS, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    consume_down(ring, scale_ring, exchange, full, empty, gl.to_tensor(0), gl.to_tensor(0), columns, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr,
                 weights_ptr, 0, num_tiles, D, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, GROUPS * NUM_STEPS, STAGES, PART,
                 PARTITIONS, PROGRAMS, NUM_WARPS, False)


@gluon.jit
def _producer(codes_desc, scales_desc, ring, scale_ring, full, empty, experts_ptr, num_tiles_ptr, TILE_STAGES: gl.constexpr, UNITS: gl.constexpr,
              SCALE_BOX: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    num_tiles = gl.load(num_tiles_ptr)
    stream_weights(codes_desc, scales_desc, ring, scale_ring, full, empty, gl.to_tensor(0), gl.to_tensor(1), experts_ptr, 0, num_tiles, TILE_STAGES, UNITS,
                   UNITS, SCALE_BOX, STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)


@gluon.jit
def gate_up_kernel(codes_desc, scales_desc, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, num_tiles_ptr, K: gl.constexpr, F: gl.constexpr,
                   ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr,
                   GROUPS: gl.constexpr, PARTS: gl.constexpr, TILE_STAGES: gl.constexpr, SCALE_BOX: gl.constexpr, STAGES: gl.constexpr,
                   PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    UNITS: gl.constexpr = GROUPS * NUM_STEPS
    EXCHANGE: gl.constexpr = GROUPS * PARTS * NUM_WARPS * 128
    ring, exchange, full, empty = make_ring(codes_desc, UNITS, STAGES, EXCHANGE, NUM_WARPS)
    scale_ring = make_scale_ring(scales_desc, UNITS, SCALE_BOX, STAGES, NUM_WARPS)
    if PARTITIONS == 1:
        gl.warp_specialize([
            (_gate_up_consumer, (ring, scale_ring, exchange, full, empty, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, num_tiles_ptr, K, F, ACTIVATION,
                                 HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 0, 1, PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring, scale_ring, full, empty, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES, 0, 1,
                         PROGRAMS, NUM_WARPS)),
        ], [1], [24])
    else:
        ring_1, exchange_1, full_1, empty_1 = make_ring(codes_desc, UNITS, STAGES, EXCHANGE, NUM_WARPS)
        scale_ring_1 = make_scale_ring(scales_desc, UNITS, SCALE_BOX, STAGES, NUM_WARPS)
        gl.warp_specialize([
            (_gate_up_consumer, (ring, scale_ring, exchange, full, empty, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, num_tiles_ptr, K, F, ACTIVATION,
                                 HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 0, 2, PROGRAMS, NUM_WARPS)),
            (_gate_up_consumer, (ring_1, scale_ring_1, exchange_1, full_1, empty_1, x_ptr, out_ptr, bias_ptr, experts_ptr, pairs_ptr, num_tiles_ptr, K, F,
                                 ACTIVATION, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 1, 2, PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring, scale_ring, full, empty, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES, 0, 2,
                         PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring_1, scale_ring_1, full_1, empty_1, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES,
                         1, 2, PROGRAMS, NUM_WARPS)),
        ], [NUM_WARPS, 1, 1], [112, 24, 24])


@gluon.jit
def down_kernel(codes_desc, scales_desc, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_tiles_ptr, D: gl.constexpr,
                HAS_BIAS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr,
                TILE_STAGES: gl.constexpr, SCALE_BOX: gl.constexpr, STAGES: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr,
                NUM_WARPS: gl.constexpr):
    UNITS: gl.constexpr = GROUPS * NUM_STEPS
    EXCHANGE: gl.constexpr = GROUPS * PARTS * NUM_WARPS * 128
    ring, exchange, full, empty = make_ring(codes_desc, UNITS, STAGES, EXCHANGE, NUM_WARPS)
    scale_ring = make_scale_ring(scales_desc, UNITS, SCALE_BOX, STAGES, NUM_WARPS)
    if PARTITIONS == 1:
        gl.warp_specialize([
            (_down_consumer, (ring, scale_ring, exchange, full, empty, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_tiles_ptr,
                              D, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 0, 1, PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring, scale_ring, full, empty, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES, 0, 1,
                         PROGRAMS, NUM_WARPS)),
        ], [1], [24])
    else:
        ring_1, exchange_1, full_1, empty_1 = make_ring(codes_desc, UNITS, STAGES, EXCHANGE, NUM_WARPS)
        scale_ring_1 = make_scale_ring(scales_desc, UNITS, SCALE_BOX, STAGES, NUM_WARPS)
        gl.warp_specialize([
            (_down_consumer, (ring, scale_ring, exchange, full, empty, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr, num_tiles_ptr,
                              D, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 0, 2, PROGRAMS, NUM_WARPS)),
            (_down_consumer, (ring_1, scale_ring_1, exchange_1, full_1, empty_1, inter_ptr, partials_ptr, bias_ptr, experts_ptr, pairs_ptr, weights_ptr,
                              num_tiles_ptr, D, HAS_BIAS, DEPTH, DEPTH_WARPS, NUM_STEPS, GROUPS, PARTS, TILE_STAGES, STAGES, 1, 2, PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring, scale_ring, full, empty, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES, 0, 2,
                         PROGRAMS, NUM_WARPS)),
            (_producer, (codes_desc, scales_desc, ring_1, scale_ring_1, full_1, empty_1, experts_ptr, num_tiles_ptr, TILE_STAGES, UNITS, SCALE_BOX, STAGES,
                         1, 2, PROGRAMS, NUM_WARPS)),
        ], [NUM_WARPS, 1, 1], [112, 24, 24])


@gluon.jit(do_not_specialize=["num_tokens"])
def add_partials_kernel(partials_ptr, y_ptr, num_experts_ptr, num_tokens, K: gl.constexpr, D: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    add_partials(partials_ptr, y_ptr, num_experts_ptr, num_tokens, 0, 1, PROGRAMS, K, D, NUM_WARPS)
