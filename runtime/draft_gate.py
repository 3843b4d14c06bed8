"""Whether to draft at all: a gate that closes when drafting has not paid for long enough, and tries again now and then.

The gain of drafting is tokens per second with drafts over tokens per second without. A drafted round that committed t tokens at the cost of c plain
rounds won x = t - c tokens, and the gain is below one where the mean of x is below 0.

Closing: over the newest rounds the upper end of a one-sided 99 % confidence interval of the mean lies below 0: mean + T_99 * s / sqrt(m) < 0, s being the
sample's deviation. m is at least MIN_ROUNDS; of more rounds the newest WINDOW are looked at, for text that changed, and the newest LONG_WINDOW, for a loss
of a few percent that shows over many rounds only. The test is repeated, so over a long text it errs more often than one time in a hundred; an error costs
the rounds up to the next probe and no more. T_99 is exact for normal x and MIN_ROUNDS of them; x is a count less a cost, and near enough.
Probing: after `interval` rounds without a draft, PROBE_ROUNDS are drafted, and as long as they gained (mean of x at least 0) up to MIN_ROUNDS; then the gate
is open again, and the test above goes on from there. Else it stays closed. The interval starts at FIRST_INTERVAL and doubles with every probe that gained
nothing or whose gate closed again before WINDOW rounds, up to MAX_INTERVAL or to where what the last one lost is MAX_LOSS of the plain rounds between two,
whichever is less; it starts over where the gate stayed open for WINDOW rounds.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

MIN_ROUNDS = 16
WINDOW, LONG_WINDOW = 64, 256
TEST_EVERY = 8            # rounds
T_99 = 2.602              # Student's t, 15 degrees of freedom, one-sided 99 %: that of the fewest rounds; for more it is on the safe side
PROBE_ROUNDS = 4
FIRST_INTERVAL, MAX_INTERVAL = 64, 4096
MAX_LOSS = 0.01


@dataclass
class Gate:
    """Of one request, or of all requests with one domain key."""

    is_open: bool = True
    num_closed: int = 0
    num_opened: int = 0
    interval: int = FIRST_INTERVAL
    _rounds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LONG_WINDOW))   # (tokens, cost in plain rounds) since the last change
    _since_change: int = 0
    _without: int = 0
    _before: tuple[float, int] | None = None     # gain of the last rounds before they were forgotten, and how many

    def copy(self) -> "Gate":
        """A gate in the same state whose switches are its own."""
        return Gate(is_open=self.is_open, interval=self.interval, _rounds=deque(self._rounds, maxlen=LONG_WINDOW), _since_change=self._since_change,
                    _without=self._without, _before=self._before)

    @property
    def is_due(self) -> bool:
        """Whether the next round drafts."""
        return self.is_open or self._without >= self.interval

    def wants_draft(self) -> bool:
        """The same, asked once a round: it counts those without."""
        if self.is_due:
            return True
        self._without += 1
        return False

    def add(self, *, tokens: int, cost: float) -> None:
        """A drafted round: what it committed, and its cost in plain rounds."""
        self._rounds.append((tokens, cost))
        self._since_change += 1
        if self.is_open:
            if self._since_change == WINDOW:
                self.interval = FIRST_INTERVAL
            if self._since_change % TEST_EVERY == 0 and (self._loses(WINDOW) or self._loses(LONG_WINDOW)):
                self._change(to_open=False)
        elif len(self._rounds) >= PROBE_ROUNDS:
            if self._mean() < 0:
                self._forget(longer=True)
            elif len(self._rounds) >= MIN_ROUNDS:
                self._change(to_open=True)

    @property
    def gain(self) -> tuple[float, int] | None:
        """Tokens per second with drafts over those without, and over how many drafted rounds, the newest; None before the first."""
        if not self._rounds:
            return self._before
        return sum(t for t, _ in self._rounds) / sum(c for _, c in self._rounds), len(self._rounds)

    def _mean(self) -> float:
        return statistics.fmean(t - c for t, c in self._rounds)

    def _loses(self, window: int) -> bool:
        """Over the newest rounds, at most so many."""
        won = [t - c for t, c in self._rounds][-window:]
        if len(won) < MIN_ROUNDS:
            return False
        mean = sum(won) / len(won)
        variance = sum((x - mean) ** 2 for x in won) / (len(won) - 1)
        return mean + T_99 * math.sqrt(variance / len(won)) < 0

    def _change(self, *, to_open: bool) -> None:
        if to_open:
            self.num_opened += 1
        else:
            self.num_closed += 1
            self._forget(longer=self.num_opened > 0 and self._since_change < WINDOW)
        self.is_open, self._since_change = to_open, 0

    def _forget(self, *, longer: bool) -> None:
        """Closed from here on: what the next probe finds is not weighed against what is past."""
        if longer:
            enough = math.ceil(max(0.0, -self._mean()) * len(self._rounds) / MAX_LOSS)
            self.interval = max(self.interval, min(MAX_INTERVAL, 2 * self.interval, enough))
        self._before = self.gain
        self._rounds.clear()
        self._without = 0
