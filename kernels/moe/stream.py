# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: RUF005 (a tuple of tensors grows by +)
"""The device code that the expert products share: a ring of weight stages, and what a warp makes of one.

A producer warp copies stages (the units of `mx/layouts/mma_fragments.py` of GROUPS consecutive groups) into shared memory by TMA;
eight consumer warps multiply them with activations that they hold in registers. Bandwidth is the limit only while a product costs
few instructions: at most 17.5 SASS instructions an MMA keeps 97 % of an H200's read stream, 20 loses a tenth.

    unpack   A code's four bits in bits 15, 8:6 of a half word are the bf16 number code * 2**-126: a mask and a shift, no arithmetic.
             Only +-0.5 is subnormal there, which the tensor core honours. Activations are multiplied by 2**100 once (exact below
             2**28), so that products are normal fp32 numbers, and sums by 2**26 at the end: exact as well.
    scale    An MX block is 32 columns, two MMAs. Its sum is multiplied by the E8M0 scale in fp32: exact; only the additions round.
             The scale byte is the fp32 exponent field, so byte 0 means 0 and not 2**-127.
    order    Steps in order, then the warps along the input in order: a column's sum depends on nothing but its weights and its own
             activations.

One tensor element is one register: [warp, g, t, 4 words] in the layout below, with lane = 4g + t.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

UNSCALE = gl.constexpr(2.0**26)           # 2**126 of the codes / 2**100 of the activations
_PRESCALE_PAIR = gl.constexpr(0x71807180)  # bf16 2**100, twice
_TAGGED_PTX = gl.constexpr("{ .reg .pred p; .reg .b64 word; setp.ne.u32 p, $4, 0; mov.b64 word, {$2, $3}; @p st.relaxed.gpu.global.b64 [$1], word; "
                           "mov.u32 $0, 0; }")
CODE_BOX = gl.constexpr(256)              # words of a TMA row; a box is a unit: NUM_WARPS / 2 rows
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier   # its name from Triton 3.7 on, and before


def _step_ptx(scale_word: int) -> str:
    """PTX of one k64 step of a row tile: operands are 4 sums out, 4 code words, 4 scale words (one of them read), the B fragments of
    the step's two MX blocks (4 registers each), and 4 sums in."""
    sums, codes, scale, activations = ["$20", "$21", "$22", "$23"], [f"${4 + j}" for j in range(4)], f"${8 + scale_word}", [f"${12 + i}" for i in range(8)]
    lines = [".reg .b32 part, sign, a<4>;", ".reg .f32 zero, factor<4>, block<4>, sum<4>;", "mov.f32 zero, 0f00000000;"]
    for i, shifted in enumerate(("mov.b32 part, {s};", "shl.b32 part, {s}, 8;", "shl.b32 part, {s}, 16;", "shf.l.wrap.b32 part, {s}, {s}, 24;")):
        lines += [shifted.format(s=scale), "and.b32 part, part, 0x7F800000;", f"mov.b32 factor{i}, part;"]
    for block in range(2):
        for half in range(2):
            word, b = codes[2 * block + half], activations[4 * block + 2 * half:][:2]
            lines += [f"and.b32 a0, {word}, 0x81C081C0;",
                      f"shl.b32 part, {word}, 3;", "and.b32 a1, part, 0x81C081C0;"]
            # Left shifts run on the FMA pipe, which is idle; one right shift a word is enough.
            for register, (magnitude, sign) in (("a2", (f"shl.b32 part, {word}, 6;", 1)), ("a3", (f"shr.u32 part, {word}, 3;", 2))):
                lines += [magnitude, "and.b32 part, part, 0x01C001C0;", f"shl.b32 sign, {word}, {sign};", "and.b32 sign, sign, 0x80008000;",
                          f"or.b32 {register}, part, sign;"]
            start = "zero, zero, zero, zero" if half == 0 else "block0, block1, block2, block3"
            lines.append("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {block0, block1, block2, block3}, {a0, a1, a2, a3}, "
                         f"{{{b[0]}, {b[1]}}}, {{{start}}};")
        for i in range(4):   # sums 0 and 1 are row g's, 2 and 3 row g + 8's
            before, after = (sums[i], f"sum{i}") if block == 0 else (f"sum{i}", f"${i}")
            lines.append(f"fma.rn.f32 {after}, block{i}, factor{2 * block + i // 2}, {before};")
    return "{\n" + "\n".join(lines) + "\n}"


_STEP_0, _STEP_1, _STEP_2, _STEP_3 = (gl.constexpr(_step_ptx(j)) for j in range(4))
_STEP_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16 + ["f"] * 4))


@gluon.constexpr_function
def lanes(num_warps):
    """[warp, g, t, 4 words]: a lane's four words are four registers."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [num_warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def partials(num_warps, depth_warps):
    """[row tile, warp along the input, 128 sums]: a thread has all partial sums of two, rows g and g + 8 of a column; or, where one warp has the
    whole input, of the four that its registers hold anyway."""
    if depth_warps == 1:
        return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [num_warps, 1, 1], [2, 1, 0])
    return gl.BlockedLayout([1, depth_warps, 2], [1, 1, 32], [num_warps // 2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def pairs_of_scales(num_warps):
    """[warp, g, 2 words]: a lane has both words of its g."""
    return gl.DistributedLinearLayout(reg_bases=[[0, 0, 1]], lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                                      warp_bases=[[1 << i, 0, 0] for i in range(num_warps.bit_length() - 1)], block_bases=[], shape=[num_warps, 8, 2])


@gluon.constexpr_function
def row_major(rank):
    # Of a buffer that is indexed before it is read: one less than the buffer's own rank.
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def step(codes, scales, x_even, x_odd, sums, WORD: gl.constexpr):
    """Sums plus one k64 step."""
    ptx: gl.constexpr = _STEP_0 if WORD == 0 else (_STEP_1 if WORD == 1 else (_STEP_2 if WORD == 2 else _STEP_3))
    constraints: gl.constexpr = _STEP_CONSTRAINTS
    return gl.inline_asm_elementwise(ptx, constraints, [codes, scales, x_even, x_odd, sums], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def here(x):
    """x, computed where it is used: the compiler would do it before the partitions part, and keep it on the stack."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hidden(number):
    """number, where no compiler knows it: a loop of so many rounds stays one, and does not become their code one after the other."""
    return gl.inline_asm_elementwise("{ .reg .u32 none; mov.u32 none, %nctaid.x; shr.u32 none, none, 31; add.u32 $0, $1, none; }", "=r,r", [number],
                                     dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_tagged(words_ptr, values, tag, live):
    """Values with their tag to words of fp32 [..., 2], which `persistent/tagged.py` describes; one store each, where `live`."""
    ptx: gl.constexpr = _TAGGED_PTX
    gl.inline_asm_elementwise(ptx, "=r,l,r,r,r", [words_ptr.to(gl.int64, bitcast=True), values.to(gl.int32, bitcast=True), tag, live.to(gl.int32)],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_block(x_ptr, row_g, live_g, BLOCK: gl.constexpr, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """B fragment of MX block BLOCK of each warp's part of the input; zeros in dead columns and in the pad.

    x_ptr: bf16 pairs, row-major [rows, DEPTH / 2]. row_g: the row of column g, in the layout of axis g.
    """
    LANES: gl.constexpr = lanes(NUM_WARPS)
    Q: gl.constexpr = gl.SliceLayout(3, LANES)
    P: gl.constexpr = gl.SliceLayout(2, Q)
    warp = here(gl.arange(0, NUM_WARPS, gl.SliceLayout(1, P)))[:, None, None, None]
    t = here(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, Q))))[None, None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LANES))))[None, None, None, :]
    block = (warp % DEPTH_WARPS) * (2 * NUM_STEPS) + BLOCK
    offset = row_g[None, :, None, None] * (DEPTH // 2) + block * 16 + t * 4 + word
    mask = live_g[None, :, None, None] & (block < DEPTH // 32) & (word >= 0)
    return gl.load(x_ptr + offset, mask=mask, other=0, cache_modifier=".cg")


@gluon.jit
def _prescale(pairs):
    return gl.inline_asm_elementwise("mul.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, gl.full_like(pairs, _PRESCALE_PAIR)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def column_lanes(num_warps):
    """Of axis g."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, lanes(num_warps))))


@gluon.jit
def columns_of(NUM_WARPS: gl.constexpr):
    """0..7 in the layout of axis g."""
    return here(gl.arange(0, 8, column_lanes(NUM_WARPS)))


@gluon.jit
def load_words(x_ptr, row_g, live_g, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """For `activations`, when there is other work to do while they are on their way: even and odd MX blocks."""
    x_even = ()
    x_odd = ()
    for i in gl.static_range(NUM_STEPS):
        x_even = x_even + (load_block(x_ptr, row_g, live_g, 2 * i, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS),)
        x_odd = x_odd + (load_block(x_ptr, row_g, live_g, 2 * i + 1, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS),)
    return x_even, x_odd


@gluon.jit
def activations(even, odd, NUM_STEPS: gl.constexpr):
    """The B fragments of all steps, times 2**100, from `load_words`."""
    x_even = ()
    x_odd = ()
    for i in gl.static_range(NUM_STEPS):
        x_even = x_even + (_prescale(even[i]),)
        x_odd = x_odd + (_prescale(odd[i]),)
    return x_even, x_odd


@gluon.jit
def load_activations(x_ptr, row_g, live_g, DEPTH: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    even, odd = load_words(x_ptr, row_g, live_g, DEPTH, DEPTH_WARPS, NUM_STEPS, NUM_WARPS)
    return activations(even, odd, NUM_STEPS)


@gluon.jit
def multiply(ring, scale_ring, slot, x_even, x_odd, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr,
             GROUPS: gl.constexpr, NUM_STEPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One stage: GROUPS accumulators, each the sums of a row tile a warp over that warp's part of the input.

    SLOT_UNITS: units that a slot of the ring holds, which two products may share; the scale ring is this product's own.
    """
    LANES: gl.constexpr = lanes(NUM_WARPS)
    WORDS: gl.constexpr = 4 if NUM_STEPS % 4 == 0 else (2 if NUM_STEPS % 2 == 0 else 1)   # steps whose scales are loaded at once
    PAIR: gl.constexpr = pairs_of_scales(NUM_WARPS)
    results = ()
    sums = gl.zeros((NUM_WARPS, 8, 4, 4), gl.float32, LANES)
    scales = gl.zeros((NUM_WARPS, 8, 4, 4), gl.int32, LANES)
    second = scales
    for unit in gl.static_range(GROUPS * NUM_STEPS):
        if unit % WORDS == 0:
            if WORDS == 1:
                one = scale_ring._reinterpret(gl.int32, [STAGES * GROUPS * NUM_STEPS, NUM_WARPS, 8], row_major(2))
                loaded = one.index(slot * (GROUPS * NUM_STEPS) + unit).load(gl.SliceLayout(2, gl.SliceLayout(3, LANES)))
                scales, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(loaded, 2), 3), scales)
            elif WORDS == 2:   # the words of both steps twice: a step reads one of its four operands
                two = scale_ring._reinterpret(gl.int32, [STAGES * GROUPS * NUM_STEPS // 2, NUM_WARPS, 8, 2], row_major(3))
                loaded = two.index(slot * (GROUPS * NUM_STEPS // 2) + unit // 2).load(PAIR)
                first, second = gl.split(loaded)
                first, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(gl.convert_layout(first, gl.SliceLayout(2, gl.SliceLayout(3, LANES))), 2), 3), scales)
                second, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(gl.convert_layout(second, gl.SliceLayout(2, gl.SliceLayout(3, LANES))), 2), 3), scales)
                scales = first
            else:
                four = scale_ring._reinterpret(gl.int32, [STAGES * GROUPS * NUM_STEPS // 4, NUM_WARPS, 8, 4], row_major(3))
                loaded = four.index(slot * (GROUPS * NUM_STEPS // 4) + unit // 4).load(gl.SliceLayout(2, LANES))
                scales, _ = gl.broadcast(gl.expand_dims(loaded, 2), scales)
        elif WORDS == 2:
            scales = second
        codes = ring.index(slot * SLOT_UNITS + unit)._reinterpret(gl.int32, [NUM_WARPS, 8, 4, 4], row_major(4)).load(LANES)
        sums = step(codes, scales, x_even[unit % NUM_STEPS], x_odd[unit % NUM_STEPS], sums, unit % 4 if WORDS == 4 else 0)
        if unit % NUM_STEPS == NUM_STEPS - 1:
            results = results + (sums,)
            sums = gl.zeros((NUM_WARPS, 8, 4, 4), gl.float32, LANES)
    return results


@gluon.jit
def _stack(parts, COUNT: gl.constexpr, NUM_WARPS: gl.constexpr):
    """COUNT accumulators as [COUNT, NUM_WARPS, 128], in registers; of a lane's four sums (row g, g + 8) x (column 2t, 2t + 1) the row varies first."""
    if COUNT == 1:
        stacked = gl.reshape(parts[0], (1, NUM_WARPS, 32, 2, 2))
    elif COUNT == 2:
        stacked = gl.reshape(gl.permute(gl.join(parts[0], parts[1]), (4, 0, 1, 2, 3)), (2, NUM_WARPS, 32, 2, 2))
    else:
        gl.static_assert(COUNT == 4, "1, 2 or 4 groups are summed at once")
        pairs = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
        stacked = gl.reshape(gl.permute(pairs, (5, 4, 0, 1, 2, 3)), (4, NUM_WARPS, 32, 2, 2))
    return gl.reshape(gl.permute(stacked, (0, 1, 2, 4, 3)), (COUNT, NUM_WARPS, 128))


@gluon.jit
def sum_over_warps(parts, exchange, GROUPS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """[row tiles, 128] fp32: element 4 * lane + c is row g + 8 * (c % 2), column 2t + c / 2 of a tile; warps are added in order."""
    ROW_WARPS: gl.constexpr = NUM_WARPS // DEPTH_WARPS
    sums = _stack(parts, GROUPS, NUM_WARPS)
    if DEPTH_WARPS == 1:   # nothing to add, and every lane has its four already
        return gl.sum(gl.convert_layout(gl.reshape(sums, (GROUPS * ROW_WARPS, 1, 128)), partials(NUM_WARPS, 1)), 1) * UNSCALE
    else:
        exchange._reinterpret(gl.float32, [GROUPS, NUM_WARPS, 128], row_major(3)).store(sums)
        shared = exchange._reinterpret(gl.float32, [GROUPS * ROW_WARPS, DEPTH_WARPS, 128], row_major(3))
        return gl.sum(shared.load(partials(NUM_WARPS, DEPTH_WARPS)), 1) * UNSCALE


@gluon.jit
def keep_sums(sums, exchange, part, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """One accumulator as part number `part` of PARTS that `kept_sums` adds, behind a barrier."""
    exchange._reinterpret(gl.float32, [PARTS, NUM_WARPS, 128], row_major(2)).index(part).store(gl.reshape(_stack((sums,), 1, NUM_WARPS), (NUM_WARPS, 128)))


@gluon.jit
def kept_sums(exchange, PARTS: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """What `sum_over_warps` returns of the same parts; of parts that were not kept, anything."""
    shared = exchange._reinterpret(gl.float32, [PARTS * (NUM_WARPS // DEPTH_WARPS), DEPTH_WARPS, 128], row_major(3))
    return gl.sum(shared.load(partials(NUM_WARPS, DEPTH_WARPS)), 1) * UNSCALE


@gluon.jit
def result_coordinates(ROW_TILES: gl.constexpr, DEPTH_WARPS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Row (of the stages) and column of the elements that `sum_over_warps` returns: [row tiles, 128] and [1, 128]."""
    SUMS: gl.constexpr = gl.SliceLayout(1, partials(NUM_WARPS, DEPTH_WARPS))
    tile = here(gl.arange(0, ROW_TILES, gl.SliceLayout(1, SUMS)))[:, None]
    element = here(gl.arange(0, 128, gl.SliceLayout(0, SUMS)))[None, :]
    return tile * 16 + (element >> 4) + 8 * (element & 1), ((element >> 2) & 3) * 2 + ((element >> 1) & 1)


@gluon.jit
def program(WARPS: gl.constexpr):
    """This program's number; read where it is used, as the compiler would keep it in a register, on the stack if need be, from the start."""
    zero = gl.zeros((1,), gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.sum(gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def stamp_time(stamps_ptr, WARPS: gl.constexpr):
    """The time in ns, by program 0, where this is."""
    if program(WARPS) == 0:
        i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [i], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(stamps_ptr + i, now, mask=i == 0)


@gluon.jit
def stage_range(num_tiles, TILE_STAGES: gl.constexpr, PART: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    """The share of a program's partition of the stages, column tiles outermost: contiguous, as even as it goes."""
    stages = num_tiles * TILE_STAGES
    number = program(WARPS) * PARTITIONS + PART
    return stages * number // (PROGRAMS * PARTITIONS), stages * (number + 1) // (PROGRAMS * PARTITIONS)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def release(empty, slot):
    """Gives a slot back to the producer, behind every warp's reads of it.

    The fence orders the reads before what TMA writes next. A barrier alone orders them before ordinary writes: the assembler lets the
    last loads of a stage be under way across it and across the arrival.
    """
    fence_async_shared()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _ends_of(experts, WARPS: gl.constexpr):
    return experts.load(gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0]))


@gluon.jit
def tiles_of_ends(experts, WARPS: gl.constexpr):
    """How many column tiles there are, for every warp; experts: as in `expert_of`, in shared memory."""
    return gl.max(gl.max(_ends_of(experts, WARPS), 1), 0)


@gluon.jit
def expert_of(experts, tile):
    """The expert of a column tile, for a warp: from a list in memory, or, in shared memory [1, experts], from where the tiles of each expert end."""
    if isinstance(experts, gl.shared_memory_descriptor):
        return gl.max(gl.sum((_ends_of(experts, 1) <= tile).to(gl.int32), 1), 0)
    else:
        return gl.load(experts + tile)


@gluon.jit
def stream_weights(codes_desc, scales_desc, ring, scale_ring, full, empty, slot, phase, experts_ptr, first_expert, num_tiles, TILE_STAGES: gl.constexpr,
                   UNITS: gl.constexpr, SLOT_UNITS: gl.constexpr, SCALE_BOX: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
                   PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The producer's part of one product: every stage of its partition into the next free slot. experts_ptr: as in `expert_of`."""
    BOXES: gl.constexpr = UNITS * NUM_WARPS * 8 // SCALE_BOX
    first, last = stage_range(num_tiles, TILE_STAGES, PART, PARTITIONS, PROGRAMS, 1)
    for tile in range(first // TILE_STAGES, (last + TILE_STAGES - 1) // TILE_STAGES):
        expert_stage = (first_expert + expert_of(experts_ptr, tile)) * TILE_STAGES
        for i in range(gl.maximum(first - tile * TILE_STAGES, 0), gl.minimum(last - tile * TILE_STAGES, TILE_STAGES)):
            stage = expert_stage + i
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), UNITS * NUM_WARPS * 544)   # 512 bytes of codes and 32 of scales a warp
            for unit in gl.static_range(UNITS):
                tma.async_copy_global_to_shared(codes_desc, [(stage * UNITS + unit) * (NUM_WARPS // 2), 0], full.index(slot),
                                                ring.index(slot * SLOT_UNITS + unit))
            for box in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(scales_desc, [stage * BOXES + box, 0], full.index(slot), scale_ring.index(slot * BOXES + box))
            slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def make_ring(codes_desc, SLOT_UNITS: gl.constexpr, STAGES: gl.constexpr, EXCHANGE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Shared memory of a ring: code slots, the exchange of partial sums (EXCHANGE floats), and the two barriers of each slot."""
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * SLOT_UNITS, NUM_WARPS // 2, CODE_BOX], codes_desc.layout)
    exchange = gl.allocate_shared_memory(gl.float32, [EXCHANGE], row_major(1))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    return ring, exchange, full, empty


@gluon.jit
def make_scale_ring(scales_desc, UNITS: gl.constexpr, SCALE_BOX: gl.constexpr, STAGES: gl.constexpr, NUM_WARPS: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [STAGES * (UNITS * NUM_WARPS * 8 // SCALE_BOX), 1, SCALE_BOX], scales_desc.layout)

