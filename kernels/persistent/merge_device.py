# Device code has no Python types.
# ruff: noqa: RUF005 (a tuple of tensors grows by +)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""How the partial results of a span are added up: by the item of a run and head that comes last, or by all programs; see attention_device.py.

A span's partial results are rows in the order of key/value head, column, query head. Both run `_merge_rows`: ROWS rows at once, in each AT_ONCE spans whose
partial results are all loaded before the first is used. The item that comes last has the rows of one column or a few, one a warp; a program of all has one
row and gives its warps a part of the spans each. The largest maximum so far is carried from one round of spans to the next, so nothing is read twice.

Or partial results are words that carry a tag (tagged.py), and whoever has nothing else to do meanwhile polls for them, two rows at a time, a lane for every
dimension (`merge_tagged`): no barrier and no atomic lies between a span and its sum. Additions are written as the fused ones that they are to be, so that
these bits do not depend on the code around them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import cta_barrier

_PLACES = gl.constexpr(8)      # spans of a row that a lane polls for at once
_OF_A_WARP = gl.constexpr(4)   # spans of a row that a warp loads at once


@gluon.constexpr_function
def row_lanes(width, num_warps):
    """[rows, width]: a warp has whole rows (two where they are 16 wide)."""
    vector = max(1, width // 32)
    return gl.BlockedLayout([1, vector], [32 * vector // width, width // vector], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def span_lanes(rows, width, of_a_warp, num_warps):
    """[rows, spans, width]: a warp has whole rows of spans."""
    return gl.BlockedLayout([1, of_a_warp, width // 32], [1, 1, 32], [rows, num_warps // rows, 1], [2, 1, 0])


@gluon.jit
def nothing():
    """0, but the compiler does not know: what is added to it is computed where it is used, and not before the partitions part, to be kept on the stack."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exp2(x):
    """Of at most 0; below 2**-126 zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _merge_rows(mixed_ptr, stats_ptr, out_ptr, first, count, spans, ROWS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr,
                NUM_WARPS: gl.constexpr):
    """Add the spans of `count` rows from row `first` of a span's. spans: how many they have."""
    R: gl.constexpr = H // G
    LAYOUT: gl.constexpr = span_lanes(ROWS, 2 * HALF, _OF_A_WARP, NUM_WARPS)
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)     # [rows, spans]
    MIXED: gl.constexpr = gl.SliceLayout(1, LAYOUT)     # [rows, width]
    AT_ONCE: gl.constexpr = _OF_A_WARP * (NUM_WARPS // ROWS)
    d = gl.arange(0, 2 * HALF, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    s = nothing() + gl.arange(0, AT_ONCE, gl.SliceLayout(0, PAIRS))
    i = gl.arange(0, ROWS, gl.SliceLayout(1, PAIRS))
    offset = s[None, :] * (C * H) + i[:, None]
    largest = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, PAIRS))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, PAIRS))
    mixed = gl.zeros((ROWS, 2 * HALF), gl.float32, MIXED)
    for base in range(0, spans, AT_ONCE):
        at = base * (C * H) + first
        mask = (i < count)[:, None] & (s < spans - base)[None, :]
        stats = stats_ptr + at * 2 + offset * 2
        peak = gl.load(stats, mask=mask, other=-float("inf"), cache_modifier=".cg")
        sum_ = gl.load(stats + 1, mask=mask, other=0.0, cache_modifier=".cg")
        wide = gl.expand_dims(offset * (2 * HALF), 2) + gl.expand_dims(gl.expand_dims(d, 0), 1)
        part = gl.load(mixed_ptr + at * (2 * HALF) + wide, mask=gl.expand_dims(mask, 2) & (wide >= 0), other=0.0, cache_modifier=".cg")
        new = gl.maximum(largest, gl.max(peak, 1))
        kept = exp2(largest - new)
        share = gl.where(mask, exp2(peak - new[:, None]), 0.0)
        largest = new
        total = total * kept + gl.sum(share * sum_, 1)
        mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(1, MIXED))[:, None] + gl.sum(gl.expand_dims(share, 2) * part, 1)
    row = first + nothing() + gl.arange(0, ROWS, gl.SliceLayout(1, MIXED))
    to = (row // R % C * H + row // (R * C) * R + row % R) * (2 * HALF)
    divisor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, MIXED))[:, None]
    gl.store(out_ptr + to[:, None] + gl.arange(0, 2 * HALF, gl.SliceLayout(0, MIXED))[None, :], (mixed * divisor).to(gl.bfloat16),
             mask=(row < first + count)[:, None])


@gluon.jit
def merge_arrived(mixed_ptr, stats_ptr, arrivals_ptr, out_ptr, first_column, num_columns, spans, group, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
                  HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Behind an item's partial results: the item of a run and head that comes last adds up all of them."""
    R: gl.constexpr = H // G
    arrivals = arrivals_ptr + first_column * G + group
    cta_barrier()   # the atomic below is one thread's, and releases what all have stored
    if gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == spans - 1:
        for base in range(0, num_columns * R, NUM_WARPS):
            _merge_rows(mixed_ptr, stats_ptr, out_ptr, (group * C + first_column) * R + base, num_columns * R - base, spans, NUM_WARPS, C, H, G, HALF,
                        NUM_WARPS)
        gl.store(arrivals, 0)   # for the next layer


@gluon.jit
def spans_of_row(spans_ptr, row, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr):
    """0 for a row of a dead column, and behind the last."""
    return gl.load(spans_ptr + row // (H // G) % C, mask=row < C * H, other=0)


@gluon.jit
def merge_columns(mixed_ptr, stats_ptr, spans_ptr, out_ptr, number, first_spans, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
                  HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """All partial results, by all programs, behind a barrier over the grid. first_spans: `spans_of_row` of row `number`, loaded before the barrier."""
    row = number + 0
    spans = first_spans
    while row < C * H:
        then_spans = spans_of_row(spans_ptr, row + PROGRAMS, C, H, G)
        if spans > 0:
            _merge_rows(mixed_ptr, stats_ptr, out_ptr, row, 1, spans, 1, C, H, G, HALF, NUM_WARPS)
        row += PROGRAMS
        spans = then_spans


# --- words with tags ---


@gluon.constexpr_function
def _spans_ptx(places, words, stride):
    """Values of `words` words (1, or 2 neighbours) of every place out; then address, how many places live, tag, address of the fault word, most polls.

    The lanes of a warp poll until all have theirs, by votes: else the assembler takes the rest of the kernel for one whose lanes may have parted.
    """
    number = places * words
    address, count, tag, fault, most = (f"${number + i}" for i in range(5))
    lines = [f"// {words} words of {places} spans, {stride} words apart", f".reg .pred p, live<{places}>;", ".reg .b32 polls, other, now;",
             f".reg .b32 tag<{number}>;", f".reg .b64 word<{number}>;", "mov.u32 polls, 0;"]
    lines += [f"setp.gt.s32 live{place}, {count}, {place};" for place in range(places)]
    lines += [f"mov.b64 word{i}, {{polls, {tag}}};" for i in range(number)] + ["POLL:"]
    for place in range(places):
        at = f"[{address} + {8 * place * stride}]"
        if words == 1:
            lines.append(f"@live{place} ld.relaxed.gpu.global.b64 word{place}, {at};")
        else:
            lines.append(f"@live{place} ld.relaxed.gpu.global.v2.b64 {{word{2 * place}, word{2 * place + 1}}}, {at};")
    lines += [f"mov.b64 {{${i}, tag{i}}}, word{i};" for i in range(number)] + [f"xor.b32 other, tag0, {tag};"]
    for i in range(1, number):
        lines += [f"xor.b32 now, tag{i}, {tag};", "or.b32 other, other, now;"]
    lines += ["setp.ne.u32 p, other, 0;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra DONE;", "add.u32 polls, polls, 1;", "and.b32 now, polls, 1023;",
              "setp.ne.u32 p, now, 0;", "@p bra POLL;", f"ld.relaxed.gpu.global.u32 now, [{fault}];", f"setp.ge.u32 p, polls, {most};",
              "@p mov.u32 now, 1;", f"@p st.relaxed.gpu.global.u32 [{fault}], now;", "setp.ne.u32 p, now, 0;", "vote.sync.any.pred p, p, 0xffffffff;",
              "@!p bra POLL;", "DONE:"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _spans_constraints(number):
    return ",".join(["=&r"] * number + ["l", "r", "r", "l", "r"])


@gluon.constexpr_function
def _spans_types(number):
    return (gl.int32,) * number


@gluon.jit
def _poll_spans(words_ptr, count, tag, fault, polls, WORDS: gl.constexpr, STRIDE: gl.constexpr):
    """fp32: of _PLACES spans, STRIDE words apart, each WORDS words that lie together, once they have the tag; 0 of spans from `count` on."""
    NUMBER: gl.constexpr = _PLACES * WORDS
    ptx: gl.constexpr = _spans_ptx(_PLACES, WORDS, STRIDE)
    constraints: gl.constexpr = _spans_constraints(NUMBER)
    found = gl.inline_asm_elementwise(ptx, constraints, [words_ptr.to(gl.int64, bitcast=True), count, tag, fault, polls], dtype=_spans_types(NUMBER),
                                      is_pure=False, pack=1)
    values = ()
    for i in gl.static_range(NUMBER):
        values = values + (found[i].to(gl.float32, bitcast=True),)
    return values


@gluon.jit
def merge_tagged(mixed_ptr, stats_ptr, spans_ptr, out_ptr, number, tag, fault_ptr, polls, PROGRAMS: gl.constexpr, C: gl.constexpr, H: gl.constexpr,
                 G: gl.constexpr, HALF: gl.constexpr, NUM_WARPS: gl.constexpr):
    """All partial results, by all programs, two rows of a span's at once. Statistics are polled for first, then what they weigh, by each lane for itself."""
    R: gl.constexpr = H // G
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, NUM_WARPS // 2], [1, 0])
    i = nothing() + gl.arange(0, 2, gl.SliceLayout(1, LANES))[:, None]
    d = gl.arange(0, 2 * HALF, gl.SliceLayout(0, LANES))[None, :]
    none = i * 0 + d * 0
    for first in range(number, C * H, 2 * PROGRAMS):
        its_spans = spans_of_row(spans_ptr, first, C, H, G)
        then_spans = spans_of_row(spans_ptr, first + PROGRAMS, C, H, G)
        row = first + i * PROGRAMS + d * 0
        spans = gl.where(i == 0, its_spans, then_spans) + none
        fault = none.to(gl.int64) + fault_ptr.to(gl.int64, bitcast=True)
        largest = gl.full((2, 2 * HALF), -float("inf"), gl.float32, LANES)
        total = gl.zeros((2, 2 * HALF), gl.float32, LANES)
        mixed = gl.zeros((2, 2 * HALF), gl.float32, LANES)
        for base in range(0, gl.maximum(its_spans, then_spans), _PLACES):
            left = spans - base
            at = gl.where(left > 0, base * (C * H) + row, 0)
            stats = _poll_spans(stats_ptr + at * 4, left, none + tag, fault, none + polls, 2, C * H * 2)
            parts = _poll_spans(mixed_ptr + (at * (4 * HALF) + d * 2), left, none + tag, fault, none + polls, 1, C * H * 2 * HALF)
            new = largest
            for k in gl.static_range(_PLACES):
                new = gl.where(left > k, gl.maximum(new, stats[2 * k]), new)
            kept = exp2(largest - new)
            share = gl.where(left > 0, exp2(stats[0] - new), 0.0)
            added = share * stats[1]
            weighed = share * parts[0]
            for k in gl.static_range(1, _PLACES):
                share = gl.where(left > k, exp2(stats[2 * k] - new), 0.0)
                added = gl.fma(share, stats[2 * k + 1], added)
                weighed = gl.fma(share, parts[k], weighed)
            total = gl.where(left > 0, gl.fma(total, kept, added), total)
            mixed = gl.where(left > 0, gl.fma(mixed, kept, weighed), mixed)
            largest = new
        to = (row // R % C * H + row // (R * C) * R + row % R) * (2 * HALF) + d
        gl.store(out_ptr + to, (mixed * (1.0 / total)).to(gl.bfloat16), mask=spans > 0)
