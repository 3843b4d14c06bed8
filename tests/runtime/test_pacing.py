"""Drafting at the pace that pays, in simulated time: what it chooses, what it costs to find out, and that the draft's context has no holes."""

from collections.abc import Callable

import pytest
from paced_text import Told, tell

from kilotok.dflash.tree import chain
from kilotok.runtime.draft_gate import FIRST_INTERVAL, MIN_ROUNDS
from kilotok.runtime.pacing import AUTO, FLUSH_ROWS, MAX_DOMAINS, MAX_DRAFT_LENGTH, NO_DOMAIN, Kind, PacedDrafter, Speculation, read_draft_length

# seconds of a step by its columns: dense (a column for nothing), a mixture of experts at batch 1, a CPU that pays for every column
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda columns: 1.0, "experts": lambda columns: 0.5 + 0.5 * columns**0.6, "dear": lambda columns: 0.3 + 0.7 * columns}
SHARES: dict[str, Callable[[int], float]] = {
    "good": lambda position: 0.85, "fair": lambda position: 0.6, "poor": lambda position: 0.25, "never": lambda position: 0.0}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cost", COSTS)
def test_adaptive_is_never_slower_than_the_better_of_full_and_none_by_more_than_three_percent(cost: str, share: str) -> None:
    """Over 3000 tokens, what it takes to measure and to probe included."""
    speeds = {length: tell(length=length, tokens=3000, cost=COSTS[cost], share=SHARES[share], draft_s=0.25).tokens_per_s for length in (AUTO, 7, 0)}
    assert speeds[AUTO] >= 0.97 * max(speeds[7], speeds[0]), speeds


def test_text_in_parts_loses_the_time_until_a_probe_and_gains_where_a_wrong_length_costs() -> None:
    """400 tokens that are hard to draft, 400 that are easy, and so on: the gate may be closed for the first of the easy ones."""
    for cost, least in (("flat", 0.9), ("experts", 1.1), ("dear", 0.95)):
        speeds = {length: tell(length=length, tokens=4000, cost=COSTS[cost], share=lambda position: 0.9 if position // 400 % 2 else 0.1,
                               draft_s=0.25).tokens_per_s for length in (AUTO, 7, 0)}
        assert speeds[AUTO] > least * max(speeds[7], speeds[0]), (cost, speeds)


def test_where_columns_cost_and_drafts_are_fair_a_length_in_between_beats_both() -> None:
    speeds = {length: tell(length=length, tokens=2000, cost=COSTS["experts"], share=SHARES["fair"], draft_s=0.1).tokens_per_s for length in (AUTO, 7, 0)}
    assert speeds[AUTO] > 1.08 * max(speeds[7], speeds[0]), speeds


def best_fixed(**case: Callable[[int], float]) -> tuple[int, float]:
    found = {n: tell(length=n, tokens=1500, draft_s=0.1, **case).tokens_per_s for n in range(8)}  # type: ignore[arg-type]
    best = max(found, key=lambda n: found[n])
    return best, found[best]


def test_the_mean_length_is_that_of_the_best_fixed_one() -> None:
    """Confidences that tell positions apart may do better than any fixed length; here they are all alike."""
    for cost, share in (("experts", "good"), ("experts", "fair"), ("flat", "good")):
        told = tell(length=AUTO, tokens=1500, cost=COSTS[cost], share=SHARES[share], draft_s=0.1)
        best, speed = best_fixed(cost=COSTS[cost], share=SHARES[share])
        verified = [r.num_drafted for r in told.rounds[1:] if r.num_drafted]
        assert abs(sum(verified) / len(verified) - best) < 0.8, (cost, share, best)
        assert told.tokens_per_s > 0.97 * speed


def test_a_draft_too_sure_of_itself_is_corrected() -> None:
    """It claims 0.9 at 0.45."""
    speculation = Speculation()
    biased = tell(length=AUTO, tokens=2500, cost=COSTS["experts"], share=lambda position: 0.45, draft_s=0.1, bias=2.0, speculation=speculation)
    honest = tell(length=AUTO, tokens=2500, cost=COSTS["experts"], share=lambda position: 0.45, draft_s=0.1)
    assert biased.tokens_per_s > 0.97 * honest.tokens_per_s
    scale, count = speculation.state().scales[Kind(is_tree=False, is_sampled=False)][1]
    assert scale == pytest.approx(0.5, abs=0.08) and count > 500


@pytest.mark.parametrize("length", [AUTO, None, 0, 1, 5, 7, MAX_DRAFT_LENGTH])
def test_a_fixed_length_is_kept_in_every_round(length: int | None) -> None:
    told = tell(length=length, tokens=200, cost=COSTS["dear"], share=SHARES["poor"])   # the text is checked in there
    full = 7 if length is None else min(7, int(length)) if length != AUTO else None
    if full is not None:
        assert {r.num_drafted for r in told.rounds[1:-8]} == {full}
        assert told.drafter.num_proposals == (0 if full == 0 else sum(r.num_drafted > 0 for r in told.rounds[1:]))


def test_while_off_nothing_is_drafted_and_the_context_is_whole_when_it_comes_back() -> None:
    """The drafter checks its context at every proposal."""
    told = tell(length=AUTO, tokens=3000, cost=COSTS["dear"], share=lambda position: 0.9 if position > 1500 else 0.0, draft_s=0.5)
    off = [i for i, r in enumerate(told.rounds[1:]) if not r.num_drafted]
    assert len(off) > 1000 and told.drafter.num_proposals < len(told.rounds) - 1000
    assert max(told.drafter.pieces) <= FLUSH_ROWS + 8 and sum(p > 8 for p in told.drafter.pieces) > 10
    assert sum(told.drafter.pieces) > told.target.length - FLUSH_ROWS


def state_after(told: Told, speculation: Speculation, domain: str = NO_DOMAIN) -> bool:
    return speculation.state().gates[domain, False].is_open


def test_drafting_is_off_by_domain_and_requests_of_a_domain_share_it() -> None:
    speculation = Speculation()
    for _ in range(3):
        bad = tell(length=AUTO, tokens=60, cost=COSTS["dear"], share=SHARES["never"], draft_s=0.5, domain="bad", speculation=speculation)
        good = tell(length=AUTO, tokens=60, cost=COSTS["flat"], share=SHARES["good"], domain="good", speculation=speculation)
    state = speculation.state()
    assert not state.gates["bad", False].is_open and state.gates["good", False].is_open and state.gates[NO_DOMAIN, False].is_open
    assert state.switched_off == 1 and state.switched_on == 0
    assert bad.drafter.num_proposals <= 5 and good.drafter.num_proposals > 5
    assert state.gates["bad", False].gain is not None and state.gates["bad", False].gain < 1


def test_a_request_without_a_domain_has_its_own_gate_and_starts_as_the_others_left_it() -> None:
    speculation = Speculation()
    case = {"cost": COSTS["dear"], "share": SHARES["never"], "draft_s": 0.5, "speculation": speculation}
    first = tell(length=AUTO, tokens=40, **case)  # type: ignore[arg-type]
    assert MIN_ROUNDS <= first.drafter.num_proposals < 30 and not state_after(first, speculation)
    second = tell(length=AUTO, tokens=20, **case)  # type: ignore[arg-type]
    assert second.drafter.num_proposals == 0
    waited = [tell(length=AUTO, tokens=20, **case).drafter.num_proposals for _ in range(2 * FIRST_INTERVAL // 19)]  # type: ignore[arg-type]
    assert sum(waited) > 0   # short requests wait for the next probe together


def test_what_was_measured_is_told_and_nothing_else() -> None:
    speculation = Speculation()
    empty = speculation.state()
    assert empty.verify_length is None and empty.costs_s == {} and empty.scales == {}
    assert {key: (gate.is_open, gate.gain, gate.num_rounds) for key, gate in empty.gates.items()} == {
        (NO_DOMAIN, False): (True, None, 0), (NO_DOMAIN, True): (True, None, 0)}
    told = tell(length=3, tokens=40, cost=COSTS["dear"], share=SHARES["fair"], draft_s=0.5, speculation=speculation)
    state = speculation.state()
    drafted = [r.num_drafted for r in told.rounds[1:] if r.num_drafted]
    assert state.rounds_drafted == len(drafted) and state.proposals_verified == sum(drafted)
    assert state.costs_s[False, 1][3] == pytest.approx(0.5 + COSTS["dear"](4)) and state.scales == {}
    assert (state.switched_off, state.switched_on, state.requests_on) == (0, 0, 0)


def test_gates_of_the_domains_used_last_are_remembered() -> None:
    speculation = Speculation()
    for n in range(MAX_DOMAINS + 9):
        tell(length=AUTO, tokens=4, cost=COSTS["flat"], share=SHARES["good"], domain=f"d{n}", speculation=speculation)
        tell(length=AUTO, tokens=4, cost=COSTS["flat"], share=SHARES["good"], domain="d0", speculation=speculation)
    names = {domain for domain, _ in speculation.state().gates}
    assert len(names) == MAX_DOMAINS + 1 and {NO_DOMAIN, "d0", f"d{MAX_DOMAINS + 8}"} <= names and "d1" not in names


class Mute:
    """Tells no confidences."""

    num_drafts = 7

    def observe(self, features_TF: object) -> None: ...

    def propose(self, anchor: int, *, count: int, sampling: object) -> list[int]:
        return [0] * count

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: object) -> object:
        return chain([0])


def test_auto_needs_confidences() -> None:
    message = r"^draft_length: 'auto' needs a draft head that tells its confidences; Mute does not\. Give a number\.$"
    with pytest.raises(NotImplementedError, match=message):
        Speculation().pace(Mute(), length=AUTO, domain=None, is_tree=False, is_sampled=False)
    speculation = Speculation()
    tree: PacedDrafter = speculation.pace(Mute(), length=AUTO, domain=None, is_tree=True, is_sampled=False)
    for _ in range(3):
        speculation.curve(is_tree=True).add(-1, 1.0)
    with pytest.raises(NotImplementedError, match=message):
        tree.propose_tree(0, count=7, budget=7, sampling=None)  # type: ignore[arg-type]


def test_a_length_is_read_from_text_and_json() -> None:
    assert [read_draft_length(v) for v in ("auto", "0", "7", 7, "63")] == ["auto", 0, 7, 7, 63]
    for value in ("Auto", "-1", "7.0", 7.0, True, 64, "64", None, ""):
        with pytest.raises(ValueError, match=r"^draft_length: must be 'auto' or lie in 0\.\.63; got "):
            read_draft_length(value)
