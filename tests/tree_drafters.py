"""Drafters that know the text and hide it in trees: right, wrong, right in the wrong place."""

import random
from collections.abc import Sequence

from torch import Tensor

from kilotok.dflash.sampling import Sampling
from kilotok.dflash.tree import ANCHOR, DraftTree

TREE_KINDS = ("right", "wrong", "misplaced", "random")
NUM_DRAFTS = 7


class TreeOracle:
    """`text` follows the prompt. A right tree holds its next tokens as second children; a wrong one holds none of them.

    A misplaced one has what comes later below a wrong first token, and the first token again below itself, so that a node that sees or
    counts anything but its ancestors is taken for another. A random one is all of this by chance.
    """

    num_drafts = NUM_DRAFTS

    def __init__(self, text: Sequence[int], *, prompt_length: int, kind: str, vocab_size: int) -> None:
        self.text, self.prompt_length, self.kind, self.vocab_size = text, prompt_length, kind, vocab_size
        self.position = 0
        self.trees: list[DraftTree] = []

    def observe(self, features_TF: Tensor) -> None:
        self.position += features_TF.shape[0]

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        raise AssertionError("a tree was asked for")

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        assert 1 <= count <= self.num_drafts
        done = self.position - self.prompt_length + 1   # tokens of the text up to the anchor
        assert self.text[done - 1] == anchor
        tree = self._tree(list(self.text[done:done + count]), count=count, budget=budget, draw=random.Random(self.position))
        assert 1 <= len(tree) <= budget and max(tree.depths) <= count
        self.trees.append(tree)
        return tree

    def _tree(self, right: list[int], *, count: int, budget: int, draw: random.Random) -> DraftTree:
        nodes: dict[tuple[int, int], int] = {}   # (parent, token): depth
        depths = {ANCHOR: 0}

        def add(parent: int, token: int) -> int | None:
            """The new node; None when it is there already or does not fit."""
            if len(nodes) == budget or depths[parent] == count or (parent, token) in nodes:
                return None
            node = len(nodes)
            nodes[parent, token] = depths[node] = depths[parent] + 1
            return node

        def other(token: int) -> int:
            return (token + 1 + draw.randrange(self.vocab_size - 1)) % self.vocab_size

        at: int | None = ANCHOR
        if self.kind == "right":
            for token in right:
                if at is not None:
                    if budget > 1:
                        add(at, other(token))
                    at = add(at, token)
        elif self.kind == "wrong":
            first = add(ANCHOR, other(right[0]))
            assert first == 0
            for _ in range(2 * budget):
                add(draw.choice([n for n in depths if n != ANCHOR]), draw.randrange(self.vocab_size))
        elif self.kind == "misplaced":
            at = add(ANCHOR, other(right[0]))
            for token in right[1:4]:
                at = None if at is None else add(at, token)
            at = add(ANCHOR, right[0])
            for token in (right[0], *right[1:]):
                if at is not None:
                    below = add(at, token)
                    if below is not None:
                        add(below, right[-1])
        else:
            for _ in range(4 * budget):
                parent = draw.choice(list(depths))
                token = right[min(depths[parent], len(right) - 1)]
                add(parent, token if draw.random() < 0.5 else other(token))
        return DraftTree(token_ids=tuple(token for _, token in nodes), parents=tuple(parent for parent, _ in nodes))
