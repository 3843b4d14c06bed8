# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The work of a step's attention: which part of which sequence's cache is one item.

The cache is read in chunks of 128 positions, and chunks are grouped into spans. Both are absolute: where they begin depends on the position
alone, never on how long a sequence is or who else is there. The first 32 chunks are spans of their own, so a short context is spread
over many programs; from there every doubling of the context has 16 spans, so a long one does not drown in partial results:

    chunks   0..31  32 spans of 1        32..63  16 of 2        64..127  16 of 4        128..255  16 of 8        ...

A run is the columns of one sequence in a step: neighbours, at consecutive positions. Where there are few spans, a run is cut into parts of fewer columns,
as long as all rows are taken up at once: the cache is then read by several programs, and each has less to do. Where columns see those behind them, too (not
causal: a draft's block), the spans of every part reach to the run's end. A row of the plan is (part of a run, span), the largest spans first: a program takes
one item in order, and if there are more, one from the other end each further round. An item is a row and a key/value head. No column's operations depend on
how its run is cut.

The plan is the same for all layers with the same window, and positions change on the device, so one program makes it once a step.

Legend: C columns, N rows of the plan.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..moe.stream import here

CHUNK = 128
SINGLES = 32
PER_DOUBLING = 16
RUN_COLUMNS = 8     # the most columns of one sequence
FIELDS = 8
_CHUNK, _SINGLES = gl.constexpr(CHUNK), gl.constexpr(SINGLES)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows from `num_rows` on are not written.

    A row: first column of the run, columns of the run before the part * 256 + columns of the part (not causal: + columns of the run * 65536), position of
    the run's first column, sequence slot, first chunk, end chunk, the span's place among the part's, how many it has.
    """

    rows_N8: Tensor      # int32
    num_rows: Tensor     # int32 [1]
    spans_C: Tensor      # int32: spans of the column's part of a run, 0 for a dead column

    @staticmethod
    def empty(*, num_columns: int, max_length: int, device: torch.device) -> "Plan":
        return Plan(rows_N8=torch.empty(num_columns * num_spans(max_length), FIELDS, dtype=torch.int32, device=device),
                    num_rows=torch.zeros(1, dtype=torch.int32, device=device), spans_C=torch.zeros(num_columns, dtype=torch.int32, device=device))


def span_of(chunk: int) -> int:
    """The span that a chunk is in."""
    if chunk < SINGLES:
        return chunk
    doubling = (chunk // SINGLES).bit_length()
    return SINGLES + PER_DOUBLING * (doubling - 1) + ((chunk - (SINGLES << (doubling - 1))) >> doubling)


def chunks_of(span: int) -> tuple[int, int]:
    """First chunk of a span, and the one behind its last."""
    if span < SINGLES:
        return span, span + 1
    doubling, i = (span - SINGLES) // PER_DOUBLING + 1, (span - SINGLES) % PER_DOUBLING
    first = (SINGLES << (doubling - 1)) + (i << doubling)
    return first, first + (1 << doubling)


def num_spans(length: int) -> int:
    """Spans that `length` positions reach into."""
    return span_of((length - 1) // CHUNK) + 1


def class_of(span: int) -> int:
    """The class of a span: 0 for single chunks, e for spans of 2**e."""
    return 0 if span < SINGLES else (span - SINGLES) // PER_DOUBLING + 1


def num_classes(max_length: int) -> int:
    """Different sizes of spans."""
    return class_of(num_spans(max_length) - 1) + 1


def first_chunk(position: int, window: int | None) -> int:
    """The first chunk that a query at `position` sees; with a window W keys at position - W + 1 and on."""
    return 0 if window is None else max(0, position - window + 1) // CHUNK


def check_columns(slots: list[int], positions: list[int], *, max_length: int, num_sequences: int) -> None:
    """ValueError unless the live columns are runs: neighbours of one sequence at consecutive positions, at most 8, inside the context."""
    where, ends = "plan", dict[int, int]()
    for c, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue
        if slot >= num_sequences or not 0 <= position < max_length:
            raise ValueError(f"{where}: column {c} is position {position} of sequence slot {slot}; slots are 0..{num_sequences - 1} (below 0: dead) and "
                             f"positions 0..{max_length - 1}, the context.")
        if slot in ends and (ends[slot] != c or positions[c - 1] + 1 != position):
            raise ValueError(f"{where}: the columns of a sequence are neighbours at consecutive positions; got slot {slot} again in column {c} at "
                             f"position {position}.")
        ends[slot] = c + 1
        if c >= RUN_COLUMNS and slots[c - RUN_COLUMNS] == slot:
            raise ValueError(f"{where}: a sequence has at most {RUN_COLUMNS} columns in a step; slot {slot} has more. Take them in several steps.")


def plan_ref(slots_C: Tensor, positions_C: Tensor, *, max_length: int, window: int | None = None, at_once: int = 0, part_columns: int = RUN_COLUMNS,
             causal: bool = True) -> Plan:
    """The plan of a step. Shapes: int32 [C], a slot below 0 for a dead column. Runs are taken as they are: `check_columns` refuses others.

    at_once: rows that all programs together take up at once. part_columns: the most columns of a part, a power of two.
    """
    slots, positions = slots_C.tolist(), positions_C.tolist()
    plan = Plan.empty(num_columns=len(slots), max_length=max_length, device=slots_C.device)

    def rows_of(size: int) -> list[list[int]]:
        rows: list[list[int]] = []
        for c, slot in enumerate(slots):
            first_column = slots.index(slot)
            before = c - first_column
            if slot < 0 or before % size:
                continue
            run = slots.count(slot)
            count = min(size, run - before)
            chunks = first_chunk(positions[c], window), positions[c + count - 1 if causal else first_column + run - 1] // CHUNK + 1
            columns = before << 8 | count if causal else run << 16 | before << 8 | count
            spans = span_of(chunks[0]), span_of(chunks[1] - 1) + 1
            for span in range(*spans):
                first, end = chunks_of(span)
                rows.append([first_column, columns, positions[first_column], slot, max(first, chunks[0]), min(end, chunks[1]), span - spans[0],
                             spans[1] - spans[0]])
        return rows

    sizes = [1 << i for i in range(part_columns.bit_length())]
    rows = next((rows for size in sizes if len(rows := rows_of(size)) <= at_once), rows_of(part_columns))
    for first_column, columns, *_, spans in rows:
        before, count = columns >> 8 & 255, columns & 255
        plan.spans_C[first_column + before:first_column + before + count] = spans
    rows.sort(key=lambda row: -class_of(span_of(row[4])))   # stable: parts in order, spans ascending
    plan.rows_N8[:len(rows)] = torch.tensor(rows, dtype=torch.int32).view(-1, FIELDS)
    plan.num_rows[0] = len(rows)
    return plan


@gluon.constexpr_function
def _class_span(e):
    """The first span of class e, which has 1 or 2**e chunks."""
    return 0 if e == 0 else SINGLES + PER_DOUBLING * (e - 1)


@gluon.constexpr_function
def _class_chunk(e):
    """Its first chunk."""
    return 0 if e == 0 else SINGLES << (e - 1)


@gluon.jit
def _span_of(chunk, CLASSES: gl.constexpr):
    span = chunk
    for e in gl.static_range(1, CLASSES):
        span = gl.where(chunk >= _class_chunk(e), _class_span(e) + ((chunk - _class_chunk(e)) >> e), span)
    return span


@gluon.jit
def _part(index, count, start, size, CLASSES: gl.constexpr, WINDOW: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the part of a run that each column is in: columns before it, its own, first and last chunk, first span, spans."""
    before = index & (0 - size)
    own = gl.minimum(count - before, size)
    if CAUSAL:
        last_chunk = gl.where(count > 0, start + before + own - 1, 0) // _CHUNK
    else:
        last_chunk = gl.where(count > 0, start + count - 1, 0) // _CHUNK
    begin = start * 0
    if WINDOW > 0:
        begin = gl.maximum(gl.where(count > 0, start + before, 0) - (WINDOW - 1), 0) // _CHUNK
    first_span = _span_of(begin, CLASSES)
    return before, own, begin, last_chunk, first_span, gl.where(count > 0, _span_of(last_chunk, CLASSES) + 1 - first_span, 0)


@gluon.constexpr_function
def words_cache(change):
    """Modifier of loads of the columns' words, which may change inside a launch."""
    return ".cg" if change else ""


@gluon.jit
def plan_step(slots_ptr, positions_ptr, rows_ptr, num_rows_ptr, spans_ptr, C: gl.constexpr, CLASSES: gl.constexpr, WINDOW: gl.constexpr,
              AT_ONCE: gl.constexpr, PART_COLUMNS: gl.constexpr, NUM_WARPS: gl.constexpr, ahead=0, CAUSAL: gl.constexpr = True,
              CHANGE: gl.constexpr = False):
    """`plan_ref` by one program. WINDOW: 0 for none. ahead: how many steps the columns are ahead of the positions in memory. CHANGE: whether these
    do inside a launch."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    me = here(gl.arange(0, C, gl.SliceLayout(1, TABLE)))
    other = here(gl.arange(0, C, gl.SliceLayout(0, TABLE)))
    slot = gl.load(slots_ptr + me, cache_modifier=words_cache(CHANGE))
    position = gl.load(positions_ptr + other, cache_modifier=words_cache(CHANGE)) + ahead
    same = (slot[:, None] == gl.load(slots_ptr + other, cache_modifier=words_cache(CHANGE))[None, :]) & (slot >= 0)[:, None]
    count = gl.sum(same.to(gl.int32), 1)
    index = gl.sum((same & (other[None, :] < me[:, None])).to(gl.int32), 1)
    start = gl.where(count > 0, gl.min(gl.where(same, position[None, :], 0x7FFFFFFF), 1), 0)
    size = PART_COLUMNS + 0 * gl.max(count, 0)
    smaller = size >> 1
    while smaller > 0:      # the smallest parts whose rows are taken up at once
        before, own, begin, last_chunk, first_span, spans = _part(index, count, start, smaller, CLASSES, WINDOW, CAUSAL)
        size = gl.where(gl.sum(gl.where(index == before, spans, 0), 0) <= AT_ONCE, smaller, size)
        smaller = gl.where(size == smaller, smaller >> 1, 0)
    before, own, begin, last_chunk, first_span, spans = _part(index, count, start, size, CLASSES, WINDOW, CAUSAL)
    gl.store(spans_ptr + me, spans)
    lead = index == before      # a dead column has no spans
    i = here(gl.arange(0, _SINGLES, gl.SliceLayout(0, TABLE)))
    base = 0
    for e in gl.static_range(CLASSES - 1, -1, -1):
        lo = gl.maximum(first_span, _class_span(e))
        number = gl.where(lead, gl.maximum(gl.minimum(first_span + spans, _class_span(e + 1)) - lo, 0), 0)
        numbers = gl.convert_layout(number, gl.SliceLayout(0, TABLE))
        ahead_of = gl.sum(gl.where(other[None, :] < me[:, None], numbers[None, :], 0), 1)
        mask = i[None, :] < number[:, None]
        span = lo[:, None] + i[None, :]
        first = _class_chunk(e) + ((span - _class_span(e)) << e)
        row = rows_ptr + (base + ahead_of[:, None] + i[None, :]) * 8
        whole = span * 0
        part = before * 256 + own
        if not CAUSAL:
            part += count * 65536
        gl.store(row, (me - index)[:, None] + whole, mask=mask)
        gl.store(row + 1, part[:, None] + whole, mask=mask)
        gl.store(row + 2, start[:, None] + whole, mask=mask)
        gl.store(row + 3, slot[:, None] + whole, mask=mask)
        gl.store(row + 4, gl.maximum(first, begin[:, None]), mask=mask)
        gl.store(row + 5, gl.minimum(first + (1 << e), last_chunk[:, None] + 1), mask=mask)
        gl.store(row + 6, span - first_span[:, None], mask=mask)
        gl.store(row + 7, spans[:, None] + whole, mask=mask)
        base += gl.sum(numbers, 0)
    gl.store(num_rows_ptr, base)


@gluon.jit
def plan_kernel(slots_ptr, positions_ptr, rows_ptr, num_rows_ptr, spans_ptr, C: gl.constexpr, CLASSES: gl.constexpr, WINDOW: gl.constexpr,
                AT_ONCE: gl.constexpr, PART_COLUMNS: gl.constexpr, CAUSAL: gl.constexpr, NUM_WARPS: gl.constexpr):
    plan_step(slots_ptr, positions_ptr, rows_ptr, num_rows_ptr, spans_ptr, C, CLASSES, WINDOW, AT_ONCE, PART_COLUMNS, NUM_WARPS, 0, CAUSAL)
