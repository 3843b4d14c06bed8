"""The formula of the verify length, its calibration and the cost curve, by hand and against brute force. No model."""

import itertools
import math
import random

import pytest

from kilotok.dflash.tree import ANCHOR, DraftTree, chain
from kilotok.runtime.draft_costs import FIRST_ROUNDS, MIN_ROUNDS, PLAIN, REFIT, REFRESH, WINDOW, CostCurve, isotonic
from kilotok.runtime.speculate import MAX_SCALE, MIN_SCALE, PRIOR, Calibration, best_length, expected_tokens

FORKED = DraftTree(token_ids=(5, 6, 7, 8), parents=(ANCHOR, 0, ANCHOR, 1), confidences=(0.6, 0.5, 0.3, 0.9))


def test_expected_tokens_of_a_chain_are_the_sum_of_products() -> None:
    expected = expected_tokens(chain((1, 2, 3), confidences=(0.5, 0.8, 0.25)), scales=[1.0, 1.0, 2.0])
    assert expected == pytest.approx([1.0, 1.5, 1.9, 2.1])


def test_a_scaled_confidence_is_never_more_than_certain() -> None:
    assert expected_tokens(chain((1, 2), confidences=(0.9, 0.9)), scales=[2.0, 2.0]) == [1.0, 2.0, 3.0]


def test_expected_tokens_of_a_tree_follow_its_paths() -> None:
    assert expected_tokens(FORKED, scales=[1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.6, 1.9, 2.2, 2.47])
    assert expected_tokens(FORKED, scales=[0.5, 1.0, 1.0]) == pytest.approx([1.0, 1.3, 1.45, 1.6, 1.735])


def test_expected_tokens_are_what_a_draft_of_such_confidences_commits() -> None:
    """Drawn by chance: a node is right with its confidence if its parent is, and one child at most is."""
    draw, total, rounds = random.Random(0), 0, 20_000
    for _ in range(rounds):
        at, left = ANCHOR, True
        total += 1
        while left:
            point, left = draw.random(), False
            for node, parent in enumerate(FORKED.parents):
                if parent == at and not left:
                    point -= FORKED.confidences[node]  # type: ignore[index]
                    if point < 0:
                        at, left = node, True
            total += left
    expected = expected_tokens(FORKED, scales=[1.0, 1.0, 1.0])[-1]
    assert abs(total / rounds - expected) < 5 * 1.2 / math.sqrt(rounds)   # a round's deviation is about 1.2


def test_the_best_length_is_the_largest_rate_and_the_smaller_of_equals() -> None:
    assert best_length([1.0, 1.9, 2.7, 3.4], [1.0, 1.0, 1.0, 1.0]) == 3      # columns for nothing
    assert best_length([1.0, 1.9, 2.7, 3.4], [1.0, 2.0, 3.0, 4.0]) == 0      # each as dear as a round
    assert best_length([1.0, 1.9, 2.7, 2.8], [1.0, 1.2, 1.4, 1.6]) == 2
    assert best_length([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0 and best_length([1.0, 3.0, 3.0], [1.0, 1.5, 1.5]) == 1
    draw = random.Random(1)
    for _ in range(300):
        size = draw.randrange(1, 9)
        expected = list(itertools.accumulate([draw.random() for _ in range(size - 1)], initial=1.0))
        costs = sorted(draw.randrange(1, 6) for _ in range(size))
        found = best_length(expected, costs)
        assert all(expected[found] / costs[found] > expected[v] / costs[v] for v in range(found))
        assert all(expected[found] / costs[found] >= expected[v] / costs[v] for v in range(found, size))


def test_what_the_formula_cannot_use_is_refused() -> None:
    for call, message in (
        (lambda: expected_tokens(chain((1,)), scales=[1.0]), "expected_tokens: needs a tree with confidences; got one without."),
        (lambda: expected_tokens(chain((1, 2), confidences=(1, 1)), scales=[1.0]),
         "expected_tokens: needs a scale of every depth; got 1 for a tree of depth 2."),
        (lambda: best_length([1.0, 2.0], [1.0]), "best_length: needs a cost for every length; got 2 expectations and 1 costs."),
        (lambda: best_length([1.0, 2.0], [0.0, 1.0]), "best_length: costs are times above 0; got 0.0."),
        (lambda: Calibration().add_round(chain((1,)), [1]), "calibration: needs a tree with confidences; got one without."),
        (lambda: chain((1, 2), confidences=(1.0,)), "tree: every node has one confidence; got 2 nodes and 1 confidences."),
        (lambda: CostCurve().add(3, 0.0), "cost: needs a time above 0 and a length of at least -1; got 0.0 s for 3."),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message


# --- calibration ---


def test_a_calibration_starts_at_the_drafts_word_and_comes_to_what_is_accepted() -> None:
    calibration, draw = Calibration(), random.Random(2)
    assert calibration.scales(3) == [1.0] * 3 == [Calibration().scale(d) for d in (1, 2, 3)]
    for _ in range(3000):
        confidence = 0.2 + 0.6 * draw.random()
        calibration.add(1, confidence=confidence, accepted=draw.random() < 0.7 * confidence)
    assert calibration.scale(1) == pytest.approx(0.7, abs=0.15) and calibration.scale(2) == 1.0 and calibration.counts == {1: 3000}


def test_a_calibration_follows_a_change_within_some_hundred_proposals_and_stays_bounded() -> None:
    calibration = Calibration()
    for _ in range(1000):
        calibration.add(1, confidence=0.5, accepted=False)
    assert calibration.scale(1) == MIN_SCALE
    for _ in range(600):
        calibration.add(1, confidence=0.1, accepted=True)
    assert calibration.scale(1) == MAX_SCALE


def test_a_round_counts_the_depths_that_were_reached() -> None:
    calibration = Calibration()
    calibration.add_round(chain((1, 2, 3, 4), confidences=(0.9, 0.8, 0.7, 0.6)), [1, 2, 9])     # the third was wrong, the fourth is not known
    assert calibration.counts == {1: 1, 2: 1, 3: 1}
    assert calibration.scales(3) == [(PRIOR + 1) / (PRIOR + 0.9), (PRIOR + 1) / (PRIOR + 0.8), PRIOR / (PRIOR + 0.7)]
    ended = Calibration()
    ended.add_round(chain((1, 2), confidences=(0.9, 0.8)), [1])     # the text ended with an accepted proposal
    assert ended.counts == {1: 1} and ended.scale(1) > 1
    none = Calibration()
    none.add_round(chain((), confidences=()), [5])
    assert none.counts == {}


def test_children_of_a_node_are_one_proposal_of_their_common_confidence() -> None:
    calibration = Calibration()
    calibration.add_round(FORKED, [7, 3])    # the second child of the anchor, which has none itself
    assert calibration.counts == {1: 1} and calibration.scale(1) == (PRIOR + 1) / (PRIOR + 0.6 + 0.3)


# --- costs ---


def curve_of(times: dict[int, list[float]], *, draft_s: float = 0.0) -> CostCurve:
    curve = CostCurve()
    for length, of_length in times.items():
        for seconds in of_length:
            curve.add(length, seconds, draft_s=draft_s)
    return curve


def test_the_median_of_the_last_rounds_counts_and_one_slow_round_does_not() -> None:
    curve = curve_of({3: [9.0] * 40 + [2.0] * (WINDOW - 1) + [50.0]})
    assert curve.medians() == {3: 2.0}


def test_lengths_between_are_on_the_line_and_said_to_be_guesses() -> None:
    costs = curve_of({PLAIN: [1.0], 0: [2.0], 4: [4.0]}).costs(6)
    assert costs is not None
    assert [c.seconds for c in costs] == [2.0, 2.5, 3.0, 3.5, 4.0, 4.0, 4.0]
    assert [c.is_measured for c in costs] == [True, False, False, False, True, False, False]


def test_a_draft_of_which_nothing_is_verified_is_guessed_from_plain_decoding_and_the_draft() -> None:
    costs = curve_of({PLAIN: [1.0], 2: [3.0]}, draft_s=0.5).costs(2)
    assert costs is not None and [(c.seconds, c.is_measured) for c in costs] == [(1.5, False), (2.25, False), (3.0, True)]
    without = curve_of({2: [3.0]}, draft_s=0.5).costs(3)
    assert without is not None and [c.seconds for c in without] == [3.0] * 4


def test_before_a_drafted_round_there_are_no_costs() -> None:
    assert CostCurve().costs(7) is None and curve_of({PLAIN: [1.0]}).costs(7) is None and CostCurve().plain_s is None


def test_noise_makes_no_length_cheaper_than_a_shorter_one() -> None:
    draw = random.Random(3)
    for _ in range(100):
        values = {v: 1 + 0.1 * v + draw.gauss(0, 0.3) for v in range(-1, 8)}
        weights = {v: draw.randrange(1, 16) for v in values}
        found = isotonic(values, weights=weights)
        assert sorted(found.values()) == [found[v] for v in sorted(found)]
        assert sum(found[v] * weights[v] for v in found) == pytest.approx(sum(values[v] * weights[v] for v in values))
        # the nearest: moving any group of equals up or down by a little, where order allows it, is no nearer
        error = sum(weights[v] * (found[v] - values[v]) ** 2 for v in values)
        for low, high in itertools.combinations(sorted(values), 2):
            for change in (-0.01, 0.01):
                other = {v: found[v] + change * (low <= v <= high) for v in values}
                if sorted(other.values()) == [other[v] for v in sorted(other)]:
                    assert sum(weights[v] * (other[v] - values[v]) ** 2 for v in values) > error - 1e-12
    assert isotonic({0: 1.0, 1: 3.0, 2: 2.0}, weights={0: 1, 1: 1, 2: 3}) == {0: 1.0, 1: 2.25, 2: 2.25}


def test_plain_decoding_and_full_length_are_measured_at_first_and_again() -> None:
    curve = CostCurve()
    for _ in range(MIN_ROUNDS):
        assert curve.wants_plain()
        curve.add(PLAIN, 1.0)
    assert not curve.wants_plain()
    for _ in range(MIN_ROUNDS):
        assert curve.wants_full(7)
        curve.add(7, 2.0)
    asked = {"plain": 0, "full": 0}
    for _ in range(10 * REFRESH):
        if curve.wants_plain():
            curve.add(PLAIN, 1.0)
            asked["plain"] += 1
        length = 7 if curve.wants_full(7) else 3
        curve.add(length, 1.5)
        asked["full"] += length == 7
    assert 9 <= asked["plain"] <= 10 and 9 <= asked["full"] <= 10


def test_costs_are_fitted_anew_at_every_few_rounds() -> None:
    curve = curve_of({7: [2.0] * FIRST_ROUNDS})
    assert curve.costs(7)[7].seconds == 2.0  # type: ignore[index]
    for _ in range(WINDOW + REFIT):
        curve.add(7, 4.0)
    assert curve.costs(7)[7].seconds == 4.0  # type: ignore[index]
