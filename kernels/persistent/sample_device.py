# Device code has no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# ruff: noqa: SIM102 (one condition may be known when compiling and the next not)
"""The next token of every column: the largest logit or, with a temperature, the largest of logit / temperature plus Gumbel noise.

The rule of `dflash/sampling.py` without top_k and top_p, which take another look at all logits: columns that ask for those are sampled by the host, from
the logits. Of equal scores the lowest id wins. Noise is `sampling/noise.py`'s, of (seed, position) alone, in fp64 as there: to the last bit unless the
logarithms of two libraries round apart.

Each of SLICES parts of the vocabulary is one consumer's, which leaves its best score and id; behind a barrier whoever wants a token takes the best of
SLICES. The order of comparisons decides nothing, so a token depends on its column alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import cta_barrier, here
from ..sampling.noise import PHILOX_M, PHILOX_W
from .plan import words_cache

_M0, _M1 = (gl.constexpr(m) for m in PHILOX_M)
_W0, _W1 = (gl.constexpr(w) for w in PHILOX_W)
_NO_TOKEN = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def _gumbel(token, position, seed_low, seed_high):
    """Noise of tokens at a position: Philox 4x32-10 with counter (token / 4, position, 0, 0), whose word token % 4 is the token's."""
    c0 = (token // 4).to(gl.uint32)
    c1 = gl.zeros_like(c0) + position.to(gl.uint32)
    c2 = gl.zeros_like(c0)
    c3 = gl.zeros_like(c0)
    k0 = gl.zeros_like(c0) + seed_low.to(gl.uint32)
    k1 = gl.zeros_like(c0) + seed_high.to(gl.uint32)
    m0 = gl.full_like(c0, _M0)
    m1 = gl.full_like(c0, _M1)
    for _ in gl.static_range(10):
        high0, low0 = gl.umulhi(c0, m0), c0 * m0
        high1, low1 = gl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += gl.full_like(k0, _W0)
        k1 += gl.full_like(k1, _W1)
    word = token % 4
    bits = gl.where(word == 0, c0, gl.where(word == 1, c1, gl.where(word == 2, c2, c3)))
    uniform = (bits.to(gl.float64) + 0.5) * 2.0**-32
    return (-gl.log(-gl.log(uniform))).to(gl.float32)


@gluon.jit
def sample_slices(p, number, step, C: gl.constexpr, V: gl.constexpr, SLICES: gl.constexpr, PARTITIONS: gl.constexpr, PROGRAMS: gl.constexpr, ASKS: gl.constexpr,
                  NUM_WARPS: gl.constexpr, CHANGE: gl.constexpr = False):
    """The best of each slice of each live column. ASKS: the first of them also asks the host whether to stop, as a read of its memory takes long.
    CHANGE: whether the columns' words do inside a launch."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    BLOCK: gl.constexpr = NUM_WARPS * 32
    WIDTH: gl.constexpr = (V + SLICES - 1) // SLICES
    lane = here(gl.arange(0, BLOCK, LANES))
    if ASKS:
        if number == PARTITIONS - 1:
            wants = gl.inline_asm_elementwise("ld.relaxed.sys.global.u32 $0, [$1];", "=r,l", [(lane * 0).to(gl.int64) + p.host_stop.to(gl.int64, bitcast=True)],
                                              dtype=gl.int32, is_pure=False, pack=1)
            gl.store(p.stop + lane, wants, mask=lane == 0)
    for unit in range(number, C * SLICES, PROGRAMS * PARTITIONS):
        column, first = unit // SLICES, unit % SLICES * WIDTH
        if gl.load(p.words + C + column, cache_modifier=words_cache(CHANGE)) >= 0:
            temperature = gl.load(p.words + 3 * C + column).to(gl.float32, bitcast=True)
            position = gl.load(p.words + 2 * C + column, cache_modifier=words_cache(CHANGE)) + step + 1
            seed_low = gl.load(p.words + 6 * C + column)
            seed_high = gl.load(p.words + 7 * C + column)
            best = gl.full((BLOCK,), -float("inf"), gl.float32, LANES)
            best_id = gl.full((BLOCK,), _NO_TOKEN, gl.int32, LANES)
            for base in range(0, WIDTH, BLOCK):
                token = first + base + lane
                inside = (base + lane < WIDTH) & (token < V)
                score = gl.load(p.logits + column * V + token, mask=inside, other=-float("inf"), cache_modifier=".cg")
                if temperature != 0.0:
                    score = gl.div_rn(score, gl.full((BLOCK,), 1.0, gl.float32, LANES) * temperature) + _gumbel(token, position, seed_low, seed_high)
                better = score > best       # ids of a lane ascend
                best_id = gl.where(better, token, best_id)
                best = gl.where(better, score, best)
            peak = gl.max(best, 0)
            gl.store(p.best + unit, peak)
            gl.store(p.best_ids + unit, gl.min(gl.where(best == peak, best_id, _NO_TOKEN), 0))


@gluon.jit
def best_of_column(p, column, SLICES: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The token of a column, behind a barrier over the grid."""
    i = column * SLICES + here(gl.arange(0, SLICES, gl.BlockedLayout([1], [32], [NUM_WARPS], [0])))
    score = gl.load(p.best + i, cache_modifier=".cg")
    return gl.min(gl.where(score == gl.max(score, 0), gl.load(p.best_ids + i, cache_modifier=".cg"), _NO_TOKEN), 0)


@gluon.jit
def count_step(p, step, NUM_WARPS: gl.constexpr):
    """The host's ring has one row more; behind it are all stores of this consumer."""
    cta_barrier()
    lane = here(gl.arange(0, NUM_WARPS * 32, gl.BlockedLayout([1], [32], [NUM_WARPS], [0])))
    ptx: gl.constexpr = "{ .reg .pred first; setp.eq.u32 first, $1, 0; @first st.release.sys.global.u32 [$2], $3; mov.u32 $0, 0; }"
    gl.inline_asm_elementwise(ptx, "=r,r,l,r", [lane, (lane * 0).to(gl.int64) + p.ring_count.to(gl.int64, bitcast=True), lane * 0 + step + 1],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def best_of_columns(p, column, live, C: gl.constexpr, V: gl.constexpr, SLICES: gl.constexpr, TABLE: gl.constexpr):
    """The tokens of all live columns, behind a barrier over the grid."""
    cell = column[:, None] * SLICES + here(gl.arange(0, SLICES, gl.SliceLayout(0, TABLE)))[None, :]
    score = gl.load(p.best + cell, mask=live[:, None], other=0.0, cache_modifier=".cg")
    ids = gl.load(p.best_ids + cell, mask=live[:, None], other=0, cache_modifier=".cg")
    token = gl.min(gl.where(score == gl.max(score, 1)[:, None], ids, _NO_TOKEN), 1)
    return gl.where(token < V, token, 0)


@gluon.jit
def finish(p, step, C: gl.constexpr, V: gl.constexpr, SLICES: gl.constexpr, TO_HOST: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The tokens of all live columns, to `next` and (-1 in dead columns) to the host's ring, which then counts one step more."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    column = here(gl.arange(0, C, gl.SliceLayout(1, TABLE)))
    live = gl.load(p.words + C + column) >= 0
    token = best_of_columns(p, column, live, C, V, SLICES, TABLE)
    gl.store(p.next + column, token, mask=live)
    if TO_HOST:
        gl.store(p.ring_tokens + step * C + column, gl.where(live, token, -1))
        count_step(p, step, NUM_WARPS)
