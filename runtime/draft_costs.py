"""What a round costs by the proposals it verifies: measured, smoothed, and told apart from guesses.

Times of the rounds themselves are kept, draft included, so whatever a further column costs on this machine (experts that no other column needs,
a second tile, attention) is in them. Of each length the median of the last few counts: one slow round in the middle of many changes nothing. Medians are
then made not to fall with the length, by pooling neighbours that do (isotonic regression; the weights are the numbers of rounds), so that noise never
makes more columns look cheaper than fewer. A length that was not measured lies on the line between its measured neighbours; beyond the longest it
costs as much as that one, which invites a look at it; both are said to be guesses.

Source: pool adjacent violators, Ayer et al. 1955.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

PLAIN = -1          # as a length: a round without a draft
WINDOW = 15         # rounds of a length whose median counts
MIN_ROUNDS = 3      # of plain decoding and of full length before their medians are used without asking for more
REFRESH = 128       # drafted rounds after which plain decoding, and full length, are measured again
REFIT = 8           # rounds between two fits, once there were FIRST_ROUNDS: a fit takes tens of microseconds
FIRST_ROUNDS = 64


@dataclass(frozen=True, kw_only=True)
class Cost:
    seconds: float
    is_measured: bool


@dataclass
class CostCurve:
    """Times of rounds at one number of concurrent sequences, for chains or for trees."""

    _times: dict[int, deque[float]] = field(default_factory=dict)
    _draft_times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _since_plain: int = 0
    _since_full: int = 0
    _num_rounds: int = 0
    _fitted: dict[int, float] | None = None
    _costs: dict[int, list[Cost] | None] = field(default_factory=dict)     # by the most that was asked for, of this fit

    def add(self, length: int, seconds: float, *, draft_s: float = 0.0) -> None:
        """A round that verified so many proposals, or PLAIN. draft_s: of `seconds`, what the draft took."""
        if seconds <= 0 or length < PLAIN:
            raise ValueError(f"cost: needs a time above 0 and a length of at least {PLAIN}; got {seconds} s for {length}.")
        self._times.setdefault(length, deque(maxlen=WINDOW)).append(seconds)
        self._num_rounds += 1
        if self._num_rounds <= FIRST_ROUNDS or self._num_rounds % REFIT == 0:
            self._fitted = None
            self._costs.clear()
        if length == PLAIN:
            self._since_plain = 0
        else:
            self._draft_times.append(draft_s)
            self._since_plain += 1
            self._since_full += 1

    def wants_plain(self) -> bool:
        """Whether plain decoding was measured too seldom or too long ago."""
        return len(self._times.get(PLAIN, ())) < MIN_ROUNDS or self._since_plain >= REFRESH

    def wants_full(self, most: int) -> bool:
        """Whether the full length was; asking resets the count."""
        if len(self._times.get(most, ())) >= MIN_ROUNDS and self._since_full < REFRESH:
            return False
        self._since_full = 0
        return True

    @property
    def plain_s(self) -> float | None:
        """Of a round without a draft; None: not measured."""
        return self._fit().get(PLAIN)

    def medians(self) -> dict[int, float]:
        """As measured, by length, PLAIN among them."""
        return {length: statistics.median(times) for length, times in sorted(self._times.items())}

    def costs(self, most: int) -> list[Cost] | None:
        """[v] for v = 0..most; None where no drafted round was measured."""
        if most not in self._costs:
            self._costs[most] = self._costs_up_to(most)
        return self._costs[most]

    def _costs_up_to(self, most: int) -> list[Cost] | None:
        known = dict(self._fit())
        plain_s = known.pop(PLAIN, None)
        if not known:
            return None
        measured = frozenset(known)
        if 0 not in known:   # a draft of which nothing is verified: plain decoding and the draft
            shortest = known[min(known)]
            known[0] = shortest if plain_s is None else min(shortest, plain_s + statistics.median(self._draft_times))
        return [Cost(seconds=_on_line(known, v), is_measured=v in measured) for v in range(most + 1)]

    def _fit(self) -> dict[int, float]:
        if self._fitted is None:
            self._fitted = isotonic(self.medians(), weights={length: len(times) for length, times in self._times.items()})
        return self._fitted


def isotonic(values: dict[int, float], *, weights: dict[int, int]) -> dict[int, float]:
    """The non-decreasing values nearest to these in weighted squares, by ascending key."""
    pools: list[tuple[float, int, list[int]]] = []
    for key in sorted(values):
        value, weight, keys = values[key], weights[key], [key]
        while pools and pools[-1][0] > value:
            other, other_weight, other_keys = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, keys = weight + other_weight, other_keys + keys
        pools.append((value, weight, keys))
    return {key: value for value, _, keys in pools for key in keys}


def _on_line(known: dict[int, float], length: int) -> float:
    below = max(k for k in known if k <= length)
    above = min((k for k in known if k >= length), default=below)
    if above == below:
        return known[below]
    return known[below] + (known[above] - known[below]) * (length - below) / (above - below)
