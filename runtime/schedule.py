"""Which columns of which requests make the next step.

A step has C columns. Decoding comes first: a request that decodes has one column, or its anchor and the proposals to verify, and they go together or
not at all. Prompts fill what is left, at most 8 columns each, in pieces of any size. Among equals those come first that have waited longest, and the one
that has waited longest of all comes first whatever it is: so with more wishes than columns nobody, a prompt among many that decode included, waits for more
steps than there are requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.persistent.plan import RUN_COLUMNS


@dataclass(frozen=True, kw_only=True)
class Want:
    """What one request would like to read next."""

    columns: int            # 1..RUN_COLUMNS
    divisible: bool         # part of a prompt: fewer columns will do


def choose_columns(wants: Sequence[Want], *, num_columns: int) -> list[tuple[int, int]]:
    """(place among `wants`, columns) of those that take part, in order of their places.

    wants: those that waited longest first. Errors: ValueError for a wish of no columns or of more than a sequence can have.
    """
    for want in wants:
        if not 1 <= want.columns <= min(RUN_COLUMNS, num_columns):
            raise ValueError(f"schedule: a sequence has 1 to {min(RUN_COLUMNS, num_columns)} columns in a step; got {want.columns}.")
    taken: dict[int, int] = {}
    free = num_columns
    for place in sorted(range(len(wants)), key=lambda place: (place > 0, wants[place].divisible, place)):
        want = wants[place]
        columns = min(want.columns, free) if want.divisible or want.columns <= free else 0
        if columns:
            taken[place] = columns
            free -= columns
    return sorted(taken.items())
