# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""All dense products of a step in one piece of code: what dense_device.py unrolls for each matrix is a loop here, and which matrix it is a number.

A step walks through more code than an SM's instruction cache holds, layer after layer, so code costs time. Here queries, keys and values, the output
projection, the router and the head share everything: a stage's MMAs, the sum over the warps, the epilogue. All eight warps lie along the input, an item is
a row tile of 16 rows of one split, and a consumer shares nothing with another, so that an SM may hold two programs of one consumer as well as one of two.

    activations   in shared memory, STAGE_BLOCKS chunks of eight blocks for every stage of weights, each warp's block in its own order
    normed        bf16(x * factor * norm) of the split's part of the residual. The sums of squares are there already, in parts: whoever writes the residual
                  leaves them (`rows` of 16 by the output projection, blocks of 256 by the others), so a consumer reads only the part that it multiplies
    mixed values  copied as they are, in pieces of half the area, two ahead of the products; of a draft's, its activated channels and the target's
                  features as well

A draft's gate and up lie in the same row tile, eight rows each (`ACTIVATES`), so that whoever has the sums of both stores silu(gate) * up in bf16.

Order of a sum: blocks of a warp, then warps, then splits, which whoever reads them adds. Of squares: parts in order of a fixed tree. No other column matters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from ..moe.device import sigmoid
from ..moe.stream import advance, cta_barrier, here, hidden, lanes, program, release, row_major
from .dense_device import _BLOCK_CONSTRAINTS, _BLOCK_PTX, sum_over_warps, tiles_of
from .fragments import UNIT_BYTES

_UNIT_BYTES = gl.constexpr(UNIT_BYTES)
_AT_ONCE = gl.constexpr(2)      # chunks of the residual that are on their way at once


@gluon.jit
def deal(items, WARPS: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr):
    """A consumer's share of items, contiguous and as even as it goes. Few items go to the first consumers of the first programs, which lie on different SMs."""
    number = PART * PROGRAMS + program(WARPS)
    spread = gl.maximum(items, PARTITIONS * PROGRAMS)
    return gl.minimum(spread * number // (PARTITIONS * PROGRAMS), items), gl.minimum(spread * (number + 1) // (PARTITIONS * PROGRAMS), items)


@gluon.jit
def share_of(groups, splits, WARPS: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr):
    """A consumer's items of a matrix, first and behind the last, and their splits."""
    first, last = deal(splits * groups, WARPS, PART, PARTITIONS, PROGRAMS)
    return first, last, first // groups, (last + groups - 1) // groups


@gluon.jit
def stream_rolled(desc, ring, full, empty, slot, phase, first_unit, ITEMS: gl.constexpr, NUM_BLOCKS: gl.constexpr, STAGE_BLOCKS: gl.constexpr,
                  SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr,
                  NUM_WARPS: gl.constexpr):
    """The producer's part: every stage of its consumer into the next free slot. Returns the ring's position. first_unit: where the matrix begins."""
    first, last = deal(gl.to_tensor(ITEMS), 1, PART, PARTITIONS, PROGRAMS)
    for stage in range(first * (NUM_BLOCKS // STAGE_BLOCKS), last * (NUM_BLOCKS // STAGE_BLOCKS)):
        unit = first_unit + stage * (2 * STAGE_BLOCKS)
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), 2 * STAGE_BLOCKS * _UNIT_BYTES)
        for i in gl.static_range(2 * STAGE_BLOCKS):
            tma.async_copy_global_to_shared(desc, [(unit + i) * (NUM_WARPS // 2), 0], full.index(slot), ring.index(slot * SLOT_UNITS + i))
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


# --- activations ---


@gluon.constexpr_function
def chunks_of(width, num_warps):
    """[chunk, warp, column of the batch, 32 columns of the input], `width` of them a lane. Of several chunks at once: between two operations on what may be
    the same memory the compiler puts a barrier."""
    return gl.BlockedLayout([1, 1, 1, width], [1, 1, width, 32 // width], [1, num_warps, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _column(LAYOUT: gl.constexpr):
    return here(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))))[None, None, :, None]


@gluon.jit
def _warps_first(split, num_blocks, LAYOUT: gl.constexpr, NUM_WARPS: gl.constexpr):
    """[1, warp, 1, 1]: a warp's first block of a split."""
    warp = here(gl.arange(0, NUM_WARPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))))
    return (split * NUM_WARPS + warp[None, :, None, None]) * num_blocks


@gluon.jit
def _width(LAYOUT: gl.constexpr):
    return gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]   # accesses are as wide as they can be


@gluon.jit
def _numbers(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]


@gluon.jit
def load_weights(norm_ptr, split, num_blocks, i, DEPTH: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The norm's weights for chunks i and on of a split, as many as are read at once."""
    LAYOUT: gl.constexpr = chunks_of(4, NUM_WARPS)
    of_warp = i + _numbers(_AT_ONCE, LAYOUT)
    block = _warps_first(split, num_blocks, LAYOUT, NUM_WARPS) + of_warp
    return gl.load(norm_ptr + (block * 32 + _width(LAYOUT)), mask=(of_warp < num_blocks) & (block < DEPTH // 32), other=0.0)


@gluon.jit
def _factor(squares_ptr, num_squares, live, eps, DEPTH: gl.constexpr, SQUARES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """1 / root mean square of every column, in the layout of a chunk's columns."""
    PARTS: gl.constexpr = gl.BlockedLayout([1, SQUARES // 32], [1, 32], [NUM_WARPS, 1], [1, 0])
    g = here(gl.arange(0, 8, gl.SliceLayout(1, PARTS)))
    i = here(gl.arange(0, SQUARES, gl.SliceLayout(0, PARTS)))[None, :]
    mask = ((live >> g) & 1 != 0)[:, None] & (i < num_squares)
    total = gl.sum(gl.load(squares_ptr + g[:, None] * SQUARES + i, mask=mask, other=0.0, cache_modifier=".cg"), 1)
    total = gl.convert_layout(total, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, chunks_of(4, NUM_WARPS)))))
    return gl.rsqrt(total * (1.0 / DEPTH) + eps)[None, None, :, None]


@gluon.jit
def _load_residual(residual_ptr, live, split, num_blocks, i, DEPTH: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The residual in chunks i and on of a split, as many as are read at once."""
    LAYOUT: gl.constexpr = chunks_of(4, NUM_WARPS)
    g = _column(LAYOUT)
    of_warp = i + _numbers(_AT_ONCE, LAYOUT)
    block = _warps_first(split, num_blocks, LAYOUT, NUM_WARPS) + of_warp
    mask = ((live >> g) & 1 != 0) & (of_warp < num_blocks) & (block < DEPTH // 32)
    return gl.load(residual_ptr + (g * DEPTH + block * 32 + _width(LAYOUT)), mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _fill(x_area, residual_ptr, values, weights, norm_ptr, factor, copy_ptr, copies, live, split, num_blocks, DEPTH: gl.constexpr, CHUNKS: gl.constexpr,
          NUM_WARPS: gl.constexpr):
    """The normed activations of a split into shared memory; with `copies` also to bf16 [8, DEPTH] at copy_ptr. values, weights: of its first chunks."""
    LAYOUT: gl.constexpr = chunks_of(4, NUM_WARPS)
    chunks = x_area._reinterpret(gl.bfloat16, [CHUNKS // _AT_ONCE, _AT_ONCE, NUM_WARPS, 8, 32], row_major(4))
    g = _column(LAYOUT)
    for i in range(0, num_blocks, _AT_ONCE):
        following_values = _load_residual(residual_ptr, live, split, num_blocks, i + _AT_ONCE, DEPTH, NUM_WARPS)
        following = load_weights(norm_ptr, split, num_blocks, i + _AT_ONCE, DEPTH, NUM_WARPS)
        of_warp = i + _numbers(_AT_ONCE, LAYOUT)
        block = _warps_first(split, num_blocks, LAYOUT, NUM_WARPS) + of_warp
        mask = ((live >> g) & 1 != 0) & (of_warp < num_blocks) & (block < DEPTH // 32)
        rounded = (values * factor * weights.to(gl.float32)).to(gl.bfloat16)
        chunks.index(i // _AT_ONCE).store(rounded)
        gl.store(copy_ptr + (g * DEPTH + block * 32 + _width(LAYOUT)), rounded, mask=mask & (copies != 0))
        values = following_values
        weights = following


@gluon.jit
def _copy_piece(x_area, mixed_ptr, live, split, num_blocks, piece, place, there, depth, PIECE: gl.constexpr, CHUNKS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Begin to copy a piece of the mixed values of a split to half `place` of the area: a group of copies, of nothing unless `there`.

    A lane copies the 16 bytes that it reads itself.
    """
    AT_ONCE: gl.constexpr = PIECE & -PIECE      # a tensor's sizes are powers of two
    LAYOUT: gl.constexpr = chunks_of(8, NUM_WARPS)
    chunks = x_area._reinterpret(gl.bfloat16, [CHUNKS // AT_ONCE, AT_ONCE, NUM_WARPS, 8, 32], gl.SwizzledSharedLayout(8, 1, 1, [3, 2, 1, 0]))
    g = _column(LAYOUT)
    if there:
        for part in gl.static_range(PIECE // AT_ONCE):
            of_warp = piece * PIECE + part * AT_ONCE + _numbers(AT_ONCE, LAYOUT)
            block = _warps_first(split, num_blocks, LAYOUT, NUM_WARPS) + of_warp
            mask = ((live >> g) & 1 != 0) & (of_warp < num_blocks) & (block < depth // 32)
            async_copy.async_copy_global_to_shared(chunks.index(place * (PIECE // AT_ONCE) + part), mixed_ptr + (g * depth + block * 32 + _width(LAYOUT)),
                                                   mask=mask)
    async_copy.commit_group()


# --- the consumer ---


@gluon.jit
def _multiply_stage(ring, slot, units, chunk_number, sums, STAGE_BLOCKS: gl.constexpr, SLOT_UNITS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Sums plus a stage, whose activations are chunks from chunk_number on."""
    LANES: gl.constexpr = lanes(NUM_WARPS)
    ptx: gl.constexpr = _BLOCK_PTX
    constraints: gl.constexpr = _BLOCK_CONSTRAINTS
    for i in gl.static_range(STAGE_BLOCKS):
        a = ring.index(slot * SLOT_UNITS + 2 * i)._reinterpret(gl.int32, [NUM_WARPS, 8, 4, 4], row_major(4)).load(LANES)
        b = ring.index(slot * SLOT_UNITS + 2 * i + 1)._reinterpret(gl.int32, [NUM_WARPS, 8, 4, 4], row_major(4)).load(LANES)
        x = units.index(chunk_number + i).load(LANES)
        sums = gl.inline_asm_elementwise(ptx, constraints, [a, b, x, sums], dtype=gl.float32, is_pure=True, pack=4)
    return sums


@gluon.jit
def _store_channels(exchange, channels_ptr, group, live, channels, NUM_WARPS: gl.constexpr):
    """silu(gate) * up of a row tile, whose sums of all warps are in `exchange`, to bf16 [8, channels]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([NUM_WARPS, 1, 2, 1], [1, 4, 1, 8], [1, NUM_WARPS, 1, 1], [3, 2, 1, 0])    # warp, column, gate or up, channel
    PAIRS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    sums = gl.sum(exchange._reinterpret(gl.float32, [NUM_WARPS, 8, 2, 8], row_major(4)).load(LAYOUT), 0)
    column = here(gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS))))[:, None, None]
    channel = group * 8 + here(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))))[None, None, :]
    both = here(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS))))[None, :, None] * 0
    inside = (((live >> column) & 1 != 0) & (channel < channels)).to(gl.int32)
    gate, up = gl.split(gl.permute(sums, (0, 2, 1)))
    offset, _ = gl.split(gl.permute(column * channels + channel + both, (0, 2, 1)))
    mask, _ = gl.split(gl.permute(inside + both, (0, 2, 1)))
    gl.store(channels_ptr + offset, (gate * sigmoid(gate) * up).to(gl.bfloat16), mask=mask != 0)


@gluon.jit
def consume_rolled(ring, full, empty, slot, phase, exchange, x_area, copied, adds, activates, residual_ptr, mixed_ptr, weights, norm_ptr, copy_ptr, copies,
                   out_ptr, channels_ptr, squares_ptr, num_squares, live, rows, groups, share, num_blocks, copied_depth, eps, C: gl.constexpr,
                   DEPTH: gl.constexpr, STAGE_BLOCKS: gl.constexpr, X_STAGES: gl.constexpr, SQUARES: gl.constexpr, SLOT_UNITS: gl.constexpr,
                   STAGES: gl.constexpr, ACTIVATES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The consumer's part of a product of eight columns. Returns the ring's position.

    copied: 1 for W . mixed, bf16 [8, copied_depth] as it is, of one split, whose rows' squares are left as parts; 0 for W . normed, of any number.
    adds: 1 where the product is added to the residual, of the rows' width. It goes to fp32 [splits, C, rows] at out_ptr; with `activates`, for which the
    code must have been built (ACTIVATES), silu(gate) * up of its rows to bf16 [8, rows / 2] at channels_ptr instead.
    weights: `load_weights` of the first split of this consumer. copies: whether what was normed goes to copy_ptr, by whoever has the first item of a split.
    rows, groups (row tiles), num_blocks (of a warp and split): of the matrix. share: of `share_of`. eps: of the norm.
    """
    LANES: gl.constexpr = lanes(NUM_WARPS)
    SUMS: gl.constexpr = gl.SliceLayout(1, tiles_of(NUM_WARPS, NUM_WARPS))
    SUMS_OF_TWO: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NUM_WARPS, 1], [1, 0])      # a warp has two columns: as SUMS
    CHUNKS: gl.constexpr = X_STAGES * STAGE_BLOCKS
    PIECE_STAGES: gl.constexpr = X_STAGES // 2
    element = here(gl.arange(0, 128, gl.SliceLayout(0, SUMS)))[None, :]
    of_item = num_blocks // STAGE_BLOCKS
    of_piece = of_item      # stages
    pieces = gl.to_tensor(1)
    if copied != 0:
        of_piece = gl.to_tensor(PIECE_STAGES)
        pieces = (of_item + (PIECE_STAGES - 1)) // PIECE_STAGES
    first, last, first_split, last_split = share
    units = x_area._reinterpret(gl.int32, [CHUNKS, NUM_WARPS, 8, 4, 4], row_major(4))
    for split in range(first_split, last_split):
        begin = gl.maximum(first, split * groups)
        end = gl.minimum(last, (split + 1) * groups)
        place = gl.to_tensor(0)
        ahead = gl.to_tensor(0)
        left = (end - begin) * pieces
        if copied != 0:
            cta_barrier()       # all warps are done with what was there
            for i in range(hidden(gl.to_tensor(2))):
                _copy_piece(x_area, mixed_ptr, live, split, num_blocks, ahead, i, left > 0, copied_depth, PIECE_STAGES * STAGE_BLOCKS, CHUNKS, NUM_WARPS)
                left -= 1
                ahead += 1
                if ahead == pieces:
                    ahead = 0
        else:
            if begin != first:
                weights = load_weights(norm_ptr, split, num_blocks, 0, DEPTH, NUM_WARPS)
            values = _load_residual(residual_ptr, live, split, num_blocks, 0, DEPTH, NUM_WARPS)
            # Likewise; and nothing of the squares may come before it, else the assembler adds them before it has asked for all of the residual.
            cta_barrier()
            factor = _factor(squares_ptr, num_squares, live, eps, DEPTH, SQUARES, NUM_WARPS)
            mine = copies
            if begin != split * groups:
                mine = copies * 0
            _fill(x_area, residual_ptr, values, weights, norm_ptr, factor, copy_ptr, mine, live, split, num_blocks, DEPTH, CHUNKS, NUM_WARPS)
        for item in range(begin, end):
            row = (item - split * groups) * 16 + (element & 15)
            offset = (element >> 4) * rows + row
            mask = ((live >> (element >> 4)) & 1 != 0) & (row < rows)
            before = gl.load(residual_ptr + offset, mask=mask & (adds != 0), other=0.0, cache_modifier=".cg")
            sums = gl.zeros((NUM_WARPS, 8, 4, 4), gl.float32, LANES)
            for piece in range(pieces):
                # The piece is there, copied or normed. The compiler does not know which branch follows which: without this barrier it puts one into
                # every stage.
                async_copy.wait_group(1)
                cta_barrier()
                for stage in range(gl.minimum(of_piece, of_item - piece * of_piece)):
                    mbarrier.wait(full.index(slot), phase)
                    sums = _multiply_stage(ring, slot, units, (place * PIECE_STAGES + stage) * STAGE_BLOCKS, sums, STAGE_BLOCKS, SLOT_UNITS, NUM_WARPS)
                    release(empty, slot)        # behind it all warps have read the stage
                    slot, phase = advance(slot, phase, STAGES)
                if copied != 0:
                    _copy_piece(x_area, mixed_ptr, live, split, num_blocks, ahead, place, left > 0, copied_depth, PIECE_STAGES * STAGE_BLOCKS, CHUNKS,
                                NUM_WARPS)
                    left -= 1
                    ahead += 1
                    if ahead == pieces:
                        ahead = 0
                    place ^= 1
            after = before + sum_over_warps(sums, exchange, NUM_WARPS, NUM_WARPS)
            if ACTIVATES:
                gl.store(out_ptr + split * (C * rows) + offset, after, mask=mask & (activates == 0))
                if activates != 0:
                    _store_channels(exchange, channels_ptr, item, live, rows >> 1, NUM_WARPS)
            else:
                gl.store(out_ptr + split * (C * rows) + offset, after, mask=mask)
            if copied != 0:
                kept = gl.where(mask, after, 0.0)
                parts = gl.sum(gl.convert_layout(gl.reshape(kept * kept, (8, 16)), SUMS_OF_TWO), 1)
                g = here(gl.arange(0, 8, gl.SliceLayout(1, SUMS_OF_TWO)))
                gl.store(squares_ptr + g * SQUARES + (item - split * groups), parts, mask=(live >> g) & 1 != 0)
    return slot, phase
