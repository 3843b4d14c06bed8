"""Acceptance figures of rounds made by hand."""

import math
import random
from collections.abc import Sequence

import pytest

from kilotok.dflash.generate import Round
from kilotok.dflash.metrics import acceptance_by_position, acceptance_length, cut_at_repeat, without_repeats

PREFILL = Round(tokens=(7,), num_drafted=0, num_accepted=0, is_prefill=True)


def accepted(count: int, *, drafted: int = 7) -> Round:
    """A round with `count` accepted proposals and the bonus."""
    return Round(tokens=tuple(range(count + 1)), num_drafted=drafted, num_accepted=count)


def test_acceptance_length_is_tokens_per_decode_round() -> None:
    rounds = [PREFILL, accepted(7), accepted(0), accepted(3)]
    assert acceptance_length(rounds) == (8 + 1 + 4) / 3
    assert acceptance_length([accepted(7)]) == 8.0 and acceptance_length([accepted(0)]) == 1.0
    assert acceptance_length([PREFILL, accepted(0, drafted=0), accepted(0, drafted=0)]) == 1.0   # plain decoding


def test_every_round_weighs_the_same_whatever_text_it_is_of() -> None:
    """Not the mean of the texts' means, which would be (8 + 1) / 2."""
    long, short = [PREFILL, accepted(7)], [PREFILL, accepted(0), accepted(0), accepted(0)]
    assert acceptance_length([*long, *short]) == (8 + 3) / 4


def test_a_round_that_ends_the_sequence_counts_what_it_emitted() -> None:
    ended = Round(tokens=(1, 2, 3), num_drafted=7, num_accepted=3, stopped=True)   # the third proposal was the end: no bonus
    assert acceptance_length([PREFILL, accepted(4), ended]) == (5 + 3) / 2


def test_no_decode_round_is_not_a_number() -> None:
    for rounds in ([], [PREFILL], [PREFILL, PREFILL]):
        assert math.isnan(acceptance_length(rounds))
        assert all(math.isnan(share) for share in acceptance_by_position(rounds, num_drafts=3))


def test_acceptance_length_takes_any_iterable() -> None:
    assert acceptance_length(r for r in [PREFILL, accepted(2)]) == 3.0
    assert acceptance_by_position((r for r in [PREFILL, accepted(1)]), num_drafts=2) == [1.0, 0.0]


def test_acceptance_by_position_by_hand() -> None:
    rounds = [PREFILL, accepted(7), accepted(0), accepted(3), accepted(2, drafted=2), accepted(0, drafted=1), accepted(0, drafted=0)]
    #          drafted at least k: five for k = 1, four for 2, three from 3 on
    assert acceptance_by_position(rounds, num_drafts=7) == [3 / 5, 3 / 4, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert acceptance_by_position(rounds, num_drafts=2) == [3 / 5, 3 / 4]
    shares = acceptance_by_position([accepted(1, drafted=2)], num_drafts=4)
    assert shares[:2] == [1.0, 0.0] and all(math.isnan(s) for s in shares[2:])


def test_length_is_one_and_the_shares_where_every_round_drafts_the_same() -> None:
    draw = random.Random(0)
    rounds = [PREFILL, *(accepted(draw.randrange(8)) for _ in range(100))]
    assert acceptance_length(rounds) == pytest.approx(1 + sum(acceptance_by_position(rounds, num_drafts=7)), rel=1e-12)


# --- loops ---


def cut_by_counting(ids: Sequence[int], *, ngram: int, times: int) -> int:
    for start in range(len(ids) - ngram + 1):
        gram = [*ids[start:start + ngram]]
        if sum([*ids[s:s + ngram]] == gram for s in range(start + 1)) == times:
            return start
    return len(ids)


def test_a_text_is_cut_where_an_8_gram_starts_for_the_third_time() -> None:
    phrase = [*range(8)]
    assert cut_at_repeat([50, *phrase, 51, *phrase, 52, *phrase, 53]) == 19
    assert cut_at_repeat([50, *phrase, 51, *phrase, 52, *phrase[:7], 53]) == 27   # seven of it do not count
    assert cut_at_repeat(phrase * 3) == 16 and cut_at_repeat(phrase * 2) == 16 and cut_at_repeat((phrase * 3)[:-1]) == 23
    assert cut_at_repeat([4] * 9) == 9 and cut_at_repeat([4] * 10) == 2   # overlapping ones are counted
    assert cut_at_repeat([]) == 0 and cut_at_repeat([1] * 7) == 7
    assert cut_at_repeat([1, 2, 1, 2], ngram=2, times=2) == 2 and cut_at_repeat([5, 5], ngram=1, times=2) == 1


def test_the_cut_equals_counting() -> None:
    draw = random.Random(1)
    cuts = set()
    for _ in range(300):
        ids = [draw.randrange(2) for _ in range(draw.randrange(40))]
        ngram, times = draw.randrange(1, 6), draw.randrange(2, 5)
        cut = cut_at_repeat(ids, ngram=ngram, times=times)
        assert cut == cut_by_counting(ids, ngram=ngram, times=times)
        cuts.add(cut == len(ids))
    assert cuts == {True, False}


@pytest.mark.parametrize(("ngram", "times"), [(0, 3), (8, 1), (-1, 0)])
def test_repeats_that_mean_nothing_are_refused(ngram: int, times: int) -> None:
    with pytest.raises(ValueError, match=rf"^cut_at_repeat: ngram must be at least 1 and times at least 2; got {ngram} and {times}\."):
        cut_at_repeat([1, 2], ngram=ngram, times=times)


def rounds_of(*parts: tuple[int, ...]) -> list[Round]:
    first, *others = parts
    return [Round(tokens=first, num_drafted=0, num_accepted=0, is_prefill=True),
            *(Round(tokens=p, num_drafted=7, num_accepted=len(p) - 1) for p in others)]


def test_rounds_are_cut_at_the_loop() -> None:
    phrase = tuple(range(8))
    loop = rounds_of((50,), phrase, (51,), phrase, (52, *phrase[:3]), phrase[3:])
    assert [t for r in loop for t in r.tokens] == [50, *phrase, 51, *phrase, 52, *phrase]
    kept = without_repeats(loop)
    assert kept[:4] == loop[:4]
    assert kept[4:] == [Round(tokens=(52,), num_drafted=7, num_accepted=1)]   # of four tokens one is left, and it was a proposal
    assert acceptance_length(kept) == (8 + 1 + 8 + 1) / 4 < acceptance_length(loop)


def test_a_cut_between_rounds_shortens_none() -> None:
    phrase = tuple(range(8))
    loop = rounds_of((50,), phrase, phrase, phrase, phrase)
    assert without_repeats(loop) == loop[:3]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_is_the_text_up_to_the_cut(seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(3) for _ in range(10)] + [draw.randrange(2) for _ in range(5)] * 8
    rounds, start = [PREFILL], 0
    while start < len(ids):
        size = draw.randrange(1, 9)
        rounds.append(Round(tokens=tuple(ids[start:start + size]), num_drafted=7, num_accepted=len(ids[start:start + size]) - 1))
        start += size
    text = [t for r in rounds for t in r.tokens]
    kept = without_repeats(rounds)
    assert [t for r in kept for t in r.tokens] == text[:cut_at_repeat(text)] != text
    assert all(r.tokens and r.num_accepted <= len(r.tokens) for r in kept) and kept[:-1] == rounds[:len(kept) - 1]


def test_a_text_without_a_loop_is_kept_whole() -> None:
    rounds = rounds_of((1,), (2, 3), (4, 5, 6))
    assert without_repeats(rounds) == rounds
    assert without_repeats([]) == []
