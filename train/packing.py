"""Which row a training step reads: pure functions of (seed, index), so that a resumed run needs no state."""

from collections.abc import Sequence

import numpy as np


def cut_rows(token_ids: Sequence[int], *, length: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive rows of `length` tokens plus the one they predict; a shorter tail is left out."""
    return [(s, s + length + 1) for s in range(0, len(token_ids) - length, length)]


def pack_documents(lengths: Sequence[int], *, row_length: int) -> list[list[int]]:
    """Documents by row so that none is split and rows are nearly full: best fit, longest first. Indices of documents no longer than a row."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]   # [free tokens] -> rows
    for i in sorted((i for i, n in enumerate(lengths) if 0 < n <= row_length), key=lambda i: -lengths[i]):
        free = next((f for f in range(lengths[i], row_length + 1) if with_room[f]), None)
        if free is None:
            rows.append([])
            row, free = len(rows) - 1, row_length
        else:
            row = with_room[free].pop()
        rows[row].append(i)
        with_room[free - lengths[i]].append(row)
    return rows


def spread(count: int, *, limit: int) -> list[int]:
    """At most `limit` of range(count), evenly spaced."""
    if count <= limit:
        return list(range(count))
    return [i * count // limit for i in range(limit)]


def pick_row(index: int, *, seed: int, weights: Sequence[float], num_rows: Sequence[int]) -> tuple[int, int]:
    """(source, row) of the index-th training row: the source by weight, its row uniformly (with replacement)."""
    rng = np.random.default_rng([seed, index])
    shares = np.asarray(weights, dtype=np.float64)
    source = int(rng.choice(len(shares), p=shares / shares.sum()))
    return source, int(rng.integers(num_rows[source]))
