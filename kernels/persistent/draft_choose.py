# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""What a block proposes, how much of it is verified, and how much of that is accepted; round_inputs.py says by which rules.

    sample   every slice of the vocabulary by one consumer, as sample_device.py; beside the best score the sum of exponentials, for the proposal's probability
    choose   by the first program, behind a barrier: proposals, their probabilities, how many are verified; the words of the target's step
    accept   likewise behind the target's sampling: what is committed; the words of the draft's context and of the next block; a row of the host's ring

p, S, q, T: as draft_phases.py. Slot n at position P proposes the token at P, by the noise of P, as the target's column before it samples that token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import cta_barrier, here, program
from .draft_phases import context_words, draft_words
from .fragments import NUM_WARPS
from .sample_device import _NO_TOKEN, _gumbel, best_of_columns, count_step
from .step_code import SLICES
from .step_phases import program_list

_WARPS = gl.constexpr(NUM_WARPS)
_SLICES = gl.constexpr(SLICES)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LOW = gl.constexpr(-1e30)      # below any logit


@gluon.constexpr_function
def _table():
    """[column, slice]."""
    return gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])


@gluon.jit
def _exp(x):
    return gl.exp2(x * _LOG2_E)


@gluon.jit
def draft_sample_phase(p, q, S: gl.constexpr, PART: gl.constexpr):
    """Of each slice of each masked slot: the best score and its token, that token's logit, the largest logit and the sum of exponentials; by temperature."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    BLOCK: gl.constexpr = _WARPS * 32
    WIDTH: gl.constexpr = (S.V + _SLICES - 1) // _SLICES
    words = draft_words(p, S)
    lane = here(gl.arange(0, BLOCK, LANES))
    for unit in range(program_list(_WARPS, S, PART), S.C * _SLICES, S.PROGRAMS * S.PARTITIONS):
        column, first = unit // _SLICES, unit % _SLICES * WIDTH
        if (gl.load(words + S.C + column, cache_modifier=".cg") >= 0) & (column % 8 > 0):
            temperature = gl.load(p.words + 3 * S.C + column).to(gl.float32, bitcast=True)
            position = gl.load(words + 2 * S.C + column, cache_modifier=".cg")
            seed_low = gl.load(p.words + 6 * S.C + column)
            seed_high = gl.load(p.words + 7 * S.C + column)
            best = gl.full((BLOCK,), -float("inf"), gl.float32, LANES)
            best_id = gl.full((BLOCK,), _NO_TOKEN, gl.int32, LANES)
            best_logit = gl.full((BLOCK,), _LOW, gl.float32, LANES)
            largest = gl.full((BLOCK,), _LOW, gl.float32, LANES)
            total = gl.zeros((BLOCK,), gl.float32, LANES)
            for base in range(0, WIDTH, BLOCK):
                token = first + base + lane
                inside = (base + lane < WIDTH) & (token < S.V)
                logit = gl.load(p.logits + column * S.V + token, mask=inside, other=-float("inf"), cache_modifier=".cg")
                score = logit
                if temperature != 0.0:
                    logit = gl.div_rn(logit, gl.full((BLOCK,), 1.0, gl.float32, LANES) * temperature)
                    score = logit + _gumbel(token, position, seed_low, seed_high)
                better = score > best       # ids of a lane ascend
                best_id = gl.where(better, token, best_id)
                best_logit = gl.where(better, logit, best_logit)
                best = gl.where(better, score, best)
                peak = gl.maximum(largest, logit)
                total = total * _exp(largest - peak) + _exp(logit - peak)
                largest = peak
            top = gl.max(best, 0)
            chosen = gl.min(gl.where(best == top, best_id, _NO_TOKEN), 0)
            peak = gl.max(largest, 0)
            gl.store(p.best + unit, top)
            gl.store(p.best_ids + unit, chosen)
            gl.store(q.shares + unit, gl.max(gl.where(best_id == chosen, best_logit, _LOW), 0))
            gl.store(q.shares + S.C * _SLICES + unit, peak)
            gl.store(q.shares + 2 * S.C * _SLICES + unit, gl.sum(total * _exp(largest - peak), 0))


@gluon.jit
def _proposals(p, q, column, live, S: gl.constexpr):
    """The proposals of columns and their probabilities, behind a barrier over the grid."""
    TABLE: gl.constexpr = _table()
    cell = column[:, None] * _SLICES + here(gl.arange(0, _SLICES, gl.SliceLayout(0, TABLE)))[None, :]
    mask = live[:, None] & (cell >= 0)
    score = gl.load(p.best + cell, mask=mask, other=0.0, cache_modifier=".cg")
    ids = gl.load(p.best_ids + cell, mask=mask, other=0, cache_modifier=".cg")
    logit = gl.load(q.shares + cell, mask=mask, other=0.0, cache_modifier=".cg")
    largest = gl.load(q.shares + S.C * _SLICES + cell, mask=mask, other=0.0, cache_modifier=".cg")
    total = gl.load(q.shares + 2 * S.C * _SLICES + cell, mask=mask, other=1.0, cache_modifier=".cg")
    won = score == gl.max(score, 1)[:, None]
    token = gl.min(gl.where(won, ids, _NO_TOKEN), 1)
    peak = gl.max(largest, 1)
    share = _exp(gl.max(gl.where(won & (ids == token[:, None]), logit, _LOW), 1) - peak) / gl.sum(total * _exp(largest - peak[:, None]), 1)
    return gl.where(token < S.V, token, 0), share


@gluon.jit
def _verify_length(q, first, most, C: gl.constexpr):
    """Proposals to verify of at most `most`, for the block that begins at column `first`: the sums and products of `verify_length_ref`, in its order."""
    best = first * 0
    expected = (first * 0).to(gl.float32) + 1.0
    together = expected
    best_ratio = gl.div_rn(expected, gl.load(q.cost + first * 0))
    for n in gl.static_range(1, 8):
        share = gl.load(q.confidence + first + n, mask=most >= n, other=0.0, cache_modifier=".cg")
        together = together * gl.minimum(share * gl.load(q.scale + first * 0 + n), 1.0)
        expected = expected + together
        ratio = gl.div_rn(expected, gl.load(q.cost + first * 0 + n))
        better = (most >= n) & (ratio > best_ratio)
        best = gl.where(better, n, best)
        best_ratio = gl.where(better, ratio, best_ratio)
    return best


@gluon.jit
def choose_phase(p, q, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """Proposals and their probabilities, how many are verified, and the columns of the target's step, by the first program."""
    if PART == S.PARTITIONS - 1:
        if program(_WARPS) == 0:
            words = draft_words(p, S)
            column = here(gl.arange(0, S.C, gl.SliceLayout(1, _table())))
            n = column % 8
            first = column - n
            live = gl.load(words + S.C + column, cache_modifier=".cg") >= 0
            slot = gl.load(words + S.C + first, cache_modifier=".cg")
            position = gl.load(words + 2 * S.C + first, cache_modifier=".cg")
            anchor = gl.load(words + first, cache_modifier=".cg")
            token, share = _proposals(p, q, column, live & (n > 0), S)
            token = gl.where(n == 0, anchor, token)
            gl.store(q.candidates + column, token, mask=live)
            gl.store(q.confidence + column, gl.where(n == 0, 1.0, share), mask=live)
            cta_barrier()
            most = gl.minimum(gl.minimum(gl.load(q.limits + column // 8), T.N - 1), T.MAX_LENGTH - 2 - position)
            verify = _verify_length(q, first, gl.where(slot >= 0, gl.maximum(most, 0), 0), S.C)
            gl.store(q.verify + column // 8, gl.where(slot >= 0, verify, -1), mask=n == 0)
            gl.store(p.words + column, token, mask=live)
            gl.store(p.words + S.C + column, gl.where(n <= verify, slot, -1))
            gl.store(p.words + 2 * S.C + column, position + n)


@gluon.jit
def _accepted(q, first, verify, assumed, C: gl.constexpr, next_ptr):
    """Proposals in a row that are what the column before them gave; with an assumed number that many, as far as they were verified."""
    accepted = first * 0
    agrees = first * 0 + 1
    for n in gl.static_range(1, 8):
        asked = n <= verify
        proposal = gl.load(q.candidates + first + n, mask=asked, other=-1, cache_modifier=".cg")
        given = gl.load(next_ptr + first + (n - 1), mask=asked, other=-2, cache_modifier=".cg")
        agrees = gl.where(proposal == given, agrees, 0)
        accepted += agrees
    return gl.where(assumed >= 0, gl.minimum(first * 0 + assumed, gl.maximum(verify, 0)), accepted)


@gluon.jit
def accept_phase(p, q, number, drafts, assumed, S: gl.constexpr, T: gl.constexpr, PART: gl.constexpr):
    """What round `number` commits, and the words of what follows, by the first program. Without drafts every column commits its token, and reads it next."""
    if PART == S.PARTITIONS - 1:
        if program(_WARPS) == 0:
            words, context = draft_words(p, S), context_words(p, S)
            column = here(gl.arange(0, S.C, gl.SliceLayout(1, _table())))
            n = column % 8
            first = column - n
            own_slot = gl.load(p.words + S.C + column, cache_modifier=".cg")
            position = gl.load(p.words + 2 * S.C + column, cache_modifier=".cg")
            token = best_of_columns(p, column, own_slot >= 0, S.C, S.V, _SLICES, _table())
            gl.store(p.next + column, token, mask=own_slot >= 0)
            committed = own_slot >= 0
            verify = first * 0 - 1
            cta_barrier()       # the tokens are there for all threads, and words are written behind their reads
            if drafts != 0:
                slot = gl.load(words + S.C + first, cache_modifier=".cg")
                start = gl.load(words + 2 * S.C + first, cache_modifier=".cg")
                verify = gl.load(q.verify + column // 8, cache_modifier=".cg")
                cta_barrier()
                accepted = _accepted(q, first, verify, assumed, S.C, p.next)
                committed = committed & (n <= accepted)
                anchor = gl.load(p.next + first + accepted, mask=slot >= 0, other=0, cache_modifier=".cg")
                begin = start + accepted + 1
                gl.store(words + column, anchor, mask=slot >= 0)
                gl.store(words + S.C + column, gl.where((n < T.N) & (begin + n < T.MAX_LENGTH), slot, -1))
                gl.store(words + 2 * S.C + column, begin + n)
                gl.store(q.committed + column // 8, gl.where(slot >= 0, accepted + 1, 0), mask=n == 0)
            else:
                gl.store(p.words + column, token, mask=committed)
                gl.store(p.words + 2 * S.C + column, position + 1, mask=committed)
            gl.store(context + S.C + column, gl.where(committed, own_slot, -1))
            gl.store(context + 2 * S.C + column, position)
            if T.PHASE == "rounds":
                gl.store(p.ring_tokens + number * S.C + column, gl.where(committed, token, -1))
                gl.store(q.ring_verify + number * (S.C // 8) + column // 8, verify, mask=n == 0)
                count_step(p, number, _WARPS)
