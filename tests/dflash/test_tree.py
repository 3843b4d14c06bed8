"""Draft trees: the best tree of every size, and the loop on them."""

import functools
import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from tree_drafters import NUM_DRAFTS, TREE_KINDS, TreeOracle

from kilotok.dflash.generate import Round, TargetStep, generate
from kilotok.dflash.metrics import acceptance_by_position, acceptance_length
from kilotok.dflash.sampling import Sampling, candidate_scores, choose_tokens
from kilotok.dflash.tree import ANCHOR, DraftTree, build_tree, chain

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=5), "top_p": Sampling(temperature=1.3, top_p=0.8, seed=6),
             "top_k": Sampling(temperature=0.9, top_k=3, top_p=0.95, seed=2**40)}
BUDGETS = (1, 7, 15)
VOCAB = 11
PROMPT = (3, 1, 4, 1, 5)


def scores_of(shape: tuple[int, int], *, seed: int, spread: float = 1.5) -> Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- building ---


def all_trees(num_positions: int, vocab_size: int, size: int) -> set[frozenset[tuple[int, ...]]]:
    """Every prefix-closed set of `size` paths, grown a path at a time."""
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(size):
        trees = {tree | {(*path, v)} for tree in trees for path in ((), *tree) if len(path) < num_positions for v in range(vocab_size)
                 if (*path, v) not in tree}
    return trees


@pytest.mark.parametrize(("num_positions", "vocab_size", "budgets"), [(3, 3, range(1, 6)), (4, 2, range(1, 7)), (1, 6, range(1, 7)), (5, 1, range(1, 6))])
def test_no_tree_of_its_size_has_a_larger_sum_of_products(num_positions: int, vocab_size: int, budgets: range) -> None:
    for budget in budgets:
        candidates = all_trees(num_positions, vocab_size, budget)
        for seed in range(6):
            scores = scores_of((num_positions, vocab_size), seed=seed)
            marginals = scores.double().softmax(-1).tolist()
            product = {path: math.prod(marginals[d][v] for d, v in enumerate(path))
                       for depth in range(1, num_positions + 1) for path in itertools.product(range(vocab_size), repeat=depth)}

            def total(paths: Collection[tuple[int, ...]], product: dict[tuple[int, ...], float] = product) -> float:
                return math.fsum(product[path] for path in paths)

            tree = build_tree(scores, budget=budget)
            paths = {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))}
            assert len(tree) == len(paths) == budget and paths in candidates
            assert total(paths) == pytest.approx(max(total(c) for c in candidates), rel=1e-12)


def test_a_larger_budget_adds_nodes_to_the_smaller_tree() -> None:
    scores = scores_of((NUM_DRAFTS, 50), seed=1)
    largest = build_tree(scores, budget=40)
    for budget in range(1, 40):
        tree = build_tree(scores, budget=budget)
        assert (tree.token_ids, tree.parents) == (largest.token_ids[:budget], largest.parents[:budget])
    assert max(largest.depths) > 2 and len(set(largest.parents)) > 5   # neither a fan nor a chain


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_with_one_branch_it_is_the_chain_that_would_be_drafted(sampling: Sampling) -> None:
    for seed in range(20):
        logits = scores_of((NUM_DRAFTS, 50), seed=seed)
        scores = candidate_scores(logits, first_position=21, sampling=sampling)
        links = choose_tokens(logits, first_position=21, sampling=sampling)
        for budget in (1, 3, 7, 9):
            assert build_tree(scores, budget=budget, branches=1) == chain(links[:budget])
        assert build_tree(scores, budget=1) == chain(links[:1])   # the best node of all


def test_equal_products_come_by_depth_then_rank_then_parent() -> None:
    """Two positions of two equal tokens: every product at a depth is the same, and a rank is a token."""
    tree = build_tree(torch.zeros(2, 2), budget=9)
    assert tree.parents == (ANCHOR, ANCHOR, 0, 1, 0, 1) and tree.token_ids == (0, 1, 0, 0, 1, 1) and tree.depths == (1, 1, 2, 2, 2, 2)


def test_what_is_ruled_out_is_never_proposed() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, 2.0, -torch.inf]])
    tree = build_tree(scores, budget=30)
    assert {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))} == {(0,), (2,), (0, 1), (2, 1)}


def test_two_sure_positions_and_a_split_one_by_hand() -> None:
    """0.9 | 0.6 against 0.4 | 0.9: the second candidate of the split position comes before the chain's third link where it is likelier."""
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]]).log()
    tree = build_tree(scores, budget=4)   # 0.9, 0.54, 0.36, 0.27: the chain would end with 0.27
    assert (tree.token_ids, tree.parents) == ((0, 0, 1, 0), (ANCHOR, 0, 0, 1))


@pytest.mark.parametrize(("options", "message"), [({"budget": 0}, "budget must be at least 1; got 0"), ({"budget": 3, "branches": 0}, "branches must be")])
def test_sizes_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^build_tree: {message}"):
        build_tree(torch.zeros(2, 2), **options)


@pytest.mark.parametrize(("token_ids", "parents", "message"), [
    ((1, 2), (ANCHOR,), "every node has one parent; got 2 nodes and 1 parents"), ((1,), (0,), "got parent 0 of node 0"), ((1,), (-2,), "got parent -2"),
    ((4, 4), (ANCHOR, ANCHOR), r"the children of a node are different tokens; got \[4, 4\]"), ((1, 4, 2, 4), (ANCHOR, 0, ANCHOR, 0), "different tokens"),
])
def test_what_is_no_tree(token_ids: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^tree: .*{message}"):
        DraftTree(token_ids=token_ids, parents=parents)


def test_runs_read_every_node_right_after_its_ancestors() -> None:
    for seed in range(30):
        tree = build_tree(scores_of((4, 9), seed=seed), budget=20)
        held: list[int] = []   # what lies at each depth
        for run in tree.runs():
            for node in run:
                depth = 0 if node == ANCHOR else tree.depths[node]
                held[depth:] = [node]
                assert held == ([ANCHOR] if node == ANCHOR else [ANCHOR, *tree.path(node)])
        assert sorted(itertools.chain(*tree.runs())) == list(range(ANCHOR, 20))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_best_candidate_is_the_token_that_would_be_picked(sampling: Sampling) -> None:
    for seed in range(20):
        logits = scores_of((5, 200), seed=seed)
        scores = candidate_scores(logits, first_position=14, sampling=sampling)
        assert scores.argmax(-1).tolist() == choose_tokens(logits, first_position=14, sampling=sampling)
        if sampling.top_k is not None:
            assert ((scores > -torch.inf).sum(-1) <= sampling.top_k).all()


# --- the loop, on a target that is a function of the whole text ---


@functools.cache
def toy_logits(history: tuple[int, ...]) -> Tensor:
    """[V], a function of every token of the history and of its order."""
    return torch.tensor(list(hashlib.sha256(bytes(history)).digest()[:VOCAB])) / 40


@functools.cache
def plain_text(count: int, sampling: Sampling) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    while len(text) < count:
        text += tuple(choose_tokens(toy_logits(PROMPT + text)[None], first_position=len(PROMPT) + len(text), sampling=sampling))
    return text


class ToyTarget:
    """Holds what was committed, and reads no position outside its context."""

    def __init__(self, *, max_length: int = 1000) -> None:
        self.max_length, self.ids = max_length, []
        self.read_tokens = 0
        self._tree: tuple[int, DraftTree] | None = None

    @property
    def length(self) -> int:
        return len(self.ids)

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        assert self._tree is None and self.length + len(ids) <= self.max_length
        self.ids += ids
        histories = [self.ids[:n] for n in range(self.length - len(ids) + 1, self.length + 1)]
        return self._step(histories[-1:] if last_logits_only else histories, features=histories)

    def rewind(self, length: int) -> None:
        del self.ids[length:]

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        assert self._tree is None and self.length + 1 + max(tree.depths) <= self.max_length
        self._tree = anchor, tree
        self.read_tokens += 1 + len(tree)
        histories = [[*self.ids, anchor, *(tree.token_ids[n] for n in tree.path(node))] for node in range(ANCHOR, len(tree))]
        return self._step(histories, features=histories)

    def keep(self, path: Sequence[int]) -> None:
        assert self._tree is not None
        anchor, tree = self._tree
        assert list(path) == (tree.path(path[-1]) if path else [])
        self.ids += [anchor, *(tree.token_ids[n] for n in path)]
        self._tree = None

    def _step(self, histories: list[list[int]], *, features: list[list[int]]) -> TargetStep:
        return TargetStep(logits_TV=torch.stack([toy_logits(tuple(h)) for h in histories]),
                          features_TF=torch.tensor([[len(h) - 1, h[-1]] for h in features], dtype=torch.float32))


class Watching(TreeOracle):
    """Also checks that it is shown every committed position once, in order."""

    def __init__(self, text: Sequence[int], kind: str) -> None:
        super().__init__(text, prompt_length=len(PROMPT), kind=kind, vocab_size=VOCAB)
        self.seen: list[int] = []

    def observe(self, features_TF: Tensor) -> None:
        assert features_TF[:, 0].tolist() == list(range(self.position, self.position + len(features_TF)))
        self.seen += [int(t) for t in features_TF[:, 1]]
        super().observe(features_TF)


def decode(
    kind: str, *, budget: int, sampling: Sampling, max_tokens: int, eos_ids: Collection[int] = (), max_length: int = 1000,
) -> tuple[list[int], list[Round]]:
    target, drafter = ToyTarget(max_length=max_length), Watching(plain_text(80, sampling), kind)
    text: list[int] = []
    rounds = []
    for r in generate(target, prompt=PROMPT, drafter=drafter, sampling=sampling, max_tokens=max_tokens, eos_ids=eos_ids, tree_budget=budget):
        rounds.append(r)
        text += r.tokens
        assert target.ids == [*PROMPT, *text[:-1]]
        assert r.is_prefill or drafter.seen == target.ids
        assert r.num_accepted <= min(r.num_drafted, r.max_accepted)
        assert len(r.tokens) == r.num_accepted + (not (r.stopped and r.num_accepted == len(r.tokens)))
    assert target.read_tokens == sum(1 + r.num_drafted for r in rounds if r.num_drafted)   # what is reported is what was verified
    return text, rounds


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_text_is_that_of_plain_decoding(sampling: Sampling, kind: str, budget: int) -> None:
    accepted = set()
    for max_tokens in (1, 2, 3, 6, 17):
        text, rounds = decode(kind, budget=budget, sampling=sampling, max_tokens=max_tokens)
        assert tuple(text) == plain_text(max_tokens, sampling)
        full, fuller = decode(kind, budget=budget, sampling=sampling, max_tokens=1000, max_length=len(PROMPT) + max_tokens)
        assert full == text and [r.tokens for r in fuller] == [r.tokens for r in rounds]   # the context ends it as the wish does
        accepted |= {r.num_accepted for r in rounds[1:]}
        assert [r.num_positions for r in rounds[1:]] == [
            min(NUM_DRAFTS, left - 1) if left > 1 else None for left in (max_tokens - sum(len(r.tokens) for r in rounds[:n]) for n in range(1, len(rounds)))]
    if kind == "right":
        assert max(accepted) == max(1, budget // 2)   # every second node is right
    elif kind == "wrong":
        assert accepted == {0}


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_an_end_token_in_a_tree_ends_the_text(kind: str) -> None:
    where = set()
    for sampling in SAMPLINGS.values():
        whole = plain_text(40, sampling)
        for eos in range(0, VOCAB, 2):
            end = whole.index(eos) if eos in whole else 39
            text, rounds = decode(kind, budget=15, sampling=sampling, max_tokens=40, eos_ids={eos})
            assert tuple(text) == whole[:end + 1] and rounds[-1].stopped == (eos in whole)
            if rounds[-1].stopped and not rounds[-1].is_prefill:
                where.add("node" if rounds[-1].num_accepted == len(rounds[-1].tokens) else "bonus")
    assert where == {"bonus"} if kind == "wrong" else "node" in where


def test_acceptance_by_position_counts_what_a_tree_could_have_reached() -> None:
    """A tree that is three deep for seven positions has not got to the fourth; only near the end of a text are there fewer."""
    prefill = Round(tokens=(1,), num_drafted=0, num_accepted=0, is_prefill=True)
    rounds = [prefill, Round(tokens=(1, 2, 3), num_drafted=15, num_accepted=2, num_positions=7),
              Round(tokens=(1,), num_drafted=15, num_accepted=0, num_positions=2)]
    assert acceptance_by_position(rounds, num_drafts=7) == [0.5, 0.5, 0, 0, 0, 0, 0] and acceptance_length(rounds) == 2.0


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"tree_budget": 0}, ValueError, "tree_budget: must be at least 1; got 0"), ({"drafter": None}, ValueError, "tree_budget: needs a drafter"),
    ({"drafter": type("Chain", (), {"num_drafts": 7, "observe": None, "propose": None})()}, NotImplementedError,
     "tree_budget: ToyTarget and Chain do not both know draft trees"),
])
def test_trees_that_cannot_be_had(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"drafter": Watching((), "right"), "tree_budget": 7, **options}
    with pytest.raises(error, match=f"^{message}"):
        next(generate(ToyTarget(), prompt=PROMPT, sampling=Sampling(), max_tokens=5, eos_ids=(), **given))
