"""Pure figures: percentiles, pooled speed, the first difference of two token sequences, and 'not measured'."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

NOT_MEASURED = "not_measured"


def not_measured(reason: str) -> dict[str, str]:
    """Stands in a report where a figure would, when there is none."""
    return {NOT_MEASURED: reason}


def reason_of(figure: Any) -> str | None:
    """Why a figure was not measured; None when it was."""
    return figure.get(NOT_MEASURED) if isinstance(figure, dict) else None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, linear between neighbours. Errors: ValueError for no values."""
    if not values:
        raise ValueError("percentile: at least one value is needed; got none.")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with p20 and p80."""
    return {"median": percentile(values, 0.5), "p20": percentile(values, 0.2), "p80": percentile(values, 0.8)}


def pooled_speed(requests: Iterable[tuple[int, float]]) -> dict[str, Any]:
    """Tokens per second over (tokens, seconds) of several requests: all tokens by all seconds, and the spread of the single speeds.

    A request without a decoded token or without time between its tokens has no speed and is left out; `requests` counts the rest.
    """
    timed = [(tokens, seconds) for tokens, seconds in requests if tokens > 0 and seconds > 0]
    if not timed:
        return dict(not_measured("no request has a token after its first text"))
    tokens, seconds = sum(t for t, _ in timed), math.fsum(s for _, s in timed)
    return {"requests": len(timed), "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, **spread([t / s for t, s in timed])}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two sequences differ, the end of the shorter one included; None when they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def cost_per_million_tokens(*, price_per_hour: float, tokens_per_s: float) -> float:
    return price_per_hour / 3600 / tokens_per_s * 1e6
