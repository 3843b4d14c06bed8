"""When drafting is switched off and on: the rule, its errors, and what probing costs. No model."""

import random
from collections.abc import Callable

import pytest

from kilotok.runtime.draft_gate import FIRST_INTERVAL, MAX_INTERVAL, MIN_ROUNDS, PROBE_ROUNDS, WINDOW, Gate


def run(gate: Gate, rounds: int, *, tokens: Callable[[], int], cost: float) -> int:
    """So many rounds under a gate; those that drafted."""
    drafted = 0
    for _ in range(rounds):
        if gate.wants_draft():
            gate.add(tokens=tokens(), cost=cost)
            drafted += 1
    return drafted


def geometric(draw: random.Random, share: float) -> Callable[[], int]:
    """Tokens of a round whose every proposal of seven is right with this chance."""
    def tokens() -> int:
        count = 1
        while count < 8 and draw.random() < share:
            count += 1
        return count
    return tokens


def test_a_draft_that_is_never_right_is_off_after_the_fewest_rounds() -> None:
    gate = Gate()
    assert run(gate, MIN_ROUNDS, tokens=lambda: 1, cost=1.3) == MIN_ROUNDS
    assert not gate.is_open and gate.num_closed == 1 and gate.gain == (pytest.approx(1 / 1.3), MIN_ROUNDS)
    assert run(gate, FIRST_INTERVAL, tokens=lambda: 1, cost=1.3) == 0


def test_a_draft_that_pays_stays_on_and_is_not_looked_at_again() -> None:
    gate = Gate()
    assert run(gate, 500, tokens=geometric(random.Random(0), 0.6), cost=1.5) == 500
    assert gate.is_open and gate.num_closed == 0 and gate.gain is not None and gate.gain[0] > 1.4


def test_probes_come_at_growing_intervals() -> None:
    gate, probes, since = Gate(), [], 0
    run(gate, MIN_ROUNDS, tokens=lambda: 1, cost=12.0)
    for _ in range(4 * MAX_INTERVAL):
        if gate.wants_draft():
            gate.add(tokens=1, cost=12.0)
            if since:
                probes.append(since)
            since = 0
        else:
            since += 1
    assert probes[:8] == [64, 128, 256, 512, 1024, 2048, 4096, 4096] and (FIRST_INTERVAL, MAX_INTERVAL) == (64, 4096)
    assert not gate.is_open and gate.num_opened == 0


def test_probes_that_lose_little_do_not_become_rare() -> None:
    """Four rounds that lose a tenth of one each are a hundredth of 40: the first interval is enough."""
    gate = Gate()
    drafted = run(gate, 2000, tokens=lambda: 1, cost=1.1)
    assert gate.interval == FIRST_INTERVAL and drafted == MIN_ROUNDS + PROBE_ROUNDS * ((2000 - MIN_ROUNDS) // (FIRST_INTERVAL + PROBE_ROUNDS))


def test_a_probe_that_pays_switches_on_again_and_a_stay_resets_the_interval() -> None:
    gate = Gate()
    run(gate, MIN_ROUNDS + 300, tokens=lambda: 1, cost=3.0)
    assert not gate.is_open and gate.interval > FIRST_INTERVAL
    while not gate.is_open:
        run(gate, 1, tokens=lambda: 3, cost=1.3)
    assert gate.num_opened == 1 and gate.interval > FIRST_INTERVAL
    run(gate, WINDOW, tokens=lambda: 3, cost=1.3)
    assert gate.is_open and gate.interval == FIRST_INTERVAL


def test_a_gate_that_flaps_probes_less_and_less() -> None:
    """Right in the probe, wrong behind it. The first probe that reopens the gate follows the first interval."""
    gate = Gate()
    run(gate, MIN_ROUNDS, tokens=lambda: 1, cost=1.3)
    for expected in (FIRST_INTERVAL, 2 * FIRST_INTERVAL, 4 * FIRST_INTERVAL):
        assert gate.interval == expected
        while not gate.is_open:
            run(gate, 1, tokens=lambda: 2, cost=1.3)
        while gate.is_open:
            run(gate, 1, tokens=lambda: 1, cost=2.5)


def test_a_draft_without_gain_or_loss_is_seldom_switched_off_and_a_losing_one_nearly_always() -> None:
    """Mean of 1 + 0.5 + ... + 0.5**7 tokens a round, at a cost a tenth higher or lower than that."""
    mean = sum(0.5**k for k in range(8))
    closed = {}
    for name, cost in (("wins", 0.9 * mean), ("loses", 1.3 * mean)):
        closed[name] = 0
        for seed in range(200):
            gate = Gate()
            for _ in range(100):
                if gate.is_open:
                    gate.add(tokens=geometric(random.Random(f"{seed}/{len(gate._rounds)}/{_}"), 0.5)(), cost=cost)
            closed[name] += not gate.is_open
    assert closed["wins"] <= 10 and closed["loses"] >= 140


def test_a_copy_starts_alike_and_switches_by_itself() -> None:
    gate = Gate()
    run(gate, MIN_ROUNDS - 1, tokens=lambda: 1, cost=1.3)
    copy = gate.copy()
    run(copy, 1, tokens=lambda: 1, cost=1.3)
    assert not copy.is_open and gate.is_open and gate.num_closed == 0
    again = copy.copy()
    assert not again.is_open and again.num_closed == 0 and again.gain == copy.gain
    run(copy, FIRST_INTERVAL - 1, tokens=lambda: 1, cost=1.3)
    assert run(copy.copy(), 1 + PROBE_ROUNDS, tokens=lambda: 1, cost=1.3) == PROBE_ROUNDS   # the wait goes on where it was


def test_nothing_drafted_has_no_gain() -> None:
    assert Gate().gain is None
