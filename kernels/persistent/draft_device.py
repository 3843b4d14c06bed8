# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,attr-defined"
"""The device code of rounds: a draft, the target's step that verifies it, and its acceptance, in one resident kernel, or each phase in a launch of its own.

It is step_device.py's kernel of rolled products with more matrices in its loop; a kernel without a draft is that one, and has nothing of this. Beside a step's
boundaries, all programs wait for each other five times a layer of the draft and eight times a round:

    of a layer    qkv | attention | out | gate and up | down
    of a round    head of the draft | its sampling | choice | the target's step | its sampling | acceptance | context | its keys | append, next block's input

Choice and acceptance are the first program's; the words they write (draft_code.py) are read past L1 behind the barrier that follows.

The producers copy the draft's matrices, the target's and the context's in the order of the round. How many stages that is does not depend on what is drafted or
accepted, so what step_device.py says of faults holds: whatever a word says, producers and consumers agree.

`drafts` is 0 for steps without drafts, of any columns: the target's step, and the context's four phases for all of its columns, so that the context of what is
drafted later is complete. So prompts are read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..moe.stream import row_major
from .attention_rows import operand
from .draft_consumer import consume_rounds
from .fragments import NUM_WARPS
from .step_device import make_consumer, second_area, stream_chosen, stream_layer, stream_matrix

_WARPS = gl.constexpr(NUM_WARPS)


@gluon.jit
def _round_producer(d, m, p, num_layers, draft_layers, layer, drafts, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    (qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, draft_qkv_desc, draft_out_desc,
     draft_gate_up_desc, draft_down_desc, fc_desc, keys_desc) = d
    ring, full, empty, up_scales, down_scales, go, done, word, ends = m
    HEAD: gl.constexpr = S.head
    DRAFT_QKV: gl.constexpr = T.qkv
    DRAFT_OUT: gl.constexpr = T.out
    DRAFT_GATE_UP: gl.constexpr = T.gate_up
    DRAFT_DOWN: gl.constexpr = T.down
    FC: gl.constexpr = T.fc
    KEYS: gl.constexpr = T.keys
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    if T.PHASE == "rounds":
        taken = gl.to_tensor(0)
        mbarrier.wait(go, 0)
        another = gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
        mbarrier.arrive(done, count=1)
        while another != 0:
            if drafts != 0:
                for number in range(draft_layers):
                    slot, phase = stream_matrix(draft_qkv_desc, ring, full, empty, slot, phase, number, DRAFT_QKV, S, PART)
                    slot, phase = stream_matrix(draft_out_desc, ring, full, empty, slot, phase, number, DRAFT_OUT, S, PART)
                    slot, phase = stream_matrix(draft_gate_up_desc, ring, full, empty, slot, phase, number, DRAFT_GATE_UP, S, PART)
                    slot, phase = stream_matrix(draft_down_desc, ring, full, empty, slot, phase, number, DRAFT_DOWN, S, PART)
                slot, phase = stream_matrix(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)
            for number in range(num_layers):
                slot, phase = stream_layer(qkv_desc, out_desc, router_desc, ring, full, empty, slot, phase, number, S, PART)
                taken += 1
                mbarrier.wait(go, taken & 1)
                slot, phase = stream_chosen(up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, ring, up_scales, down_scales, full, empty, slot,
                                            phase, ends, p, number, S, PART)
                mbarrier.arrive(done, count=1)
            slot, phase = stream_matrix(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)
            slot, phase = stream_matrix(fc_desc, ring, full, empty, slot, phase, 0, FC, S, PART)
            slot, phase = stream_matrix(keys_desc, ring, full, empty, slot, phase, 0, KEYS, S, PART)
            taken += 1
            mbarrier.wait(go, taken & 1)
            another = gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0)
            mbarrier.arrive(done, count=1)
    elif T.PHASE == "draft_qkv":
        stream_matrix(draft_qkv_desc, ring, full, empty, slot, phase, layer, DRAFT_QKV, S, PART)
    elif T.PHASE == "draft_out":
        stream_matrix(draft_out_desc, ring, full, empty, slot, phase, layer, DRAFT_OUT, S, PART)
    elif T.PHASE == "draft_gate_up":
        stream_matrix(draft_gate_up_desc, ring, full, empty, slot, phase, layer, DRAFT_GATE_UP, S, PART)
    elif T.PHASE == "draft_down":
        stream_matrix(draft_down_desc, ring, full, empty, slot, phase, layer, DRAFT_DOWN, S, PART)
    elif T.PHASE == "draft_head":
        stream_matrix(head_desc, ring, full, empty, slot, phase, 0, HEAD, S, PART)
    elif T.PHASE == "fc":
        stream_matrix(fc_desc, ring, full, empty, slot, phase, 0, FC, S, PART)
    elif T.PHASE == "keys":
        stream_matrix(keys_desc, ring, full, empty, slot, phase, 0, KEYS, S, PART)


@gluon.jit(do_not_specialize=["num_layers", "draft_layers", "num_rounds", "table_width", "cache_pages", "polls", "layer", "num_taps", "drafts", "assumed",
                              "sequence"])
def round_kernel(qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, draft_qkv_desc, draft_out_desc,
                 draft_gate_up_desc, draft_down_desc, fc_desc, keys_desc, p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer,
                 num_taps, drafts, assumed, sequence, S: gl.constexpr, T: gl.constexpr):
    """num_rounds: at most. drafts: 0 for steps without. assumed: so many proposals are taken as accepted, -1: those that are. The others as `step_kernel`."""
    if T.PHASE == "draft_attention":
        keys = gl.allocate_shared_memory(gl.bfloat16, [2 * S.KEYS // 8, 8, S.KEYS_HALF], operand(S.KEYS_HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        values = area
        if S.VALUES_AHEAD:
            values = gl.allocate_shared_memory(gl.bfloat16, [S.VALUE_UNITS, 8, 64], operand(64))
        consume_rounds((area, area, area, area, values, area, area, keys), p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer,
                       num_taps, drafts, assumed, sequence, S, T, 0)
    elif not T.STREAMS:
        consume_rounds((), p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed, sequence, S, T, 0)
        if S.PARTITIONS == 2:
            consume_rounds((), p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed, sequence, S, T, 1)
    else:
        ring, full, empty, up_scales, down_scales, go, done = make_consumer(qkv_desc, up_scales_desc, down_scales_desc, S)
        ends = gl.allocate_shared_memory(gl.int32, [1, S.EXPERTS], row_major(2))      # of the column tiles of experts
        met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(met, count=2)
        word = gl.allocate_shared_memory(gl.int32, [32], row_major(1))
        word.store(gl.full((32,), 1, gl.int32, gl.BlockedLayout([1], [32], [_WARPS], [0])))
        keys = gl.allocate_shared_memory(gl.bfloat16, [2 * S.KEYS // 8, 8, S.KEYS_HALF], operand(S.KEYS_HALF))
        area = gl.allocate_shared_memory(gl.bfloat16, [S.AREA_UNITS, 8, 64], operand(64))
        d = (qkv_desc, out_desc, router_desc, head_desc, up_codes_desc, up_scales_desc, down_codes_desc, down_scales_desc, draft_qkv_desc, draft_out_desc,
             draft_gate_up_desc, draft_down_desc, fc_desc, keys_desc)
        if S.PARTITIONS == 1:
            gl.warp_specialize([
                (consume_rounds, ((ring, full, empty, area, met, met, met, keys, go, done, word, up_scales, down_scales, ends), p, q, num_layers, draft_layers,
                                  num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed, sequence, S, T, 0)),
                (_round_producer, (d, (ring, full, empty, up_scales, down_scales, go, done, word, ends), p, num_layers, draft_layers, layer, drafts, S, T, 0)),
            ], [1], [24])
        else:
            ring_1, full_1, empty_1, up_scales_1, down_scales_1, go_1, done_1 = make_consumer(qkv_desc, up_scales_desc, down_scales_desc, S)
            ends_1 = ends
            if not S.ONE_LIST:
                ends_1 = gl.allocate_shared_memory(gl.int32, [1, S.EXPERTS], row_major(2))
            listed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(listed, count=1)
            area_1, given = second_area(S)
            gl.warp_specialize([
                (consume_rounds, ((ring, full, empty, area, area_1, met, given, keys, go, done, word, up_scales, down_scales, ends, go_1, listed, done_1), p, q,
                                  num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed, sequence, S, T, 0)),
                (consume_rounds, ((ring_1, full_1, empty_1, area_1, area_1, met, given, keys, go_1, done_1, word, up_scales_1, down_scales_1, ends_1, go,
                                   listed), p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed,
                                  sequence, S, T, 1)),
                (_round_producer, (d, (ring, full, empty, up_scales, down_scales, go, done, word, ends), p, num_layers, draft_layers, layer, drafts, S, T, 0)),
                (_round_producer, (d, (ring_1, full_1, empty_1, up_scales_1, down_scales_1, go_1, done_1, word, ends_1), p, num_layers, draft_layers, layer,
                                   drafts, S, T, 1)),
            ], [_WARPS, 1, 1], [96, 24, 24])
