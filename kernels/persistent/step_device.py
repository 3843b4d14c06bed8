# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,attr-defined"

"""The device code of a whole step: the phases of step_phases.py in one resident kernel, or each in a launch of its own.

Resident, a program has two consumers of eight warps and a producer for each; or an SM has two programs of one consumer, which then run the same code, half
as much as two consumers have between them: what a layer walks through fits the instruction cache (PARTITIONS = 1; with rolled dense products, as no two
consumers share anything). The consumers walk through the phases; seven times a layer they wait for what others write, six times (|) by a barrier over the
grid and once (:) until the words themselves are there (tagged.py), which takes two trips to L2 less:

    qkv | attention | out | router | choice, gate and up | down : add |

There is one barrier more where attention's partial results are merged by all programs and not by the item that comes last (attention.AttentionForm), and one
before the sum without rolled products. The first consumer of an SM attends. Of rolled products the second one has nothing else to do then, so it fetches what
can be fetched while the programs arrive at the barrier, and polls for the partial results, which say themselves that they are there, to merge them: nothing of
that is on the way of those who attend.

A barrier has two halves (barrier.py). Between arriving and waiting a consumer does what depends on nobody: the norm's weights, attention's plan and old keys.

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

from ..moe.stream import make_ring, make_scale_ring, row_major, stream_weights, tiles_of_ends
from .attention_rows import operand
from .dense_device import stream_dense
from .fragments import NUM_WARPS
from .rolled_dense import stream_rolled
from .step_consumer import consume
from .step_phases import list_number

_WARPS = gl.constexpr(NUM_WARPS)


# --- the producers ---


@gluon.jit
def stream_matrix(desc, ring, full, empty, slot, phase, layer, W: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    for _tile in range(S.COLUMN_TILES):
        if S.ROLLED_DENSE:
            slot, phase = stream_rolled(desc, ring, full, empty, slot, phase, layer * W.UNITS, W.ITEMS, W.NUM_BLOCKS, W.STAGE_BLOCKS, S.SLOT_UNITS, S.STAGES,
                                        PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
        else:
            slot, phase = stream_dense(desc, ring, full, empty, slot, phase, layer * W.UNITS, W.ITEMS, W.PAIRS, W.NUM_BLOCKS, W.STAGE_BLOCKS, S.SLOT_UNITS,
                                       S.STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
    return slot, phase


@gluon.jit
def stream_layer(qkv_desc, out_desc, router_desc, ring, full, empty, slot, phase, layer, S: gl.constexpr, PART: gl.constexpr):
    """What of a layer is known in advance."""
    QKV: gl.constexpr = S.qkv
    OUT: gl.constexpr = S.out
    ROUTER: gl.constexpr = S.router
    slot, phase = stream_matrix(qkv_desc, ring, full, empty, slot, phase, layer, QKV, S, PART)
    slot, phase = stream_matrix(out_desc, ring, full, empty, slot, phase, layer, OUT, S, PART)
    return stream_matrix(router_desc, ring, full, empty, slot, phase, layer, ROUTER, S, PART)


@gluon.jit
def stream_experts(codes_desc, scales_desc, ring, scale_ring, full, empty, slot, phase, ends, p, layer, W: gl.constexpr, S: gl.constexpr, PART: gl.constexpr):
    if S.PHASE == "down":
        number = list_number(1, S, PART)
        num_tiles = gl.load(p.list_tiles + number)
        experts = p.list_experts + number * S.TILES
    else:
        experts = ends
        num_tiles = tiles_of_ends(ends, 1)
    return stream_weights(codes_desc, scales_desc, ring, scale_ring, full, empty, slot, phase, experts, layer * S.E, num_tiles, W.TILE_STAGES,
                          W.NUM_STEPS, S.SLOT_UNITS, W.SCALE_BOX, S.STAGES, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)


@gluon.jit
def stream_chosen(up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, slot, phase, ends, p, layer,
                  S: gl.constexpr, PART: gl.constexpr):
    """The experts of a layer, once they are chosen."""
    UP: gl.constexpr = S.up
    DOWN: gl.constexpr = S.down
    slot, phase = stream_experts(up_codes_desc, up_scales_desc, ring, up_scales, full, empty, slot, phase, ends, p, layer, UP, S, PART)
    return stream_experts(down_codes_desc, down_scales_desc, ring, down_scales, full, empty, slot, phase, ends, p, layer, DOWN, S, PART)


@gluon.jit
def _producer(d, m, p, num_layers, layer, S: gl.constexpr, PART: gl.constexpr):
    qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc = d
    ring, full, empty, up_scales, down_scales, go, done, word, ends = m
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
                slot, phase = stream_layer(qkv_desc, out_desc, router_desc, ring, full, empty, slot, phase, number, S, PART)
                taken += 1
                mbarrier.wait(go, taken & 1)
                slot, phase = stream_chosen(up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, slot,
                                            phase, ends, p, number, S, PART)
                mbarrier.arrive(done, count=1)
            slot, phase = stream_matrix(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)
            taken += 1
            mbarrier.wait(go, taken & 1)
            another = gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
            mbarrier.arrive(done, count=1)
    elif S.PHASE == "qkv":
        stream_matrix(qkv_desc, ring, full, empty, slot, phase, layer, QKV, S, PART)
    elif S.PHASE == "out":
        stream_matrix(out_desc, ring, full, empty, slot, phase, layer, OUT, S, PART)
    elif S.PHASE == "router":
        stream_matrix(router_desc, ring, full, empty, slot, phase, layer, ROUTER, S, PART)
    elif S.PHASE == "gate_up":
        mbarrier.wait(go, 0)
        stream_experts(up_codes_desc, up_scales_desc, ring, up_scales, full, empty, slot, phase, ends, p, layer, UP, S, PART)
    elif S.PHASE == "down":
        stream_experts(down_codes_desc, down_scales_desc, ring, down_scales, full, empty, slot, phase, ends, p, layer, DOWN, S, PART)
    elif S.PHASE == "head":
        stream_matrix(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)


# --- the kernel ---


@gluon.jit
def _signals():
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())     # the producer may read on
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())   # and has
    mbarrier.init(go, count=1)
    mbarrier.init(done, count=1)
    return go, done


@gluon.jit
def make_consumer(qkv_desc, up_scales_desc, down_scales_desc, S: gl.constexpr):
    """What a consumer and its producer have together."""
    ring, _, full, empty = make_ring(qkv_desc, S.SLOT_UNITS, S.STAGES, 1, _WARPS)
    up_scales = make_scale_ring(up_scales_desc, S.up.NUM_STEPS, S.up.SCALE_BOX, S.STAGES, _WARPS)
    down_scales = make_scale_ring(down_scales_desc, S.down.NUM_STEPS, S.down.SCALE_BOX, S.STAGES, _WARPS)
    go, done = _signals()
    return ring, full, empty, up_scales, down_scales, go, done


@gluon.jit
def second_area(S: gl.constexpr):
    """Of rolled products; and whether attention's first values are there, and have been used."""
    area = gl.allocate_shared_memory(gl.bfloat16, [S.PRODUCT_UNITS, 8, 64], operand(64))
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(given.index(i), count=1)
    return area, given


@gluon.jit(do_not_specialize=["num_layers", "num_steps", "table_width", "cache_pages", "polls", "layer", "num_taps", "sequence"])
def step_kernel(qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, p, num_layers, num_steps,
                table_width, cache_pages, polls, layer, num_taps, sequence, S: gl.constexpr):
    """num_steps: at most. table_width: pages of a sequence; cache_pages: of a layer. layer: of a launch of one phase. sequence: the first tag (tagged.py)."""
    if S.PHASE == "embed" or S.PHASE == "merge" or S.PHASE == "add" or S.PHASE == "sample" or S.PHASE == "finish":     # no weights to wait for
        consume((), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S, 0)
        if S.PARTITIONS == 2:
            consume((), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S, 1)
    elif S.PHASE == "attention":
        keys = gl.allocate_shared_memory(gl.bfloat16, [2 * S.KEYS // 8, 8, S.HALF], operand(S.HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        values = area
        if S.VALUES_AHEAD:
            values = gl.allocate_shared_memory(gl.bfloat16, [S.VALUE_UNITS, 8, 64], operand(64))
        consume((area, area, area, area, values, area, area, keys), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S, 0)
    else:
        ring, full, empty, up_scales, down_scales, go, done = make_consumer(qkv_desc, up_scales_desc, down_scales_desc, S)
        ends = gl.allocate_shared_memory(gl.int32, [1, S.EXPERTS], row_major(2))      # of the column tiles of experts
        met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(met, count=2)
        word = gl.allocate_shared_memory(gl.int32, [32], row_major(1))
        word.store(gl.full((32,), 1, gl.int32, gl.BlockedLayout([1], [32], [_WARPS], [0])))
        keys = gl.allocate_shared_memory(gl.bfloat16, [2 * S.KEYS // 8, 8, S.HALF], operand(S.HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        d = (qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc)
        if S.PARTITIONS == 1:
            gl.warp_specialize([
                (consume, ((ring, full, empty, area, met, met, met, keys, go, done, word, up_scales, down_scales, ends), p, num_layers, num_steps,
                             table_width, cache_pages, polls, layer, num_taps, sequence, S, 0)),
                (_producer, (d, (ring, full, empty, up_scales, down_scales, go, done, word, ends), p, num_layers, layer, S, 0)),
            ], [1], [24])
        else:
            ring_1, full_1, empty_1, up_scales_1, down_scales_1, go_1, done_1 = make_consumer(qkv_desc, up_scales_desc, down_scales_desc, S)
            ends_1 = ends
            if not S.ONE_LIST:
                ends_1 = gl.allocate_shared_memory(gl.int32, [1, S.EXPERTS], row_major(2))
            listed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(listed, count=1)
            if S.ROLLED_DENSE:
                area_1, given = second_area(S)
                pair = area_1
                squares = given
            else:
                area_1 = area
                pair = gl.allocate_shared_memory(gl.float32, [2 * S.PAIR_TILES * 128], row_major(1))
                squares = gl.allocate_shared_memory(gl.float32, [2 * _WARPS * 8], row_major(1))
            gl.warp_specialize([
                (consume, ((ring, full, empty, area, pair, met, squares, keys, go, done, word, up_scales, down_scales, ends, go_1, listed, done_1),
                             p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S, 0)),
                (consume, ((ring_1, full_1, empty_1, area_1, pair, met, squares, keys, go_1, done_1, word, up_scales_1, down_scales_1, ends_1, go,
                              listed), p, num_layers, num_steps, table_width, cache_pages, polls, layer, num_taps, sequence, S, 1)),
                (_producer, (d, (ring, full, empty, up_scales, down_scales, go, done, word, ends), p, num_layers, layer, S, 0)),
                (_producer, (d, (ring_1, full_1, empty_1, up_scales_1, down_scales_1, go_1, done_1, word, ends_1), p, num_layers, layer, S, 1)),
            ], [_WARPS, 1, 1], [96, 24, 24])
