# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005, SIM102 (a tuple of tensors grows by +; one condition may be known when compiling and the next not)
"""The device code of the dense phase; dense.py says what it computes, fragments.py where the weights lie.

An SM has two consumers of eight warps and a producer for each, as in kernels/moe. The producer copies stages, STAGE_BLOCKS blocks of
every warp of its consumer, into the slots of a ring of 4096-byte units; experts use slots of such units too, so one ring serves all phases
of a step, and the producer of the next phase may start before the consumers of this one are done.

Issue slots do not bind: an MMA takes 512 bytes of weights here and 136 in an expert. Where 17.5 instructions an MMA kept an H200's stream, 65 do.
What remains is latency: few barriers a stage, and each activation read from L2 once an SM.

    normalize   Each consumer reads every second chunk of eight blocks of the residual and keeps it in registers.
                The two add their sums of squares through shared memory, warp by warp in order, and leave bf16 fragments there for both.
    order       Of a sum: blocks of a warp one after the other, then the warps along the input in order, then the pair. None of it looks at
                other columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..moe.stream import CODE_BOX, advance, columns_of, here, lanes, program, release, row_major
from .fragments import UNIT_BYTES

_UNIT_BYTES = gl.constexpr(UNIT_BYTES)
_MOST_HELD = gl.constexpr(6)       # chunks of the residual that a consumer keeps in registers, 8 a lane each; if there are more,
_HELD_OF_MORE = gl.constexpr(2)    # it keeps so many, as the norm's weights take registers too, and reads the others twice
# Sums plus one block: operands are 4 sums out, the A fragments of both MMAs, the B fragments of the block, 4 sums in.
_BLOCK_PTX = gl.constexpr("""{
.reg .f32 half<4>;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {half0, half1, half2, half3}, {$4, $5, $6, $7}, {$12, $13}, {$16, $17, $18, $19};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$14, $15}, {half0, half1, half2, half3};
}""")
_BLOCK_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@gluon.constexpr_function
def chunk(element, num_warps):
    """[position, column of the batch, 32 columns of the input]: 16 bytes a lane, so that a load takes whole sectors of L2."""
    width = 128 // element.primitive_bitwidth
    return gl.BlockedLayout([1, 1, width], [1, width, 32 // width], [num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def tiles_of(depth_warps, num_warps):
    """[row warp, warp along the input, 128 sums]: a thread has all partial sums of one."""
    return gl.BlockedLayout([1, depth_warps, 1], [1, 1, 32], [num_warps // 4, 1, 4], [2, 1, 0])


@gluon.constexpr_function
def spread(depth_warps, num_warps):
    """[row warp, depth warp, g, t, 4 words]: `lanes` with its warps as two axes."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 1, 8, 4, 1], [num_warps // depth_warps, depth_warps, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def meet(met, turn):
    """Both consumers of an SM have come; what each wrote to shared memory before, both can read after. Returns the next turn."""
    mbarrier.arrive(met, count=1)
    mbarrier.wait(met, turn)
    return turn ^ 1


@gluon.jit
def item_range(ITEMS: gl.constexpr, PAIRS: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    """The items of a consumer, or of a pair: contiguous, as even as it goes."""
    if PAIRS == 1:
        number = program(WARPS) * PARTITIONS + PART
        return ITEMS * number // (PROGRAMS * PARTITIONS), ITEMS * (number + 1) // (PROGRAMS * PARTITIONS)
    else:
        number = program(WARPS)
        return ITEMS * number // PROGRAMS, ITEMS * (number + 1) // PROGRAMS


# --- the producer ---


@gluon.jit
def stream_dense(desc, ring, full, empty, slot, phase, first_unit, ITEMS: gl.constexpr, PAIRS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
                 STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr,
                 PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The producer's part of a product: every stage of its consumer into the next free slot. Returns the ring's position.

    first_unit: where the matrix begins in the buffer of the descriptor. Weights wait for nothing, so this may run ahead of any barrier.
    """
    first, last = item_range(ITEMS, PAIRS, PART, PARTITIONS, PROGRAMS, 1)
    ITEM_STAGES: gl.constexpr = NUM_BLOCKS // STAGE_BLOCKS
    HALF: gl.constexpr = PART if PAIRS == 2 else 0
    for stage in range(first * ITEM_STAGES, last * ITEM_STAGES):
        unit = first_unit + (((stage // ITEM_STAGES) * PAIRS + HALF) * ITEM_STAGES + stage % ITEM_STAGES) * (2 * STAGE_BLOCKS)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), 2 * STAGE_BLOCKS * _UNIT_BYTES)
        for i in gl.static_range(2 * STAGE_BLOCKS):
            tma.async_copy_global_to_shared(desc, [(unit + i) * (NUM_WARPS // 2), 0], full.index(slot), ring.index(slot * SLOT_UNITS + i))
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


# --- activations ---


@gluon.jit
def load_fragments(x_ptr, live_g, slice_number, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """B fragments of a slice straight from bf16 activations, pairs [8, DEPTH / 2]; zeros in dead columns and in the pad."""
    LANES: gl.constexpr = lanes(NUM_WARPS)
    Q: gl.constexpr = gl.SliceLayout(3, LANES)
    warp = here(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, Q))))[:, None, None, None]
    t = here(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, Q))))[None, None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LANES))))[None, None, None, :]
    column = columns_of(NUM_WARPS)[None, :, None, None]
    first = (slice_number * DEPTH_WARPS + warp % DEPTH_WARPS) * NUM_BLOCKS
    x = ()
    for i in gl.static_range(NUM_BLOCKS):
        mask = live_g[None, :, None, None] & (first + i < DEPTH // 32) & (word >= 0)
        x = x + (gl.load(x_ptr + column * (DEPTH // 2) + (first + i) * 16 + t * 4 + word, mask=mask, other=0, cache_modifier=".cg"),)
    return x


@gluon.jit
def read_fragments(x_area, slice_number, POSITIONS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """B fragments of a slice that `normalize` left in shared memory."""
    SPREAD: gl.constexpr = spread(DEPTH_WARPS, NUM_WARPS)
    units = x_area._reinterpret(gl.int32, [POSITIONS // DEPTH_WARPS, DEPTH_WARPS, 8, 4, 4], row_major(4))
    every_warp = gl.zeros((NUM_WARPS // DEPTH_WARPS, DEPTH_WARPS, 8, 4, 4), gl.int32, SPREAD)
    x = ()
    for i in gl.static_range(NUM_BLOCKS):
        loaded = gl.expand_dims(units.index(slice_number * NUM_BLOCKS + i).load(gl.SliceLayout(0, SPREAD)), 0)
        loaded, _ = gl.broadcast(loaded, every_warp)
        x = x + (gl.convert_layout(gl.reshape(loaded, (NUM_WARPS, 8, 4, 4)), lanes(NUM_WARPS)),)
    return x


@gluon.jit
def _chunk_columns(number, LAYOUT: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Columns [8 positions, 1, 32] of the input at the positions 8 * number and up of the shared area, and which of them there are."""
    place = number * 8 + here(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[:, None, None]
    unit = place // DEPTH_WARPS
    block = ((unit // NUM_BLOCKS) * DEPTH_WARPS + place % DEPTH_WARPS) * NUM_BLOCKS + unit % NUM_BLOCKS
    k = block * 32 + gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]   # not hidden by `here`: loads are 16 bytes wide
    return k, (block < DEPTH // 32) & (k >= 0)


@gluon.jit
def _chunk_of(x_ptr, live_g, k, inside, LAYOUT: gl.constexpr, DEPTH: gl.constexpr):
    """The residual in those columns, fp32 [8 positions, 8, 32]."""
    g = here(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))))[None, :, None]
    return gl.load(x_ptr + g * DEPTH + k, mask=live_g[None, :, None] & inside, other=0.0, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def load_norm(x_ptr, norm_ptr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr, SLICES: gl.constexpr, PART: gl.constexpr,
              PARTITIONS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The norm's weights that this consumer multiplies with. They depend on nothing: to be read before the wait for the residual at x_ptr."""
    LAYOUT: gl.constexpr = chunk(x_ptr.dtype.element_ty, NUM_WARPS)
    weights = ()
    for i in gl.static_range(((SLICES * NUM_BLOCKS * DEPTH_WARPS + 7) // 8 - PART + PARTITIONS - 1) // PARTITIONS):
        k, inside = _chunk_columns(i * PARTITIONS + PART, LAYOUT, DEPTH, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
        weights = weights + (gl.load(norm_ptr + k, mask=inside, other=0.0),)
    return weights


@gluon.jit
def normalize(x_ptr, weights, live, x_area, squares, met, turn, EPS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
              SLICES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, NUM_WARPS: gl.constexpr, copy_ptr=None):
    """bf16(x * rsqrt(mean(x**2) + EPS) * weight) of the residual [8, DEPTH] into `x_area`, for both consumers. Returns the turn.

    weights: of `load_norm`. squares: fp32 [PARTITIONS * NUM_WARPS * 8] of shared memory. Behind whatever makes the residual visible.
    copy_ptr: if given, program i also writes its chunk i of what it left there to bf16 [8, DEPTH], so that the first programs together write it all.
    """
    LAYOUT: gl.constexpr = chunk(x_ptr.dtype.element_ty, NUM_WARPS)
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    ALL: gl.constexpr = (SLICES * NUM_BLOCKS * DEPTH_WARPS + 7) // 8
    CHUNKS: gl.constexpr = (ALL - PART + PARTITIONS - 1) // PARTITIONS
    HELD: gl.constexpr = CHUNKS if CHUNKS <= _MOST_HELD else _HELD_OF_MORE
    live_g = (live >> here(gl.arange(0, 8, COLUMN))) & 1 != 0
    sums = gl.zeros((NUM_WARPS, 8, 32), gl.float32, LAYOUT)
    held = ()
    for i in gl.static_range(CHUNKS):
        k, inside = _chunk_columns(i * PARTITIONS + PART, LAYOUT, DEPTH, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
        values = _chunk_of(x_ptr, live_g, k, inside, LAYOUT, DEPTH)
        sums += values * values
        if i < HELD:
            held = held + (values,)
    squares._reinterpret(gl.float32, [PARTITIONS, NUM_WARPS, 8], row_major(2)).index(PART).store(gl.sum(sums, 2))
    turn = meet(met, turn)
    rows = squares._reinterpret(gl.float32, [PARTITIONS * NUM_WARPS, 8], row_major(1))
    total = rows.index(0).load(COLUMN)
    for i in gl.static_range(1, PARTITIONS * NUM_WARPS):
        total += rows.index(i).load(COLUMN)
    factor = gl.rsqrt(total * (1.0 / DEPTH) + EPS)[None, :, None]
    chunks = x_area._reinterpret(gl.bfloat16, [ALL, NUM_WARPS, 8, 32], row_major(3))
    for i in gl.static_range(CHUNKS):
        if i < HELD:
            values = held[i]
        else:
            k, inside = _chunk_columns(i * PARTITIONS + PART, LAYOUT, DEPTH, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
            values = _chunk_of(x_ptr, live_g, k, inside, LAYOUT, DEPTH)
        rounded = (values * factor * weights[i].to(gl.float32)).to(gl.bfloat16)
        chunks.index(i * PARTITIONS + PART).store(rounded)
        if copy_ptr is not None:
            if program(NUM_WARPS) == i * PARTITIONS + PART:
                k, inside = _chunk_columns(i * PARTITIONS + PART, LAYOUT, DEPTH, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
                g = here(gl.arange(0, 8, COLUMN))[None, :, None]
                gl.store(copy_ptr + g * DEPTH + k, rounded, mask=live_g[None, :, None] & inside)
    return meet(met, turn)


# --- the consumer ---


@gluon.jit
def multiply_item(ring, full, empty, slot, phase, x, NUM_BLOCKS: gl.constexpr, STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    """A warp's sums of its row tile over its part of the input."""
    LANES: gl.constexpr = lanes(NUM_WARPS)
    sums = gl.zeros((NUM_WARPS, 8, 4, 4), gl.float32, LANES)
    ptx: gl.constexpr = _BLOCK_PTX
    constraints: gl.constexpr = _BLOCK_CONSTRAINTS
    for stage in gl.static_range(NUM_BLOCKS // STAGE_BLOCKS):
        mbarrier.wait(full.index(slot), phase)
        for i in gl.static_range(STAGE_BLOCKS):
            first = ring.index(slot * SLOT_UNITS + 2 * i)._reinterpret(gl.int32, [NUM_WARPS, 8, 4, 4], row_major(4)).load(LANES)
            second = ring.index(slot * SLOT_UNITS + 2 * i + 1)._reinterpret(gl.int32, [NUM_WARPS, 8, 4, 4], row_major(4)).load(LANES)
            sums = gl.inline_asm_elementwise(ptx, constraints, [first, second, x[stage * STAGE_BLOCKS + i], sums], dtype=gl.float32, is_pure=True, pack=4)
        release(empty, slot)
        slot, phase = advance(slot, phase, STAGES)
    return sums, slot, phase


@gluon.jit
def sum_over_warps(sums, exchange, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """[row warps, 128] fp32: element 16 * column + row of a tile; warps along the input are added in order."""
    ROW_WARPS: gl.constexpr = NUM_WARPS // DEPTH_WARPS
    # of a lane's four sums, (row g, g + 8) x (column 2t, 2t + 1), the column varies first
    by_column = gl.permute(gl.reshape(sums, (NUM_WARPS, 8, 4, 2, 2)), (0, 2, 4, 3, 1))
    exchange._reinterpret(gl.float32, [NUM_WARPS, 128], row_major(2)).store(gl.reshape(by_column, (NUM_WARPS, 128)))
    return gl.sum(exchange._reinterpret(gl.float32, [ROW_WARPS, DEPTH_WARPS, 128], row_major(3)).load(tiles_of(DEPTH_WARPS, NUM_WARPS)), 1)


@gluon.jit
def rows_of(live, group, ROWS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Offset in [8, ROWS] of each of the sums of `sum_over_warps`, and which of them live."""
    SUMS: gl.constexpr = gl.SliceLayout(1, tiles_of(DEPTH_WARPS, NUM_WARPS))
    tile = here(gl.arange(0, NUM_WARPS // DEPTH_WARPS, gl.SliceLayout(1, SUMS)))[:, None]
    element = here(gl.arange(0, 128, gl.SliceLayout(0, SUMS)))[None, :]
    row = (group * (NUM_WARPS // DEPTH_WARPS) + tile) * 16 + (element & 15)
    return (element >> 4) * ROWS + row, ((live >> (element >> 4)) & 1 != 0) & (row < ROWS)


@gluon.jit
def consume_dense(ring, full, empty, slot, phase, exchange, pair, met, turn, x_area, squares, x_ptr, norm, out_ptr, residual_ptr, live,
                  NORM: gl.constexpr, EPS: gl.constexpr, ADD: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr,
                  NUM_BLOCKS: gl.constexpr, PAIRS: gl.constexpr, SPLITS: gl.constexpr, STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr,
                  STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr, copy_ptr=None,
                  SPLIT_COLUMNS: gl.constexpr = 8):
    """The consumer's part of a dense phase. Returns the ring's position and the turn.

    live: bit g is set if column g has a token; the others are read as zeros and not written. x_ptr: with NORM the residual [8, DEPTH], fp32 or bf16, and
    `norm` is of `load_norm`; else pairs of bf16. out_ptr: fp32 or bf16 [SPLITS, 8, ROWS]; with ADD, which takes one split, what is at residual_ptr is
    added before the rounding. exchange: fp32 [NUM_WARPS * 128] of this consumer; pair: fp32 [2, row warps * 128], met, x_area and squares of both.
    Between two phases of a kernel both consumers must meet (a barrier over the grid does it), as either may still read what they share.
    copy_ptr: of `normalize`, which SMs without an item leave out. SPLIT_COLUMNS: columns of out_ptr, from one split to the next.
    """
    GROUPS: gl.constexpr = (ROWS + 16 * (NUM_WARPS // DEPTH_WARPS) - 1) // (16 * (NUM_WARPS // DEPTH_WARPS))
    POSITIONS: gl.constexpr = (SPLITS * PAIRS * NUM_BLOCKS * DEPTH_WARPS + 7) // 8 * 8
    HALF: gl.constexpr = PART if PAIRS == 2 else 0
    OWNER: gl.constexpr = PAIRS == 1 or PART == 0     # of a pair the first consumer adds and stores
    SUMS: gl.constexpr = gl.SliceLayout(1, tiles_of(DEPTH_WARPS, NUM_WARPS))
    if NORM:
        # both consumers of an SM decide alike: they meet in it
        sm_first, sm_last = item_range(SPLITS * GROUPS, 2, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
        needed = sm_first < sm_last
        if copy_ptr is not None:
            needed = needed | (program(NUM_WARPS) < POSITIONS // 8)
        if needed:
            turn = normalize(x_ptr, norm, live, x_area, squares, met, turn, EPS, DEPTH, DEPTH_WARPS, NUM_BLOCKS, SPLITS * PAIRS, PART, PARTITIONS, NUM_WARPS,
                             copy_ptr)
    first, last = item_range(SPLITS * GROUPS, PAIRS, PART, PARTITIONS, PROGRAMS, NUM_WARPS)
    pairs = pair._reinterpret(gl.float32, [2, NUM_WARPS // DEPTH_WARPS, 128], row_major(2))
    for split in range(first // GROUPS, (last + GROUPS - 1) // GROUPS):
        if NORM:
            x = read_fragments(x_area, split * PAIRS + HALF, POSITIONS, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
        else:
            live_g = (live >> columns_of(NUM_WARPS)) & 1 != 0
            x = load_fragments(x_ptr, live_g, split * PAIRS + HALF, DEPTH, DEPTH_WARPS, NUM_BLOCKS, NUM_WARPS)
        for item in range(gl.maximum(first, split * GROUPS), gl.minimum(last, (split + 1) * GROUPS)):
            if OWNER:
                offset, mask = rows_of(live, item - split * GROUPS, ROWS, DEPTH_WARPS, NUM_WARPS)
            if OWNER and ADD:   # asked for before the weights, so that it is there when the sums are
                before = gl.load(residual_ptr + offset, mask=mask, other=0.0, cache_modifier=".cg")
            sums, slot, phase = multiply_item(ring, full, empty, slot, phase, x, NUM_BLOCKS, STAGE_BLOCKS, SLOT_UNITS, STAGES, NUM_WARPS)
            values = sum_over_warps(sums, exchange, DEPTH_WARPS, NUM_WARPS)
            if PAIRS == 2:
                # Two buffers and one meeting an item: the one before has been read when the next but one is written.
                if PART == 1:
                    pairs.index(item & 1).store(values)
                turn = meet(met, turn)
                if PART == 0:
                    values += pairs.index(item & 1).load(SUMS)
            if OWNER and ADD:
                values = before.to(gl.float32) + values
            if OWNER:
                gl.store(out_ptr + split * (SPLIT_COLUMNS * ROWS) + offset, values.to(out_ptr.dtype.element_ty), mask=mask)
    return slot, phase, turn


# --- a launch of one phase ---


@gluon.jit
def _consumer(ring, full, empty, exchange, pair, met, x_area, squares, x_ptr, norm_ptr, out_ptr, residual_ptr, live_ptr, NORM: gl.constexpr,
              EPS: gl.constexpr, ADD: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr,
              PAIRS: gl.constexpr, SPLITS: gl.constexpr, STAGE_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PROGRAMS: gl.constexpr,
              NUM_WARPS: gl.constexpr):
    norm = ()
    if NORM:
        norm = load_norm(x_ptr, norm_ptr, DEPTH, DEPTH_WARPS, NUM_BLOCKS, SPLITS * PAIRS, PART, 2, NUM_WARPS)
    consume_dense(ring, full, empty, gl.to_tensor(0), gl.to_tensor(0), exchange, pair, met, gl.to_tensor(0), x_area, squares, x_ptr, norm, out_ptr,
                  residual_ptr, gl.load(live_ptr), NORM, EPS, ADD, ROWS, DEPTH, DEPTH_WARPS, NUM_BLOCKS, PAIRS, SPLITS, STAGE_BLOCKS, 2 * STAGE_BLOCKS,
                  STAGES, PART, 2, PROGRAMS, NUM_WARPS)


@gluon.jit
def _producer(desc, ring, full, empty, first_unit, ITEMS: gl.constexpr, PAIRS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGE_BLOCKS: gl.constexpr,
              STAGES: gl.constexpr, PART: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    stream_dense(desc, ring, full, empty, gl.to_tensor(0), gl.to_tensor(1), first_unit, ITEMS, PAIRS, NUM_BLOCKS, STAGE_BLOCKS, 2 * STAGE_BLOCKS, STAGES,
                 PART, 2, PROGRAMS, NUM_WARPS)


@gluon.jit
def make_dense_ring(desc, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One consumer's slots, their two barriers each, and the exchange of its warps' sums."""
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * SLOT_UNITS, NUM_WARPS // 2, CODE_BOX], desc.layout)
    exchange = gl.allocate_shared_memory(gl.float32, [NUM_WARPS * 128], row_major(1))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    return ring, full, empty, exchange


@gluon.jit
def make_shared_area(POSITIONS: gl.constexpr, PAIR_TILES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """What the two consumers of an SM share: a pair's sums of PAIR_TILES row tiles, the meeting, normalized activations (POSITIONS blocks), sums of squares."""
    pair = gl.allocate_shared_memory(gl.float32, [2 * PAIR_TILES * 128], row_major(1))
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(met, count=2)
    x_area = gl.allocate_shared_memory(gl.int32, [POSITIONS * 128], row_major(1))
    squares = gl.allocate_shared_memory(gl.float32, [2 * NUM_WARPS * 8], row_major(1))
    return pair, met, x_area, squares


@gluon.jit(do_not_specialize=["first_unit"])
def dense_kernel(desc, x_ptr, norm_ptr, out_ptr, residual_ptr, live_ptr, first_unit, NORM: gl.constexpr, EPS: gl.constexpr, ADD: gl.constexpr,
                 ROWS: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_BLOCKS: gl.constexpr, PAIRS: gl.constexpr, SPLITS: gl.constexpr,
                 STAGE_BLOCKS: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One dense phase as a launch of its own."""
    GROUP_ROWS: gl.constexpr = 16 * (NUM_WARPS // DEPTH_WARPS)
    ITEMS: gl.constexpr = SPLITS * ((ROWS + GROUP_ROWS - 1) // GROUP_ROWS)
    ring, full, empty, exchange = make_dense_ring(desc, 2 * STAGE_BLOCKS, STAGES, NUM_WARPS)
    ring_1, full_1, empty_1, exchange_1 = make_dense_ring(desc, 2 * STAGE_BLOCKS, STAGES, NUM_WARPS)
    pair, met, x_area, squares = make_shared_area((SPLITS * PAIRS * NUM_BLOCKS * DEPTH_WARPS + 7) // 8 * 8 if NORM else 8,
                                                 NUM_WARPS // DEPTH_WARPS, NUM_WARPS)
    gl.warp_specialize([
        (_consumer, (ring, full, empty, exchange, pair, met, x_area, squares, x_ptr, norm_ptr, out_ptr, residual_ptr, live_ptr, NORM, EPS, ADD, ROWS, DEPTH,
                     DEPTH_WARPS, NUM_BLOCKS, PAIRS, SPLITS, STAGE_BLOCKS, STAGES, 0, PROGRAMS, NUM_WARPS)),
        (_consumer, (ring_1, full_1, empty_1, exchange_1, pair, met, x_area, squares, x_ptr, norm_ptr, out_ptr, residual_ptr, live_ptr, NORM, EPS, ADD, ROWS,
                     DEPTH, DEPTH_WARPS, NUM_BLOCKS, PAIRS, SPLITS, STAGE_BLOCKS, STAGES, 1, PROGRAMS, NUM_WARPS)),
        (_producer, (desc, ring, full, empty, first_unit, ITEMS, PAIRS, NUM_BLOCKS, STAGE_BLOCKS, STAGES, 0, PROGRAMS, NUM_WARPS)),
        (_producer, (desc, ring_1, full_1, empty_1, first_unit, ITEMS, PAIRS, NUM_BLOCKS, STAGE_BLOCKS, STAGES, 1, PROGRAMS, NUM_WARPS)),
    ], [NUM_WARPS, 1, 1], [112, 24, 24])
