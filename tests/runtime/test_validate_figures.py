"""Figures from requests, worked out by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kilotok.quant.archs import load_tokenizer
from kilotok.runtime.validate.client import Answer, first_text_tokens, has_text_by, rounds_of
from kilotok.runtime.validate.figures import acceptance, compare, cost, failures_of, proposing, speed_up, summarize
from kilotok.runtime.validate.probes import MODES
from kilotok.runtime.validate.stats import cost_per_million_tokens, first_difference, percentile, pooled_speed, spread

REPEATING = [*range(8)] * 3 + [50, 51]      # the third occurrence of 0..7 starts at 16


def answer(*, ids: list[int], triples: list[list[int]] | None = None, prompt: str = "p", domain: str = "code", mode: str = "draft", first: float = 0.5,
           last: float = 1.5) -> Answer:
    rounds = rounds_of(triples or [[0, 0, 1], *[[0, 0, 1]] * (len(ids) - 1)], token_ids=ids, where=prompt)
    return Answer(prompt_id=prompt, domain=domain, mode=mode, prompt_tokens=3, token_ids=tuple(ids), rounds=rounds, first_text_tokens=1,
                  first_token_s=first, last_token_s=last, total_s=last, finish_reason="length")


@pytest.mark.parametrize(("values", "share", "expected"), [
    ([3.0], 0.8, 3.0), ([1.0, 2.0], 0.5, 1.5), ([5, 1, 3, 2, 4], 0.2, 1.8), ([5, 1, 3, 2, 4], 0.8, 4.2), ([5, 1, 3, 2, 4], 0.5, 3),
    ([1, 2], 1.0, 2), ([1, 2], 0.0, 1),
])
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected, abs=1e-12)


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)


def test_pooled_speed_weighs_by_tokens_and_leaves_out_what_has_no_speed() -> None:
    figure = pooled_speed([(10, 1.0), (30, 1.0), (0, 0.5), (5, 0.0)])
    assert figure == {"requests": 2, "tokens": 40, "seconds": 2.0, "tokens_per_s": 20.0, **spread([10.0, 30.0])}
    assert (figure["median"], figure["p20"], figure["p80"]) == (20, 14, 26)
    assert pooled_speed([(0, 1.0)]) == {"not_measured": "no request has a token after its first text"}


@pytest.mark.parametrize(("a", "b", "expected"), [
    ([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [4], 0)])
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


def test_cost_of_a_million_tokens() -> None:
    assert cost_per_million_tokens(price_per_hour=3.6, tokens_per_s=100.0) == pytest.approx(10.0)   # 10000 s at 0.001 a second


def test_acceptance_weighs_rounds_not_texts() -> None:
    """Rounds of 3, 1 and 2 tokens, then 4: the prefills are none. (3 + 1 + 2 + 4) / 4."""
    a = answer(ids=list(range(7)), triples=[[0, 0, 1], [7, 2, 3], [7, 0, 1], [2, 1, 2]])
    b = answer(ids=list(range(5)), triples=[[0, 0, 1], [3, 3, 4]])
    figure = acceptance([a, b])
    assert figure["raw"] == figure["repeats_cut"] == {"length": 2.5, "tokens": 10, "rounds": 4}
    assert [(p["position"], p["drafted"], p["accepted"]) for p in figure["positions"]] == [
        (1, 4, 3), (2, 4, 2), (3, 3, 1), (4, 2, 0), (5, 2, 0), (6, 2, 0), (7, 2, 0)]
    assert [p["rate"] for p in figure["positions"]] == [3 / 4, 2 / 4, 1 / 3, 0, 0, 0, 0]


def test_acceptance_is_also_given_without_repeats() -> None:
    """The loop from token 16 on is drafted perfectly: eight a round. Before it, two a round; the round across the cut is shortened."""
    ids = REPEATING
    triples = [[0, 0, 1], *[[7, 1, 2]] * 7, [7, 7, 8], [7, 2, 3]]
    figure = acceptance([answer(ids=ids, triples=triples)])
    assert figure["raw"] == {"length": 25 / 9, "tokens": 25, "rounds": 9}
    assert figure["repeats_cut"] == {"length": 15 / 8, "tokens": 15, "rounds": 8}   # 7 rounds of two, one token of the eighth


def test_acceptance_of_texts_that_end_with_their_first_token() -> None:
    none = {"not_measured": "no decode round"}
    assert acceptance([answer(ids=[5])]) == {"raw": none, "repeats_cut": none, "positions": []}


def test_a_round_cut_by_the_end_token_may_accept_all_it_emits() -> None:
    assert rounds_of([[0, 0, 1], [7, 2, 2]], token_ids=[1, 2, 3], where="p")[1].num_accepted == 2


@pytest.mark.parametrize(("triples", "message"), [
    ([[0, 0, 2]], "round 0 cannot have 0 drafted, 0 accepted and 2 tokens"), ([[7, 0, 1]], "round 0 cannot"), ([[0, 0, 1], [2, 2, 4]], "round 1 cannot"),
    ([[0, 0, 1], [15, 2, 3, 1]], "round 1 cannot"), ([[0, 0, 1], [1, 2, 3, 7]], "round 1 cannot"),
    ([[0, 0, 1], [7, 0, 2]], "round 1 cannot"), ([[0, 0, 1], [2, 3, 3]], "round 1 cannot"), ([[0, 0, 1], [7, 0, 0]], "round 1 cannot"),
    ([[0, 0, 1], [7, 1, 2]], r"add up to the tokens; got 3 in rounds and 4 ids"), ([], "got 0 in rounds and 4 ids"),
])
def test_rounds_that_cannot_be_are_refused(triples: list[list[int]], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^server: p \(draft\): .*{message}"):
        rounds_of(triples, token_ids=[1, 2, 3, 4], where="p (draft)")


def test_tokens_before_the_first_text_have_no_speed(pocket: Path) -> None:
    """A special token and the first byte of a letter show nothing; the text comes with the round that completes the letter."""
    tokenizer = load_tokenizer(pocket)
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    letter = tokenizer("\u0137", add_special_tokens=False)["input_ids"]
    word = tokenizer(" the", add_special_tokens=False)["input_ids"]
    assert len(letter) == 2
    ids = [special, letter[0], letter[1], *word, *word]
    triples = [[0, 0, 1], [7, 0, 1], [7, len(word), 1 + len(word)], [7, len(word) - 1, len(word)]]
    rounds, has_text = rounds_of(triples, token_ids=ids, where="p"), has_text_by(tokenizer)
    assert first_text_tokens(rounds, has_text=has_text) == 3 + len(word)
    assert first_text_tokens(rounds[:2], has_text=has_text) == 2
    assert first_text_tokens(rounds_of([[0, 0, 1]], token_ids=word[:1], where="p"), has_text=has_text) == 1
    timed = dataclasses.replace(answer(ids=ids, triples=triples), first_text_tokens=3 + len(word), first_token_s=1.0, last_token_s=3.0)
    assert (timed.decode_tokens, timed.decode_s) == (len(word), 2.0)


def test_compare_names_every_difference() -> None:
    answers = [answer(ids=[1, 2, 3], prompt=p, mode=m) for p in ("same", "other", "longer") for m in ("draft", "plain")]
    answers[2] = answer(ids=[1, 9, 3], prompt="other", mode="draft")
    answers[4] = answer(ids=[1, 2, 3, 4], prompt="longer", mode="draft")
    assert compare(answers, mode="draft", reference="plain") == {
        "mode": "draft", "reference": "plain", "equal": 1, "total": 3, "differences": [
            {"prompt": "other", "position": 1, "token": 9, "reference_token": 2}, {"prompt": "longer", "position": 3, "token": 4, "reference_token": None}]}


def speeds(**tokens_per_s: dict[str, float | None]) -> dict[str, dict[str, Any]]:
    def figure(v: float | None) -> dict[str, Any]:
        return {"decode": {"not_measured": "none"} if v is None else {"tokens_per_s": v}}

    return {mode.replace("_", " "): {d: figure(v) for d, v in domains.items()} for mode, domains in tokens_per_s.items()}


def test_speed_up_is_against_the_faster_plain_mode_of_each_domain() -> None:
    measured = speeds(draft={"code": 60, "math": 30, "chat": 9}, plain={"code": 20, "math": 40, "chat": None},
                      plain_one_column={"code": 30, "math": 10, "chat": 3})
    assert speed_up(measured, draft="draft", plain=("plain", "plain one column")) == {
        "code": {"speed_up": 2.0, "against": "plain one column"}, "math": {"speed_up": 0.75, "against": "plain"}, "chat": {"not_measured": "none"}}


def test_cost_of_the_draft_and_of_the_fastest_mode() -> None:
    figure = cost(speeds(draft={"all": 100.0}, plain={"all": 200.0}, plain_one_column={"all": 50.0}), price_per_hour=3.6)
    assert figure == {"price_per_hour": 3.6, "per_million_tokens": pytest.approx({"draft": 10.0, "plain": 5.0})}
    assert set(cost(speeds(draft={"all": 300.0}, plain={"all": 200.0}), price_per_hour=3.6)["per_million_tokens"]) == {"draft"}
    assert set(cost(speeds(plain={"all": 200.0}), price_per_hour=3.6)["per_million_tokens"]) == {"plain"}
    assert cost(speeds(plain={"all": None}), price_per_hour=3.6) == {"not_measured": "no decode speed"}


def run_of(ids_by_mode: dict[str, list[int]]) -> list[Answer]:
    return [answer(ids=ids, prompt=f"{d}1", domain=d, mode=m, last=2.5 if "plain" in m else 1.0) for d in ("code", "math") for m, ids in ids_by_mode.items()]


def test_summary_of_a_run_with_a_draft() -> None:
    figures = summarize(run_of({m.name: [1, 2, 3] for m in MODES}), no_draft=None)
    assert failures_of(figures) == []
    assert list(figures["speed"]["draft"]) == ["code", "math", "all"]
    assert figures["speed"]["draft"]["all"]["decode"]["tokens_per_s"] == 4.0    # 2 texts of 2 tokens in half a second each
    assert figures["speed"]["plain"]["code"]["first_token_s"] == spread([0.5])
    assert figures["speed_up"]["greedy"]["all"] == {"speed_up": 4.0, "against": "plain"}
    assert figures["acceptance"]["sampled"]["math"]["raw"] == {"length": 1.0, "tokens": 2, "rounds": 2}
    assert {kind: list(ways) for kind, ways in figures["trees"].items()} == {
        "greedy": ["draft", "tree", "wide tree"], "sampled": ["sampled draft", "sampled tree"]}


def test_a_tree_is_charged_for_all_its_nodes_and_compared_by_the_positions_it_could_reach() -> None:
    """Rounds of 7 nodes for 7 positions and of 15 nodes for 3: 8 and 16 tokens verified, 2 and 4 committed."""
    tree = answer(ids=list(range(7)), triples=[[0, 0, 1], [7, 1, 2, 7], [15, 3, 4, 3]], mode="tree")
    figure = proposing([tree])
    assert figure["verified"] == {"mean": 12.0, "most": 16} and figure["raw"] == {"length": 3.0, "tokens": 6, "rounds": 2}
    assert [(p["drafted"], p["accepted"]) for p in figure["positions"]] == [(2, 2), (2, 1), (2, 1), (1, 0), (1, 0), (1, 0), (1, 0)]
    assert proposing([answer(ids=[5])])["verified"] == {"not_measured": "no decode round"}


@pytest.mark.parametrize(("mode", "kind"), [("tree", "greedy, tree"), ("wide tree", "greedy, wide tree"), ("sampled tree", "sampled, tree")])
def test_a_tree_that_changes_a_text_is_a_failure(mode: str, kind: str) -> None:
    figures = summarize(run_of({**{m.name: [1, 2, 3] for m in MODES}, mode: [1, 9, 3]}), no_draft=None)
    (failure,) = failures_of(figures)
    assert failure.startswith(f"not lossless, {kind}: 2 of 2 texts differ with a draft; first code1 at position 1: token id 9, token id 2 in ")


def test_one_column_may_differ_but_a_draft_may_not() -> None:
    same = {m.name: [1, 2, 3] for m in MODES}
    figures = summarize(run_of({**same, "plain one column": [1, 2, 4]}), no_draft=None)
    assert (figures["one_column"]["equal"], figures["one_column"]["total"], failures_of(figures)) == (0, 2, [])
    figures = summarize(run_of({**same, "sampled draft": [1, 2]}), no_draft=None)
    assert failures_of(figures) == ["not lossless, sampled: 2 of 2 texts differ with a draft; first code1 at position 2: the end, token id 3 in sampled plain"]


def test_without_a_draft_nothing_about_drafts_is_a_number() -> None:
    figures = summarize(run_of({m.name: [1, 2, 3] for m in MODES if m.decode not in ("draft", "tree")}), no_draft="no draft head in out/dflash")
    reason = {"not_measured": "no draft head in out/dflash"}
    assert all(figures[name] == {"greedy": reason, "sampled": reason} for name in ("lossless", "acceptance", "speed_up", "trees"))
    assert set(figures["speed"]) == {"plain", "plain one column", "sampled plain"} and failures_of(figures) == []
