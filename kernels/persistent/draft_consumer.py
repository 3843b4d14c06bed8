# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

"""What a consumer of a kernel of rounds does: its walk through the phases of a round, or one of them; draft_device.py says how it fits together."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import hidden
from .barrier import step_barrier
from .draft_choose import accept_phase, choose_phase, draft_sample_phase
from .draft_dense import DOWN, DRAFT_HEAD, DRAFT_OUT, DRAFT_QKV, END, FC, GATE_UP, KEYS, next_matrix, round_matrix_of, round_product, words_of
from .draft_phases import (
    append_phase,
    draft_attention_phase,
    draft_embed_phase,
    draft_merge_phase,
    draft_merge_words,
    draft_spans_to_merge,
    prepare_draft_attention,
    prepare_draft_values,
)
from .fragments import NUM_WARPS
from .step_consumer import another_step, arrive_at, ask, stamp, wait_at, wait_for_all, wait_for_list
from .step_dense import HEAD, QKV, ROUTER, begin_matrix, live_of
from .step_phases import (
    add_phase,
    attention_phase,
    down_phase,
    embed_phase,
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


@gluon.jit
def _attention(m, p, q, kind, layer, at, turn, tag, table_width, cache_pages, polls, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """Attention behind a product of queries, keys and values, the target's or the draft's."""
    before = arrive_at(p, S, PART)
    if kind == QKV:
        if PART == 0:
            item = prepare_attention(m, p, layer, table_width, cache_pages, S)
        elif S.VALUES_AHEAD:
            prepare_values(m, p, layer, table_width, cache_pages, turn, S)
        wait_at(p, polls, before, at, S, PART)
        if PART == 0:
            attention_phase(m, p, item, layer, table_width, cache_pages, turn, tag, S)
        elif S.VALUES_AHEAD:
            values_arrive(m)
            if S.TAGGED:
                merge_words(p, tag, polls, S)
        if not S.LAST_MERGES:
            spans = spans_to_merge(p, S, PART)
            step_barrier(p.barrier, p.fault, polls, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
            merge_phase(p, spans, S, PART)
    else:
        if PART == 0:
            item = prepare_draft_attention(m, p, q, layer, table_width, cache_pages, S, T)
        elif S.VALUES_AHEAD:
            prepare_draft_values(m, p, q, layer, table_width, cache_pages, turn, S, T)
        wait_at(p, polls, before, at, S, PART)
        if PART == 0:
            draft_attention_phase(m, p, q, item, layer, table_width, cache_pages, turn, tag, S, T)
        elif S.VALUES_AHEAD:
            values_arrive(m)
            if S.TAGGED:
                draft_merge_words(p, q, tag, polls, S, T)
        if not S.LAST_MERGES:
            spans = draft_spans_to_merge(p, q, S, T, PART)
            step_barrier(p.barrier, p.fault, polls, PART, S.PARTITIONS, S.PROGRAMS, _WARPS)
            draft_merge_phase(p, q, spans, S, T, PART)


@gluon.jit
def attentions(kind, layer, number, num_layers, draft_layers, drafts):
    """How many were before this one, of the target and of the draft: draft layers come first in a round, if it drafts."""
    of_draft = gl.where(drafts != 0, draft_layers, 0)
    return number * (num_layers + of_draft) + layer + gl.where(kind == QKV, of_draft, 0)


@gluon.jit
def _all_rounds(m, p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, num_taps, drafts, assumed, sequence, S: gl.constexpr,
                T: gl.constexpr, PART: gl.constexpr):
    """A round of the inner loop is a matrix, with what lies between it and the next; `at` counts boundaries, for their stamps."""
    met, go, done, word = m[5], m[8], m[9], m[10]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    number = gl.to_tensor(0)
    another = gl.to_tensor(1)
    live = gl.to_tensor(0)
    while another != 0:
        ask(go, done, number * (num_layers + 1))
        at = gl.to_tensor(0)
        layer = gl.to_tensor(0)
        kind = gl.to_tensor(QKV)
        if drafts != 0:
            kind = gl.to_tensor(DRAFT_QKV)
        while kind != END:
            if ((kind == QKV) | (kind == DRAFT_QKV)) & (layer == 0):
                live = live_of(words_of(p, kind, S), 0, S)
                if kind == QKV:
                    embed_phase(p, layer, S, PART)
                else:
                    draft_embed_phase(p, q, S, T, PART)
            tag = sequence + number * num_layers + layer        # of the target's layers, and of the draft's, which are no more
            before = arrive_at(p, S, PART)
            matrix, more = round_matrix_of(p, q, kind, layer, S, T)
            begun = begin_matrix(matrix, S, PART)
            wait_at(p, polls, before, at, S, PART)
            at += 1
            if kind == FC:
                live = live_of(words_of(p, kind, S), 0, S)
            slot, phase = round_product(m, p, q, slot, phase, live, kind, matrix, more, begun, S, PART)
            if (kind == QKV) | (kind == DRAFT_QKV):
                attended = attentions(kind, layer, number, num_layers, draft_layers, drafts)
                _attention(m, p, q, kind, layer, at, attended, tag, table_width, cache_pages, polls, S, T, PART)
                at += 1
            if kind == ROUTER:
                wait_for_all(p, polls, at, S, PART)
                wait_for_list(m, done, number * (num_layers + 1) + layer + 1, S, PART)
                slot, phase, columns = gate_up_phase(m, p, slot, phase, layer, number * num_layers + layer, S, PART)
                wait_for_all(p, polls, at + 1, S, PART)
                slot, phase = down_phase(m, p, slot, phase, columns, tag, S, PART)
                add_phase(p, layer, num_taps, live, tag, polls, at + 2, S, PART)
                at += 3
            if (kind == HEAD) | (kind == DRAFT_HEAD):
                wait_for_all(p, polls, at, S, PART)
                if kind == HEAD:
                    sample_phase(p, gl.to_tensor(0), S, PART)
                else:
                    draft_sample_phase(p, q, S, PART)
                wait_for_all(p, polls, at + 1, S, PART)
                at += 2
                if kind == HEAD:
                    accept_phase(p, q, number, drafts, assumed, S, T, PART)
                else:
                    choose_phase(p, q, S, T, PART)
                    wait_for_all(p, polls, at, S, PART)
                    at += 1
            if kind == KEYS:
                wait_for_all(p, polls, at, S, PART)
                append_phase(p, q, table_width, cache_pages, S, T, PART)
                at += 1
            kind, layer = next_matrix(kind, layer, num_layers, draft_layers)
        stamp(p, at, S, PART)
        another, _ = another_step(word, met, number & 1, p, number, num_rounds, S, PART)
        number += 1
    ask(go, done, number * (num_layers + 1))    # the producer reads that there is none


@gluon.jit
def _launch(m, p, q, layer, kind: gl.constexpr, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    which = hidden(gl.to_tensor(kind))
    matrix, more = round_matrix_of(p, q, which, layer, S, T)
    live = live_of(words_of(p, which, S), 0, S)
    round_product(m, p, q, gl.to_tensor(0), gl.to_tensor(0), live, which, matrix, more, begin_matrix(matrix, S, PART), S, PART)


@gluon.jit
def consume_rounds(m, p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, layer, num_taps, drafts, assumed, sequence, S: gl.constexpr,
                   T: gl.constexpr, PART: gl.constexpr):
    if T.PHASE == "rounds":
        _all_rounds(m, p, q, num_layers, draft_layers, num_rounds, table_width, cache_pages, polls, num_taps, drafts, assumed, sequence, S, T, PART)
    elif T.PHASE == "draft_embed":
        draft_embed_phase(p, q, S, T, PART)
    elif T.PHASE == "draft_qkv":
        _launch(m, p, q, layer, DRAFT_QKV, S, T, PART)
    elif T.PHASE == "draft_attention":
        if PART == 0:
            item = prepare_draft_attention(m, p, q, layer, table_width, cache_pages, S, T)
            draft_attention_phase(m, p, q, item, layer, table_width, cache_pages, 0, sequence, S, T)
    elif T.PHASE == "draft_merge" and S.TAGGED:
        if PART == 1:
            draft_merge_words(p, q, sequence, polls, S, T)
    elif T.PHASE == "draft_merge":
        draft_merge_phase(p, q, draft_spans_to_merge(p, q, S, T, PART), S, T, PART)
    elif T.PHASE == "draft_out":
        _launch(m, p, q, layer, DRAFT_OUT, S, T, PART)
    elif T.PHASE == "draft_gate_up":
        _launch(m, p, q, layer, GATE_UP, S, T, PART)
    elif T.PHASE == "draft_down":
        _launch(m, p, q, layer, DOWN, S, T, PART)
    elif T.PHASE == "draft_head":
        _launch(m, p, q, layer, DRAFT_HEAD, S, T, PART)
    elif T.PHASE == "draft_sample":
        draft_sample_phase(p, q, S, PART)
    elif T.PHASE == "choose":
        choose_phase(p, q, S, T, PART)
    elif T.PHASE == "accept":
        accept_phase(p, q, gl.to_tensor(0), drafts, assumed, S, T, PART)
    elif T.PHASE == "fc":
        _launch(m, p, q, layer, FC, S, T, PART)
    elif T.PHASE == "keys":
        _launch(m, p, q, layer, KEYS, S, T, PART)
    else:
        gl.static_assert(T.PHASE == "append")
        append_phase(p, q, table_width, cache_pages, S, T, PART)
