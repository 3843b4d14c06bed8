# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,attr-defined"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""The device code of a whole step: the phases of step_phases.py in one resident kernel, or each in a launch of its own.

Resident, a program has two consumers of eight warps and a producer for each. The consumers walk through the phases; seven times a layer all programs
wait for each other:

    qkv | attention | out | router | choice, gate and up | down | add

A norm needs the whole residual, a choice all logits, and out every head's mixed values, so those are boundaries. Before down and before the sum of its
partials lie the other two: a sum by whoever comes last, counted by atomics, was slower than a barrier in the expert layer. The choice of experts is
made by every consumer for itself from the logits, into a list that only it and its producer read, which saves an eighth. What was not joined: the
router's logits to out, as the one who comes last would stream the whole router alone, 0.5 MB on one SM; and the sum of partials to the norm before qkv,
as every SM would read all of them, 72 KB a column of Qwen3-30B-A3B, which takes as long as the boundary.

The producers wait for no barrier. They copy the weights of layer after layer into the ring, as the consumers free its slots: while consumers meet, and
while attention runs, the ring fills with the next phase. Only the experts of a layer are not known in advance: there, and before a step that may not
come, a producer waits for its own consumer (`go`), who waits in turn until the producer has taken the last such signal (`done`), as a consumer without any
weights to wait for would otherwise run two signals ahead.

Who agrees on what: the number of stages of a dense phase is a function of program and partition; that of the experts follows from the list, which consumer
and producer read from the same memory; whether there is another step is decided by one consumer of an SM for all four. So a fault (a barrier that was
given up) leads to wrong results, never to a producer and a consumer that wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..moe.stream import make_ring, make_scale_ring, program, row_major, stream_weights
from .attention_device import fetch_first_keys, operand
from .barrier import step_barrier
from .dense_device import load_norm, meet, stream_dense
from .fragments import NUM_WARPS
from .plan import CHUNK
from .step_code import LAYER_STAMPS
from .step_phases import (
    add_phase,
    attention_buffers,
    attention_phase,
    down_phase,
    embed_phase,
    finish_phase,
    gate_up_phase,
    head_phase,
    live_of,
    out_phase,
    program_list,
    qkv_phase,
    router_phase,
    sample_phase,
)

_WARPS = gl.constexpr(NUM_WARPS)
_CHUNK = gl.constexpr(CHUNK)
_STAMPS = gl.constexpr(LAYER_STAMPS)


@gluon.jit
def _stamp(p, place, S: gl.constexpr, PART: gl.constexpr):
    """When program 0 is past a barrier, in ns."""
    if S.PROFILE and PART == 0:
        if program(_WARPS) == 0:
            i = gl.arange(0, 32, gl.BlockedLayout([1], [32], [_WARPS], [0]))
            now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [i], dtype=gl.int64, is_pure=False, pack=1)
            gl.store(p.stamps + place + i, now, mask=i == 0)


@gluon.jit
def _wait_for_all(p, polls, place, S: gl.constexpr, PART: gl.constexpr):
    step_barrier(p.barrier, p.fault, polls, PART, 2, S.PROGRAMS, _WARPS)
    _stamp(p, place, S, PART)


@gluon.jit
def _another_step(word, met, turn, p, step, num_steps, PART: gl.constexpr):
    """Whether there is one after this, for both consumers and (behind `go`) both producers of an SM: consumer 0 decides. Returns it and the turn."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    if PART == 0:
        i = gl.arange(0, 32, LANES)
        ends = gl.load(p.stop + i * 0, cache_modifier=".cg") | gl.load(p.fault + i * 0, cache_modifier=".cg")
        word.store(((ends == 0) & (step + 1 + i * 0 < num_steps)).to(gl.int32))
    turn = meet(met, turn)
    return gl.max(word.load(LANES), 0), turn


@gluon.jit
def _ask(go, done, asked):
    """Let the producer go on, once it has taken the signal before this one."""
    mbarrier.wait(done, (asked & 1) ^ 1)
    mbarrier.arrive(go, count=1)
    return asked + 1


@gluon.jit
def _all_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, S: gl.constexpr, PART: gl.constexpr):
    met, go, done, word = m[5], m[8], m[9], m[10]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    asked = gl.to_tensor(0)
    step = gl.to_tensor(0)
    another = gl.to_tensor(1)
    live = live_of(p.words, 0, S)
    while another != 0:
        asked = _ask(go, done, asked)
        embed_phase(p, step, S, PART)
        for layer in range(num_layers):
            at = layer * _STAMPS
            norm = load_norm(p.residual, p.attention_norm + layer * S.D, S.qkv.DEPTH, S.qkv.DEPTH_WARPS, S.qkv.NUM_BLOCKS, S.qkv.SPLITS * S.qkv.PAIRS, PART, 2,
                             _WARPS)
            _wait_for_all(p, polls, at, S, PART)
            slot, phase, turn = qkv_phase(m, p, slot, phase, turn, live, norm, S, PART)
            if PART == 0:
                fetch_first_keys(attention_buffers(m, S), p.cache + layer.to(gl.int64) * cache_pages * (2 * S.G * _CHUNK * 2 * S.HALF), p.pages, p.plan_rows,
                                 p.plan_num_rows, table_width, program(_WARPS), S.G, S.HALF, _WARPS)
            _wait_for_all(p, polls, at + 1, S, PART)
            if PART == 0:
                attention_phase(m, p, layer, table_width, cache_pages, S)
            _wait_for_all(p, polls, at + 2, S, PART)
            slot, phase, turn = out_phase(m, p, slot, phase, turn, live, S, PART)
            norm = load_norm(p.residual, p.experts_norm + layer * S.D, S.router.DEPTH, S.router.DEPTH_WARPS, S.router.NUM_BLOCKS,
                             S.router.SPLITS * S.router.PAIRS, PART, 2, _WARPS)
            _wait_for_all(p, polls, at + 3, S, PART)
            slot, phase, turn = router_phase(m, p, slot, phase, turn, live, norm, S, PART)
            _wait_for_all(p, polls, at + 4, S, PART)
            mbarrier.wait(done, (asked & 1) ^ 1)     # the producer has read the list before
            slot, phase, columns = gate_up_phase(m, p, slot, phase, layer, S, PART)
            asked += 1
            _wait_for_all(p, polls, at + 5, S, PART)
            slot, phase = down_phase(m, p, slot, phase, columns, S, PART)
            _wait_for_all(p, polls, at + 6, S, PART)
            add_phase(p, layer, num_taps, S, PART)
        at = num_layers * _STAMPS
        norm = load_norm(p.residual, p.norm, S.head.DEPTH, S.head.DEPTH_WARPS, S.head.NUM_BLOCKS, S.head.SPLITS * S.head.PAIRS, PART, 2, _WARPS)
        _wait_for_all(p, polls, at, S, PART)
        slot, phase, turn = head_phase(m, p, slot, phase, turn, live, norm, S, PART)
        _wait_for_all(p, polls, at + 1, S, PART)
        sample_phase(p, step, S, PART)
        _wait_for_all(p, polls, at + 2, S, PART)
        finish_phase(p, step, S, PART)
        another, turn = _another_step(word, met, turn, p, step, num_steps, PART)
        step += 1
        _stamp(p, at + 3, S, PART)
    asked = _ask(go, done, asked)    # the producer reads that there is none


@gluon.jit
def _consumer(m, p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, S: gl.constexpr, PART: gl.constexpr):
    if S.PHASE == "all":
        _all_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, S, PART)
    else:
        zero = gl.to_tensor(0)
        live = live_of(p.words, 0, S)
        if S.PHASE == "embed":
            embed_phase(p, zero, S, PART)
        elif S.PHASE == "qkv":
            norm = load_norm(p.residual, p.attention_norm + layer * S.D, S.qkv.DEPTH, S.qkv.DEPTH_WARPS, S.qkv.NUM_BLOCKS, S.qkv.SPLITS * S.qkv.PAIRS, PART, 2,
                             _WARPS)
            qkv_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "attention":
            if PART == 0:
                fetch_first_keys(attention_buffers(m, S), p.cache + layer.to(gl.int64) * cache_pages * (2 * S.G * _CHUNK * 2 * S.HALF), p.pages, p.plan_rows,
                                 p.plan_num_rows, table_width, program(_WARPS), S.G, S.HALF, _WARPS)
                attention_phase(m, p, layer, table_width, cache_pages, S)
        elif S.PHASE == "out":
            out_phase(m, p, zero, zero, zero, live, S, PART)
        elif S.PHASE == "router":
            norm = load_norm(p.residual, p.experts_norm + layer * S.D, S.router.DEPTH, S.router.DEPTH_WARPS, S.router.NUM_BLOCKS,
                             S.router.SPLITS * S.router.PAIRS, PART, 2, _WARPS)
            router_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "gate_up":
            gate_up_phase(m, p, zero, zero, layer, S, PART)
        elif S.PHASE == "down":
            down_phase(m, p, zero, zero, (), S, PART)
        elif S.PHASE == "add":
            add_phase(p, layer, num_taps, S, PART)
        elif S.PHASE == "head":
            norm = load_norm(p.residual, p.norm, S.head.DEPTH, S.head.DEPTH_WARPS, S.head.NUM_BLOCKS, S.head.SPLITS * S.head.PAIRS, PART, 2, _WARPS)
            head_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "sample":
            sample_phase(p, zero, S, PART)
        else:
            gl.static_assert(S.PHASE == "finish")
            finish_phase(p, zero, S, PART)


# --- the producers ---


@gluon.jit
def _stream(desc, ring, full, empty, slot, phase, layer, W: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    for _tile in range(S.COLUMN_TILES):
        slot, phase = stream_dense(desc, ring, full, empty, slot, phase, layer * W.UNITS, W.ITEMS, W.PAIRS, W.NUM_BLOCKS, W.STAGE_BLOCKS, S.SLOT_UNITS,
                                   S.STAGES, PART, 2, S.PROGRAMS, _WARPS)
    return slot, phase


@gluon.jit
def _stream_experts(codes_desc, scales_desc, ring, scale_ring, full, empty, slot, phase, p, layer, W: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    number = program_list(1, PART)
    num_tiles = gl.load(p.list_tiles + number)
    return stream_weights(codes_desc, scales_desc, ring, scale_ring, full, empty, slot, phase, p.list_experts + number * S.TILES, layer * S.E, num_tiles,
                          W.TILE_STAGES, W.NUM_STEPS, S.SLOT_UNITS, W.SCALE_BOX, S.STAGES, PART, 2, S.PROGRAMS, _WARPS)


@gluon.jit
def _producer(d, m, p, num_layers, layer, S: gl.constexpr, PART: gl.constexpr):
    qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc = d
    ring, full, empty, up_scales, down_scales, go, done, word = m
    QKV: gl.constexpr = S.qkv
    OUT: gl.constexpr = S.out
    ROUTER: gl.constexpr = S.router
    HEAD: gl.constexpr = S.head
    UP: gl.constexpr = S.up
    DOWN: gl.constexpr = S.down
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    if S.PHASE == "all":
        taken = gl.to_tensor(0)
        mbarrier.wait(go, 0)
        another = gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
        mbarrier.arrive(done, count=1)
        while another != 0:
            for number in range(num_layers):
                slot, phase = _stream(qkv_desc, ring, full, empty, slot, phase, number, QKV, S, PART)
                slot, phase = _stream(out_desc, ring, full, empty, slot, phase, number, OUT, S, PART)
                slot, phase = _stream(router_desc, ring, full, empty, slot, phase, number, ROUTER, S, PART)
                taken += 1
                mbarrier.wait(go, taken & 1)
                slot, phase = _stream_experts(up_codes_desc, up_scales_desc, ring, up_scales, full, empty, slot, phase, p, number, UP, S, PART)
                slot, phase = _stream_experts(down_codes_desc, down_scales_desc, ring, down_scales, full, empty, slot, phase, p, number, DOWN, S, PART)
                mbarrier.arrive(done, count=1)
            slot, phase = _stream(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)
            taken += 1
            mbarrier.wait(go, taken & 1)
            another = gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
            mbarrier.arrive(done, count=1)
    elif S.PHASE == "qkv":
        _stream(qkv_desc, ring, full, empty, slot, phase, layer, QKV, S, PART)
    elif S.PHASE == "out":
        _stream(out_desc, ring, full, empty, slot, phase, layer, OUT, S, PART)
    elif S.PHASE == "router":
        _stream(router_desc, ring, full, empty, slot, phase, layer, ROUTER, S, PART)
    elif S.PHASE == "gate_up":
        mbarrier.wait(go, 0)
        _stream_experts(up_codes_desc, up_scales_desc, ring, up_scales, full, empty, slot, phase, p, layer, UP, S, PART)
    elif S.PHASE == "down":
        _stream_experts(down_codes_desc, down_scales_desc, ring, down_scales, full, empty, slot, phase, p, layer, DOWN, S, PART)
    elif S.PHASE == "head":
        _stream(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)


# --- the kernel ---


@gluon.jit
def _signals():
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())     # the producer may read on
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())   # and has
    mbarrier.init(go, count=1)
    mbarrier.init(done, count=1)
    return go, done


@gluon.jit(do_not_specialize=["num_layers", "num_steps", "table_width", "cache_pages", "polls", "layer", "num_taps"])
def step_kernel(qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, p, num_layers, num_steps,
                table_width, cache_pages, polls, layer, num_taps, S: gl.constexpr):
    """num_steps: at most. table_width: pages of a sequence; cache_pages: of a layer. layer: of a launch of one phase."""
    if S.PHASE == "embed" or S.PHASE == "add" or S.PHASE == "sample" or S.PHASE == "finish":     # no weights to wait for
        _consumer((), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, S, 0)
        _consumer((), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, S, 1)
    elif S.PHASE == "attention":
        keys = gl.allocate_shared_memory(gl.bfloat16, [2, _CHUNK, S.HALF], operand(S.HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        _consumer((area, area, area, area, area, area, area, keys), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, S, 0)
    else:
        ring, _, full, empty = make_ring(qkv_desc, S.SLOT_UNITS, S.STAGES, 1, _WARPS)
        ring_1, _, full_1, empty_1 = make_ring(qkv_desc, S.SLOT_UNITS, S.STAGES, 1, _WARPS)
        up_scales = make_scale_ring(up_scales_desc, S.up.NUM_STEPS, S.up.SCALE_BOX, S.STAGES, _WARPS)
        up_scales_1 = make_scale_ring(up_scales_desc, S.up.NUM_STEPS, S.up.SCALE_BOX, S.STAGES, _WARPS)
        down_scales = make_scale_ring(down_scales_desc, S.down.NUM_STEPS, S.down.SCALE_BOX, S.STAGES, _WARPS)
        down_scales_1 = make_scale_ring(down_scales_desc, S.down.NUM_STEPS, S.down.SCALE_BOX, S.STAGES, _WARPS)
        go, done = _signals()
        go_1, done_1 = _signals()
        pair = gl.allocate_shared_memory(gl.float32, [2 * S.PAIR_TILES * 128], row_major(1))
        met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(met, count=2)
        squares = gl.allocate_shared_memory(gl.float32, [2 * _WARPS * 8], row_major(1))
        word = gl.allocate_shared_memory(gl.int32, [32], row_major(1))
        word.store(gl.full((32,), 1, gl.int32, gl.BlockedLayout([1], [32], [_WARPS], [0])))
        keys = gl.allocate_shared_memory(gl.bfloat16, [2, _CHUNK, S.HALF], operand(S.HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        d = (qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc)
        gl.warp_specialize([
            (_consumer, ((ring, full, empty, area, pair, met, squares, keys, go, done, word, up_scales, down_scales), p, num_layers, num_steps, table_width,
                         cache_pages, polls, layer, num_taps, S, 0)),
            (_consumer, ((ring_1, full_1, empty_1, area, pair, met, squares, keys, go_1, done_1, word, up_scales_1, down_scales_1), p, num_layers, num_steps,
                         table_width, cache_pages, polls, layer, num_taps, S, 1)),
            (_producer, (d, (ring, full, empty, up_scales, down_scales, go, done, word), p, num_layers, layer, S, 0)),
            (_producer, (d, (ring_1, full_1, empty_1, up_scales_1, down_scales_1, go_1, done_1, word), p, num_layers, layer, S, 1)),
        ], [_WARPS, 1, 1], [96, 24, 24])
