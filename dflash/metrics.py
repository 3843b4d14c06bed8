"""Acceptance length, by its one definition here: tokens that a target forward commits, the bonus included.

Over the decode rounds of any number of texts it is (tokens committed) / (rounds), so every round weighs the same. The
prefill's token is no round. A round that ends the sequence counts the tokens it emitted, not those it could have.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from .generate import Round


def acceptance_length(rounds: Iterable[Round]) -> float:
    """Tokens per target forward, 1 to the draft block's length; nan for no decode round."""
    decode = [r for r in rounds if not r.is_prefill]
    return sum(len(r.tokens) for r in decode) / len(decode) if decode else float("nan")


def acceptance_by_position(rounds: Iterable[Round], *, num_drafts: int) -> list[float]:
    """[k - 1]: of the rounds that could accept k tokens, the share that accepted at least k; nan where there is none.

    A tree that spent its nodes on fewer than k positions counts as one that did not get so far, so chains and trees compare.
    """
    decode = [r for r in rounds if not r.is_prefill]
    shares = []
    for k in range(1, num_drafts + 1):
        drafted = [r for r in decode if r.max_accepted >= k]
        shares.append(sum(r.num_accepted >= k for r in drafted) / len(drafted) if drafted else float("nan"))
    return shares


def counts_of(done: Round) -> list[int]:
    """A round in numbers: drafted, accepted, tokens; for a tree also the positions it could propose for."""
    return [done.num_drafted, done.num_accepted, len(done.tokens), *([] if done.num_positions is None else [done.num_positions])]


def cut_at_repeat(ids: Sequence[int], *, ngram: int = 8, times: int = 3) -> int:
    """How many leading tokens to keep: up to the start of the n-gram that occurs for the `times`-th time; all if none does.

    Small models loop, and a loop is easy to draft: figures on looping text flatter the draft.
    """
    if ngram < 1 or times < 2:
        raise ValueError(f"cut_at_repeat: ngram must be at least 1 and times at least 2; got {ngram} and {times}.")
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(ids) - ngram + 1):
        gram = tuple(ids[start:start + ngram])
        seen[gram] += 1
        if seen[gram] == times:
            return start
    return len(ids)


def without_repeats(rounds: Sequence[Round]) -> list[Round]:
    """The rounds of one text up to `cut_at_repeat`; a round that crosses it is shortened."""
    left = cut_at_repeat([t for r in rounds for t in r.tokens])
    kept = []
    for r in rounds:
        if left <= 0:
            break
        tokens = r.tokens[:left]
        kept.append(dataclasses.replace(r, tokens=tokens, num_accepted=min(r.num_accepted, len(tokens)),
                                        stopped=r.stopped and len(tokens) == len(r.tokens)))
        left -= len(tokens)
    return kept
