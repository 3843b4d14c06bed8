# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""What a consumer of the step kernel does: its walk through the phases of a resident step, or one of them; step_device.py says how it fits together."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..moe.stream import hidden, stamp_time
from .barrier import arrive, step_barrier, wait_arrived
from .dense_device import load_norm, meet
from .fragments import NUM_WARPS
from .step_code import LAYER_STAMPS
from .step_dense import HEAD, OUT, QKV, ROUTER, begin_matrix, head_phase, live_of, matrix_of, out_phase, qkv_phase, rolled_phase, router_phase
from .step_phases import (
    add_phase,
    attention_phase,
    down_phase,
    embed_phase,
    finish_phase,
    gate_up_phase,
    merge_phase,
    merge_words,
    prepare_attention,
    prepare_values,
    sample_phase,
    spans_to_merge,
    values_arrive,
)

_WARPS = gl.constexpr(NUM_WARPS)
_STAMPS = gl.constexpr(LAYER_STAMPS)


@gluon.jit
def stamp(p, place, S: gl.constexpr, PART: gl.constexpr):
    """When program 0 is past a barrier, in ns."""
    if S.PROFILE and PART == 0:
        stamp_time(p.stamps + place, _WARPS)


@gluon.jit
def wait_for_all(p, polls, place, S: gl.constexpr, PART: gl.constexpr):
    step_barrier(p.barrier, p.fault, polls, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
    stamp(p, place, S, PART)


@gluon.jit
def arrive_at(p, S: gl.constexpr, PART: gl.constexpr):
    """The first half of `wait_for_all`. What is done before the second reads what no phase on either side of the barrier writes (weights, the plan, a cache's
    old positions), and writes shared memory that this consumer alone uses then."""
    return arrive(p.barrier, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)


@gluon.jit
def wait_at(p, polls, before, place, S: gl.constexpr, PART: gl.constexpr):
    """The second half; before: of `arrive_at`."""
    wait_arrived(p.barrier, p.fault, polls, before, _WARPS)
    stamp(p, place, S, PART)


@gluon.jit
def another_step(word, met, turn, p, step, num_steps, S: gl.constexpr, PART: gl.constexpr):
    """Whether there is one after this, for both consumers and (behind `go`) both producers of an SM: consumer 0 decides. Returns it and the turn."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    if PART == 0:
        i = gl.arange(0, 32, LANES)
        ends = gl.load(p.stop + i * 0, cache_modifier=".cg") | gl.load(p.fault + i * 0, cache_modifier=".cg")
        word.store(((ends == 0) & (step + 1 + i * 0 < num_steps)).to(gl.int32))
    if S.PARTITIONS == 2:
        turn = meet(met, turn)
    return gl.max(word.load(LANES), 0), turn


@gluon.jit
def ask(go, done, asked):
    """Let the producer go on, once it has taken the signal before this one. asked: signals before; one a step, and one a layer of it. Where it can be it is
    worked out and not counted: a count lives long, the compiler keeps it on the stack, and to have it back takes as long as any memory."""
    mbarrier.wait(done, (asked & 1) ^ 1)
    mbarrier.arrive(go, count=1)
    return asked + 1


@gluon.jit
def wait_for_list(m, done, asked, S: gl.constexpr, PART: gl.constexpr):
    if not S.ONE_LIST or PART == 0:
        mbarrier.wait(done, (asked & 1) ^ 1)     # the producer has read the list before
    if S.ONE_LIST and PART == 0:
        mbarrier.wait(m[16], (asked & 1) ^ 1)    # as has the other; its own consumer may come here when it has read this one too


@gluon.jit
def _all_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, sequence, S: gl.constexpr, PART: gl.constexpr):
    met, go, done, word = m[5], m[8], m[9], m[10]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    asked = gl.to_tensor(0)
    step = gl.to_tensor(0)
    another = gl.to_tensor(1)
    live = live_of(p.words, 0, S)
    while another != 0:
        asked = ask(go, done, asked)
        embed_phase(p, step, S, PART)
        for layer in range(num_layers):
            at = layer * _STAMPS
            tag = sequence + step * num_layers + layer
            norm = load_norm(p.residual, p.attention_norm + layer * S.D, S.qkv.DEPTH, S.qkv.DEPTH_WARPS, S.qkv.NUM_BLOCKS, S.qkv.SPLITS * S.qkv.PAIRS, PART, 2,
                             _WARPS)
            wait_for_all(p, polls, at, S, PART)
            slot, phase, turn = qkv_phase(m, p, slot, phase, turn, live, norm, S, PART)
            if PART == 0:
                item = prepare_attention(m, p, layer, table_width, cache_pages, S)
            wait_for_all(p, polls, at + 1, S, PART)
            if PART == 0:
                attention_phase(m, p, item, layer, table_width, cache_pages, 0, tag, S)
            if not S.LAST_MERGES:
                spans = spans_to_merge(p, S, PART)
                step_barrier(p.barrier, p.fault, polls, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
                merge_phase(p, spans, S, PART)
            wait_for_all(p, polls, at + 2, S, PART)
            slot, phase, turn = out_phase(m, p, slot, phase, turn, live, S, PART)
            norm = load_norm(p.residual, p.experts_norm + layer * S.D, S.router.DEPTH, S.router.DEPTH_WARPS, S.router.NUM_BLOCKS,
                             S.router.SPLITS * S.router.PAIRS, PART, 2, _WARPS)
            wait_for_all(p, polls, at + 3, S, PART)
            slot, phase, turn = router_phase(m, p, slot, phase, turn, live, norm, S, PART)
            wait_for_all(p, polls, at + 4, S, PART)
            wait_for_list(m, done, asked, S, PART)
            slot, phase, columns = gate_up_phase(m, p, slot, phase, layer, step * num_layers + layer, S, PART)
            asked += 1
            wait_for_all(p, polls, at + 5, S, PART)
            slot, phase = down_phase(m, p, slot, phase, columns, tag, S, PART)
            wait_for_all(p, polls, at + 6, S, PART)
            add_phase(p, layer, num_taps, live, tag, polls, at, S, PART)
        at = num_layers * _STAMPS
        norm = load_norm(p.residual, p.norm, S.head.DEPTH, S.head.DEPTH_WARPS, S.head.NUM_BLOCKS, S.head.SPLITS * S.head.PAIRS, PART, 2, _WARPS)
        wait_for_all(p, polls, at, S, PART)
        slot, phase, turn = head_phase(m, p, slot, phase, turn, live, norm, S, PART)
        wait_for_all(p, polls, at + 1, S, PART)
        sample_phase(p, step, S, PART)
        wait_for_all(p, polls, at + 2, S, PART)
        finish_phase(p, step, S, PART)
        another, turn = another_step(word, met, turn, p, step, num_steps, S, PART)
        step += 1
        stamp(p, at + 3, S, PART)
    asked = ask(go, done, asked)    # the producer reads that there is none


@gluon.jit
def _all_rolled_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, sequence, S: gl.constexpr, PART: gl.constexpr):
    """The same with one piece of code for all dense products: a round of the inner loop is a matrix, with what lies between it and the next.

    Down's partials say themselves when they are there (tagged.py): six barriers a layer. What else is written on one side of them and read or written again on
    the other is ordered by those barriers: lists and channels by the one between gate and up and down; residual, squares and features, which the sum writes,
    and partials, which the next layer writes again, by it or by the one behind the sum.
    """
    met, go, done, word = m[5], m[8], m[9], m[10]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    step = gl.to_tensor(0)
    another = gl.to_tensor(1)
    live = live_of(p.words, 0, S)
    head_at = num_layers * _STAMPS
    while another != 0:
        ask(go, done, step * (num_layers + 1))
        embed_phase(p, step, S, PART)
        for number in range(3 * num_layers + 1):
            layer = number // 3
            kind = number % 3
            at = layer * _STAMPS + kind + gl.minimum(kind, 1)     # stamps of attention lie behind qkv's
            if layer == num_layers:
                kind = kind * 0 + HEAD
            tag = sequence + step * num_layers + layer
            before = arrive_at(p, S, PART)
            matrix = matrix_of(p, kind, layer, S)
            begun = begin_matrix(matrix, S, PART)
            wait_at(p, polls, before, at, S, PART)
            slot, phase = rolled_phase(m, p, slot, phase, live, kind, matrix, begun, S, PART)
            if kind == QKV:
                before = arrive_at(p, S, PART)
                if PART == 0:
                    item = prepare_attention(m, p, layer, table_width, cache_pages, S)
                elif S.VALUES_AHEAD:
                    prepare_values(m, p, layer, table_width, cache_pages, step * num_layers + layer, S)
                wait_at(p, polls, before, at + 1, S, PART)
                if PART == 0:
                    attention_phase(m, p, item, layer, table_width, cache_pages, step * num_layers + layer, tag, S)
                elif S.VALUES_AHEAD:
                    values_arrive(m)
                    if S.TAGGED:
                        merge_words(p, tag, polls, S)
                if not S.LAST_MERGES:
                    spans = spans_to_merge(p, S, PART)
                    step_barrier(p.barrier, p.fault, polls, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
                    merge_phase(p, spans, S, PART)
            if kind == ROUTER:
                wait_for_all(p, polls, at + 1, S, PART)
                wait_for_list(m, done, step * (num_layers + 1) + layer + 1, S, PART)
                slot, phase, columns = gate_up_phase(m, p, slot, phase, layer, step * num_layers + layer, S, PART)
                wait_for_all(p, polls, at + 2, S, PART)
                slot, phase = down_phase(m, p, slot, phase, columns, tag, S, PART)
                add_phase(p, layer, num_taps, live, tag, polls, at + 3, S, PART)
        wait_for_all(p, polls, head_at + 1, S, PART)
        sample_phase(p, step, S, PART)
        wait_for_all(p, polls, head_at + 2, S, PART)
        finish_phase(p, step, S, PART)
        another, _ = another_step(word, met, step & 1, p, step, num_steps, S, PART)
        step += 1
        stamp(p, head_at + 3, S, PART)
    ask(go, done, step * (num_layers + 1))      # the producer reads that there is none


@gluon.jit
def _rolled_launch(m, p, live, layer, kind: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    which = hidden(gl.to_tensor(kind))      # what is never run does not compile
    matrix = matrix_of(p, which, layer, S)
    rolled_phase(m, p, gl.to_tensor(0), gl.to_tensor(0), live, which, matrix, begin_matrix(matrix, S, PART), S, PART)


@gluon.jit
def consume(m, p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S: gl.constexpr, PART: gl.constexpr):
    if S.PHASE == "all" and S.ROLLED_DENSE:
        _all_rolled_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, sequence, S, PART)
    elif S.PHASE == "all":
        _all_phases(m, p, num_layers, num_steps, table_width, cache_pages, polls, num_taps, sequence, S, PART)
    else:
        zero = gl.to_tensor(0)
        live = live_of(p.words, 0, S)
        if S.PHASE == "embed":
            embed_phase(p, zero, S, PART)
        elif S.PHASE == "qkv" and S.ROLLED_DENSE:
            _rolled_launch(m, p, live, layer, QKV, S, PART)
        elif S.PHASE == "qkv":
            norm = load_norm(p.residual, p.attention_norm + layer * S.D, S.qkv.DEPTH, S.qkv.DEPTH_WARPS, S.qkv.NUM_BLOCKS, S.qkv.SPLITS * S.qkv.PAIRS, PART, 2,
                             _WARPS)
            qkv_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "attention":
            if PART == 0:
                item = prepare_attention(m, p, layer, table_width, cache_pages, S)
                attention_phase(m, p, item, layer, table_width, cache_pages, 0, sequence, S)
        elif S.PHASE == "merge" and S.TAGGED:
            if PART == 1:
                merge_words(p, sequence, polls, S)
        elif S.PHASE == "merge":
            merge_phase(p, spans_to_merge(p, S, PART), S, PART)
        elif S.PHASE == "out" and S.ROLLED_DENSE:
            _rolled_launch(m, p, live, layer, OUT, S, PART)
        elif S.PHASE == "out":
            out_phase(m, p, zero, zero, zero, live, S, PART)
        elif S.PHASE == "router" and S.ROLLED_DENSE:
            _rolled_launch(m, p, live, layer, ROUTER, S, PART)
        elif S.PHASE == "router":
            norm = load_norm(p.residual, p.experts_norm + layer * S.D, S.router.DEPTH, S.router.DEPTH_WARPS, S.router.NUM_BLOCKS,
                             S.router.SPLITS * S.router.PAIRS, PART, 2, _WARPS)
            router_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "gate_up":
            gate_up_phase(m, p, zero, zero, layer, zero, S, PART)
        elif S.PHASE == "down":
            down_phase(m, p, zero, zero, (), sequence, S, PART)
        elif S.PHASE == "add":
            add_phase(p, layer, num_taps, live, sequence, polls, zero, S, PART)
        elif S.PHASE == "head" and S.ROLLED_DENSE:
            _rolled_launch(m, p, live, layer, HEAD, S, PART)
        elif S.PHASE == "head":
            norm = load_norm(p.residual, p.norm, S.head.DEPTH, S.head.DEPTH_WARPS, S.head.NUM_BLOCKS, S.head.SPLITS * S.head.PAIRS, PART, 2, _WARPS)
            head_phase(m, p, zero, zero, zero, live, norm, S, PART)
        elif S.PHASE == "sample":
            sample_phase(p, zero, S, PART)
        else:
            gl.static_assert(S.PHASE == "finish")
            finish_phase(p, zero, S, PART)
