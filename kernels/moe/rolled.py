# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The consumers of the two expert products with little code: for a kernel of so many phases that an SM fetches all of it anew in every layer.

`device.py` multiplies PARTS stages in code of their own and keeps their sums in registers until it adds them over the warps. Here one body takes a stage and
leaves its sums in shared memory, in the part of the exchange that is next; behind the last part, or the last stage of a tile, all are added and stored.
Products, and the order of every sum, are the same, so are the bits. The barrier that lets the producer refill a slot is also the one before the sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .device import down_columns, gate_and_up, store_channels, store_partials
from .routing import TILE_COLUMNS
from .stream import (
    activations,
    advance,
    columns_of,
    keep_sums,
    kept_sums,
    load_activations,
    load_words,
    multiply,
    release,
    result_coordinates,
    stage_range,
    sum_over_warps,
)

_COLUMNS = gl.constexpr(TILE_COLUMNS)


@gluon.constexpr_function
def parts_at_once(parts, depth_warps):
    """Stages between two sums over the warps; where one warp has the whole input there is nothing to add."""
    return parts if depth_warps > 1 else 1


@gluon.jit
def _multiply_stage(ring, scale_ring, exchange, full, empty, slot, phase, part, x_even, x_odd, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr,
                    PARTS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The next stage, as a part. Returns its accumulator and the ring's position."""
    mbarrier.wait(full.index(slot), phase)
    sums = multiply(ring, scale_ring, slot, x_even, x_odd, SLOT_UNITS, STAGES, 1, NUM_STEPS, NUM_WARPS)
    if DEPTH_WARPS > 1:
        keep_sums(sums[0], exchange, part, PARTS, NUM_WARPS)
    release(empty, slot)
    slot, phase = advance(slot, phase, STAGES)
    return sums, slot, phase


@gluon.jit
def _sums_of(sums, exchange, PARTS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    if DEPTH_WARPS > 1:
        return kept_sums(exchange, PARTS, DEPTH_WARPS, NUM_WARPS)
    else:
        return sum_over_warps(sums, exchange, 1, 1, NUM_WARPS)


@gluon.jit
def first_pairs(pairs_ptr, num_tiles, TILE_STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr,
                NUM_WARPS: gl.constexpr):
    """The pairs of the first tile, for `begin_tile`."""
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    column_g = columns_of(NUM_WARPS)
    return gl.load(pairs_ptr + (first // TILE_STAGES) * _COLUMNS + column_g, mask=(first < last) & (column_g >= 0), other=-1)


@gluon.jit
def begin_tile(pair_g, x_ptr, K: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """What `roll_gate_up` begins a tile with: activations that are on their way, and which of its columns live. pair_g: its pairs, or others of the same
    tokens."""
    live_g = pair_g >= 0
    even, odd = load_words(x_ptr, pair_g // K, live_g, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
    return even, odd, live_g


@gluon.jit
def roll_gate_up(ring, scale_ring, exchange, full, empty, slot, phase, begun, x_ptr, out_ptr, pairs_ptr, num_tiles, K: gl.constexpr, F: gl.constexpr,
                 ACTIVATION: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, MOST_PARTS: gl.constexpr,
                 TILE_STAGES: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr,
                 PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """`consume_gate_up` of one group a stage, without a bias; begun: of `begin_tile` of the first tile, which can be read before the list is there."""
    PARTS: gl.constexpr = parts_at_once(MOST_PARTS, DEPTH_WARPS)
    ROW_TILES: gl.constexpr = (NUM_WARPS // DEPTH_WARPS) * PARTS
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    row, column = result_coordinates(ROW_TILES, DEPTH_WARPS, NUM_WARPS)
    channel = gate_and_up((row >> 4) * 8 + (row & 7), ROW_TILES)[0]
    pair_column = gate_and_up(column + row * 0, ROW_TILES)[0]
    column_g = columns_of(NUM_WARPS)
    for tile in range(first // TILE_STAGES, (last + TILE_STAGES - 1) // TILE_STAGES):
        even, odd, live_g = begun
        live = pair_column < gl.sum(live_g.to(gl.int32), 0)      # a tile's first columns live; a load would wait for what begun need not
        x_even, x_odd = activations(even, odd, NUM_STEPS)
        pair_g = gl.load(pairs_ptr + (tile + 1) * _COLUMNS + column_g, mask=((tile + 1) * TILE_STAGES < last) & (column_g >= 0), other=-1)
        begin = gl.maximum(first - tile * TILE_STAGES, 0)
        end = gl.minimum(last - tile * TILE_STAGES, TILE_STAGES)
        part = begin * 0
        for stage in range(begin, end):
            sums, slot, phase = _multiply_stage(ring, scale_ring, exchange, full, empty, slot, phase, part, x_even, x_odd, SLOT_UNITS, STAGES, PARTS,
                                                DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
            if (part == PARTS - 1) | (stage == end - 1):
                store_channels(_sums_of(sums, exchange, PARTS, DEPTH_WARPS, NUM_WARPS), out_ptr, out_ptr, 0, tile, stage - part, stage + 1, live, channel,
                               pair_column, F, ACTIVATION, False, DEPTH_WARPS, 1, PARTS, False, NUM_WARPS)
                part = begin * 0
            else:
                part += 1
        begun = begin_tile(pair_g, x_ptr, K, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
    return slot, phase


@gluon.jit
def roll_down(ring, scale_ring, exchange, full, empty, slot, phase, columns, inter_ptr, partials_ptr, pairs_ptr, weights_ptr, num_tiles,
              D: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, MOST_PARTS: gl.constexpr, TILE_STAGES: gl.constexpr,
              SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr,
              NUM_WARPS: gl.constexpr, tag=None):
    """`consume_down` of one group a stage, without a bias; columns: of `first_down_columns` with `parts_at_once`."""
    PARTS: gl.constexpr = parts_at_once(MOST_PARTS, DEPTH_WARPS)
    ROW_TILES: gl.constexpr = (NUM_WARPS // DEPTH_WARPS) * PARTS
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    row, _ = result_coordinates(ROW_TILES, DEPTH_WARPS, NUM_WARPS)
    column_g = columns_of(NUM_WARPS)
    for tile in range(first // TILE_STAGES, (last + TILE_STAGES - 1) // TILE_STAGES):
        live_g, pair, weight = columns
        x_even, x_odd = load_activations(inter_ptr, tile * _COLUMNS + column_g, live_g, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
        columns = down_columns(pairs_ptr, weights_ptr, tile + 1, (tile + 1) * TILE_STAGES < last, ROW_TILES, DEPTH_WARPS, NUM_WARPS)
        begin = gl.maximum(first - tile * TILE_STAGES, 0)
        end = gl.minimum(last - tile * TILE_STAGES, TILE_STAGES)
        part = begin * 0
        for stage in range(begin, end):
            sums, slot, phase = _multiply_stage(ring, scale_ring, exchange, full, empty, slot, phase, part, x_even, x_odd, SLOT_UNITS, STAGES, PARTS,
                                                DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
            if (part == PARTS - 1) | (stage == end - 1):
                store_partials(_sums_of(sums, exchange, PARTS, DEPTH_WARPS, NUM_WARPS), partials_ptr, partials_ptr, 0, stage - part, stage + 1, row, pair,
                               weight, D, False, DEPTH_WARPS, 1, PARTS, False, NUM_WARPS, tag)
                part = begin * 0
            else:
                part += 1
    return slot, phase
