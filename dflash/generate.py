"""The draft-verify loop: one draft forward proposes up to seven tokens, one target forward keeps those it agrees with.

A round starts from an anchor, the newest token, which the target has not seen yet. The drafter proposes the tokens after
it; the target reads anchor and proposals in one step and picks its own token at every position, with the same noise
(`sampling.py`). Proposals are accepted as long as they equal the target's picks; the pick after the last accepted one is
the bonus, and the next anchor. The text is the target's, whatever the drafter proposes: equal to decoding one token at a
time if the target's logits do not depend on how many tokens a step reads.

Both the HF model (`hf_target.py`) and the runtime's executors are Targets.

Legend: T positions of a step, V vocabulary, F tapped features (taps times hidden).
Source: Leviathan et al. 2023 for draft and verify; DFlash, arXiv 2602.06036, for the anchor and the masked slots.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from .sampling import Sampling, choose_tokens


class TargetStep(NamedTuple):
    """What a target says of the tokens it just read."""

    logits_TV: Tensor       # row t predicts the token after the t-th one read; the last row alone if asked so
    features_TF: Tensor     # tapped layer outputs of every token read, in order of the taps


class Target(Protocol):
    """One sequence on a model that can be decoded; it remembers the tokens it has read."""

    @property
    def length(self) -> int:
        """Tokens read so far."""

    @property
    def max_length(self) -> int:
        """Tokens it can hold."""

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        """Read tokens at positions length, length + 1, ..."""

    def rewind(self, length: int) -> None:
        """Forget the tokens at positions >= length."""


class Drafter(Protocol):
    """Proposes the tokens after an anchor, for one sequence."""

    num_drafts: int     # proposals it can make at once

    def observe(self, features_TF: Tensor) -> None:
        """Take the target's features of the next committed positions."""

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        """`count` tokens after the anchor, whose position is the number of positions observed."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Tokens that one target forward committed."""

    tokens: tuple[int, ...]     # accepted proposals and the bonus; cut after an end-of-sequence token
    num_drafted: int            # proposals that were verified; 0 for the prefill's token and for plain decoding
    num_accepted: int           # of `tokens`, those that were proposals
    is_prefill: bool = False
    stopped: bool = False       # the last token ends the sequence


def generate(
    target: Target, *, prompt: Sequence[int], drafter: Drafter | None, sampling: Sampling, max_tokens: int, eos_ids: Collection[int],
) -> Iterator[Round]:
    """Decode from an empty target; the first round is the prefill's token.

    Ends after an end-of-sequence token, after max_tokens tokens, or when prompt and text fill the target's max_length.
    Errors: ValueError for an empty prompt, one that leaves no room for a token, or max_tokens below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: must be at least 1; got {max_tokens}.")
    if not prompt:
        raise ValueError("prompt: must hold at least one token; got none.")
    if len(prompt) >= target.max_length:
        raise ValueError(f"prompt: {len(prompt)} tokens leave no room in a context of {target.max_length}. Shorten the prompt.")
    step = target.read(prompt, last_logits_only=True)
    (anchor,) = choose_tokens(step.logits_TV[-1:], first_position=target.length, sampling=sampling)
    done = 1
    yield Round(tokens=(anchor,), num_drafted=0, num_accepted=0, is_prefill=True, stopped=anchor in eos_ids)
    if drafter is not None:
        drafter.observe(step.features_TF)
    while anchor not in eos_ids and done < max_tokens and target.length + 1 < target.max_length:
        start = target.length
        drafts: list[int] = []
        if drafter is not None:
            # anchor, proposals and bonus: what lies beyond max_tokens or the context could never be used
            count = min(drafter.num_drafts, max_tokens - done - 1, target.max_length - start - 2)
            drafts = drafter.propose(anchor, count=count, sampling=sampling) if count > 0 else []
        step = target.read((anchor, *drafts))
        tokens: list[int] = []
        matches = 0
        for t in range(len(drafts) + 1):   # the target's own picks, up to the first that is no proposal, or ends the sequence
            tokens += choose_tokens(step.logits_TV[t:t + 1], first_position=start + 1 + t, sampling=sampling)
            is_match = t < len(drafts) and drafts[t] == tokens[t]
            matches += is_match
            if not is_match or tokens[t] in eos_ids:
                break
        target.rewind(start + len(tokens))
        if drafter is not None:
            drafter.observe(step.features_TF[:len(tokens)])
        anchor = tokens[-1]
        done += len(tokens)
        yield Round(tokens=tuple(tokens), num_drafted=len(drafts), num_accepted=matches, stopped=anchor in eos_ids)
