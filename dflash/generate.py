"""The draft-verify loop: one draft forward proposes up to seven tokens, one target forward keeps those it agrees with.

A round starts from an anchor, the newest token, which the target has not seen yet. The drafter proposes the tokens after
it; the target reads anchor and proposals in one step and picks its own token at every position, with the same noise
(`sampling.py`). Proposals are accepted as long as they equal the target's picks; the pick after the last accepted one is
the bonus, and the next anchor. The text is the target's, whatever the drafter proposes: equal to decoding one token at a
time if the target's logits do not depend on how many tokens a step reads.

With a tree (`tree.py`) a position has several candidates. The target reads all of them in one step, each seeing the text and
its own ancestors only, and the walk goes down to the child that equals the target's pick; the chain is the same walk.

Both the HF model (`hf_target.py`) and the runtime's executors are Targets.

Legend: T positions of a step, V vocabulary, F tapped features (taps times hidden).
Source: Leviathan et al. 2023 for draft and verify; DFlash, arXiv 2602.06036, for the anchor and the masked slots.
"""

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from .sampling import Sampling, choose_tokens
from .tree import ANCHOR, DraftTree, chain


class TargetStep(NamedTuple):
    """What a target says of the tokens it just read."""

    logits_TV: Tensor       # row t predicts the token after the t-th one read; the last row alone if asked so
    features_TF: Tensor     # tapped layer outputs of every token read, in order of the taps
    tokens_T: tuple[int, ...] | None = None   # its picks of those rows, where it makes them itself; None: they are made from the logits
    num_drafted: int | None = None            # proposals that it made and verified itself behind the one token to read; tokens_T is what was committed


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


@runtime_checkable
class TreeTarget(Target, Protocol):
    """A target that can verify a tree."""

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        """Read the anchor at position `length` and every node at position length + its depth.

        A node sees the tokens read before, the anchor, its ancestors and itself. Row 0 of the step is the anchor's, row n + 1 is node n's.
        None of them counts as read until `keep`, which must be the next call.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Of the tree just read, keep the anchor and these nodes, each the child of the one before; forget the others."""


class Drafter(Protocol):
    """Proposes the tokens after an anchor, for one sequence."""

    num_drafts: int     # proposals it can make at once

    def observe(self, features_TF: Tensor) -> None:
        """Take the target's features of the next committed positions."""

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        """`count` tokens after the anchor, or fewer; its position is the number of positions observed."""


@runtime_checkable
class ConfidentDrafter(Drafter, Protocol):
    """A drafter that says how sure it is, so that the number of proposals to verify can be chosen."""

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        """The chain that `propose` gives, with the confidence of every proposal."""


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that knows more than one candidate a position."""

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        """At most `budget` nodes for the `count` positions after the anchor; with none the anchor is read alone."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Tokens that one target forward committed."""

    tokens: tuple[int, ...]     # accepted proposals and the bonus; cut after an end-of-sequence token
    num_drafted: int            # proposals that were verified, all nodes of a tree; 0 for the prefill's token and for plain decoding
    num_accepted: int           # of `tokens`, those that were proposals
    is_prefill: bool = False
    stopped: bool = False       # the last token ends the sequence
    num_positions: int | None = None    # of a tree: positions it could propose for, whether or not it did; None: a chain, as many as proposals

    @property
    def max_accepted(self) -> int:
        """Proposals that could have been accepted at best."""
        return self.num_drafted if self.num_positions is None else self.num_positions


class Read(NamedTuple):
    """A wish of the loop: `Target.read`."""

    ids: Sequence[int]
    last_logits_only: bool
    sampling: Sampling      # of the picks, for a target that makes them


class ReadTree(NamedTuple):
    """A wish of the loop: `TreeTarget.read_tree`."""

    anchor: int
    tree: DraftTree
    sampling: Sampling


Loop = Generator[Read | ReadTree | Round, TargetStep | None, None]


def generate(
    target: Target, *, prompt: Sequence[int], drafter: Drafter | None, sampling: Sampling, max_tokens: int, eos_ids: Collection[int],
    tree_budget: int | None = None,
) -> Iterator[Round]:
    """Decode from an empty target; the first round is the prefill's token.

    tree_budget: nodes of the tree of each round; None: the drafter's chain.
    Ends after an end-of-sequence token, after max_tokens tokens, or when prompt and text fill the target's max_length.
    Errors: ValueError for an empty prompt, one that leaves no room for a token, max_tokens or tree_budget below 1, or a tree without
        a drafter; NotImplementedError for a tree with a target or drafter that knows none.
    """
    loop = wishes(target, prompt=prompt, drafter=drafter, sampling=sampling, max_tokens=max_tokens, eos_ids=eos_ids, tree_budget=tree_budget)
    event = next(loop, None)
    while event is not None:
        step = None
        if isinstance(event, Round):
            yield event
        elif isinstance(event, Read):
            step = target.read(event.ids, last_logits_only=event.last_logits_only)
        else:
            assert isinstance(target, TreeTarget), "checked before the first wish"
            step = target.read_tree(event.anchor, event.tree)
        try:
            event = loop.send(step)
        except StopIteration:
            return


def wishes(
    target: Target, *, prompt: Sequence[int], drafter: Drafter | None, sampling: Sampling, max_tokens: int, eos_ids: Collection[int],
    tree_budget: int | None = None,
) -> Loop:
    """The loop of `generate` for whoever reads for it: yields what the target shall read and is sent its step; yields rounds and is sent None.

    So the reads of several loops can be one step of a model. The target is asked for its lengths, `rewind` and `keep` only.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: must be at least 1; got {max_tokens}.")
    if not prompt:
        raise ValueError("prompt: must hold at least one token; got none.")
    if len(prompt) >= target.max_length:
        raise ValueError(f"prompt: {len(prompt)} tokens leave no room in a context of {target.max_length}. Shorten the prompt.")
    trees = None if tree_budget is None else _tree_pair(target, drafter, tree_budget=tree_budget)
    step = _sent((yield Read(prompt, True, sampling)))
    anchor = _pick(step, -1, position=target.length, sampling=sampling)
    done = 1
    yield Round(tokens=(anchor,), num_drafted=0, num_accepted=0, is_prefill=True, stopped=anchor in eos_ids)
    if drafter is not None:
        drafter.observe(step.features_TF)
    while anchor not in eos_ids and done < max_tokens and target.length + 1 < target.max_length:
        start = target.length
        # anchor, proposals and bonus: what lies beyond max_tokens or the context could never be used
        count = 0 if drafter is None else min(drafter.num_drafts, max_tokens - done - 1, target.max_length - start - 2)
        on_tree = trees if count > 0 else None
        if on_tree is not None and tree_budget is not None:
            tree = on_tree[1].propose_tree(anchor, count=count, budget=tree_budget, sampling=sampling)
        else:
            tree = chain(drafter.propose(anchor, count=count, sampling=sampling) if drafter is not None and count > 0 else ())
        if not len(tree):
            on_tree = None
        if on_tree is not None:
            step = _sent((yield ReadTree(anchor, tree, sampling)))
        else:
            step = _sent((yield Read((anchor, *tree.token_ids), False, sampling)))
        tokens, path = _walk(step, tree, first_position=start + 1, sampling=sampling, eos_ids=eos_ids)
        committed = path[:len(tokens) - 1]   # the newest token is the next anchor: not read yet, also when it was a proposal that ends the text
        if on_tree is not None:
            on_tree[0].keep(committed)
        else:
            target.rewind(start + len(tokens))
        if drafter is not None:
            drafter.observe(step.features_TF[[0, *(node + 1 for node in committed)]])
        anchor = tokens[-1]
        done += len(tokens)
        num_drafted = len(tree) if step.num_drafted is None else step.num_drafted
        yield Round(tokens=tuple(tokens), num_drafted=num_drafted, num_accepted=len(path), stopped=anchor in eos_ids,
                    num_positions=None if on_tree is None else count)


def _sent(step: TargetStep | None) -> TargetStep:
    assert step is not None, "a wish is answered with the target's step"
    return step


def _pick(step: TargetStep, row: int, *, position: int, sampling: Sampling) -> int:
    """The target's token at `position`, which a row of its step predicts."""
    if step.tokens_T is not None:
        return step.tokens_T[row]
    (token,) = choose_tokens(step.logits_TV[row].unsqueeze(0), first_position=position, sampling=sampling)
    return token


def _walk(step: TargetStep, tree: DraftTree, *, first_position: int, sampling: Sampling, eos_ids: Collection[int]) -> tuple[list[int], list[int]]:
    """(the target's own picks, the nodes that they accept): down to the first pick that is no child, or ends the sequence.

    step: 1 + nodes rows, row 0 the anchor's. Where the target has drafted itself its walk is over, up to a pick that ends the sequence.
    """
    if step.num_drafted is not None:
        assert step.tokens_T is not None and not len(tree), "a target that drafts picks, and nobody else drafts"
        end = next((i for i, token in enumerate(step.tokens_T, 1) if token in eos_ids), len(step.tokens_T))
        return list(step.tokens_T[:end]), list(range(min(end, len(step.tokens_T) - 1)))
    tokens: list[int] = []
    path: list[int] = []
    while True:
        at = path[-1] if path else ANCHOR
        tokens.append(_pick(step, at + 1, position=first_position + len(path), sampling=sampling))
        child = tree.child(at, tokens[-1])
        if child is not None:
            path.append(child)
        if child is None or tokens[-1] in eos_ids:
            return tokens, path


def _tree_pair(target: Target, drafter: Drafter | None, *, tree_budget: int) -> tuple[TreeTarget, TreeDrafter]:
    """Target and drafter, as parts that know trees."""
    if tree_budget < 1:
        raise ValueError(f"tree_budget: must be at least 1; got {tree_budget}. Leave it out for a chain.")
    if drafter is None:
        raise ValueError(f"tree_budget: needs a drafter; got {tree_budget} without one.")
    if isinstance(target, TreeTarget) and isinstance(drafter, TreeDrafter):
        return target, drafter
    raise NotImplementedError(f"tree_budget: {type(target).__name__} and {type(drafter).__name__} do not both know draft trees. Leave it out for a chain.")
