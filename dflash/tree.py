"""Draft trees: several candidates a position, verified by one target step instead of one chain of guesses.

A block of masked slots gives each position's scores without knowing what stands before it, so the probability of a path is
estimated by the product of its tokens' marginals. Of all trees with `budget` nodes, the one whose nodes have the largest
products has the largest expected number of accepted tokens under that estimate: the expectation is the sum of the products.
A node's product is at most its parent's, so taking the best node at the frontier again and again finds that tree, and every
node comes after its parent. Verification walks down from the anchor: the target's own pick decides at every node, and the
first pick that is no child is the bonus. So the text is the target's whatever the tree holds; the scores only decide how far
a step gets.

A chain is the tree of one candidate a position (`branches=1`). The best tree of as many nodes need not hold that chain: where
a second candidate at an early position is likelier than the last links, it takes their place.

Legend: N positions after the anchor, V vocabulary.
Source: DDTree, arXiv 2604.12989.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ANCHOR = -1   # as a parent: the node is a candidate for the position after the anchor


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """Candidate tokens below an anchor, parents before children; nodes are named by their index."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]    # index of each node's parent, or ANCHOR
    confidences: tuple[float, ...] | None = field(default=None, compare=False)   # the draft's probability of each node given its parent; None: not told

    def __post_init__(self) -> None:
        if self.confidences is not None and len(self.confidences) != len(self.token_ids):
            raise ValueError(f"tree: every node has one confidence; got {len(self.token_ids)} nodes and {len(self.confidences)} confidences.")
        if len(self.parents) != len(self.token_ids):
            raise ValueError(f"tree: every node has one parent; got {len(self.token_ids)} nodes and {len(self.parents)} parents.")
        for node, parent in enumerate(self.parents):
            if not ANCHOR <= parent < node:
                raise ValueError(f"tree: a parent comes before its children ({ANCHOR} for the anchor); got parent {parent} of node {node}.")
        if len(self._node_of) < len(self.token_ids):
            raise ValueError(f"tree: the children of a node are different tokens; got {list(self.token_ids)} below {list(self.parents)}.")

    def __len__(self) -> int:
        return len(self.token_ids)

    @functools.cached_property
    def _node_of(self) -> dict[tuple[int, int], int]:
        return {key: node for node, key in enumerate(zip(self.parents, self.token_ids, strict=True))}

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node: 1 for the position after the anchor."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return tuple(depths)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node (or of ANCHOR) that is this token."""
        return self._node_of.get((node, token))

    def first(self, count: int) -> "DraftTree":
        """The first nodes alone; of a tree of `build_tree` the best one of that size."""
        return DraftTree(token_ids=self.token_ids[:count], parents=self.parents[:count],
                         confidences=None if self.confidences is None else self.confidences[:count])

    def path(self, node: int) -> list[int]:
        """The nodes from below the anchor down to this one."""
        nodes = []
        while node != ANCHOR:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def runs(self) -> list[list[int]]:
        """ANCHOR and every node once, depth first: each run goes down to a leaf, and what it starts below was read last at its depth."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        runs, starts = [], [ANCHOR]
        while starts:
            run = [starts.pop()]
            while below := children.get(run[-1]):
                starts += below[:0:-1]
                run.append(below[0])
            runs.append(run)
        return runs


def chain(token_ids: Sequence[int], *, confidences: Sequence[float] | None = None) -> DraftTree:
    """One candidate a position."""
    return DraftTree(token_ids=tuple(token_ids), parents=tuple(range(ANCHOR, len(token_ids) - 1)),
                     confidences=None if confidences is None else tuple(confidences))


def build_tree(scores_NV: Tensor, *, budget: int, branches: int | None = None) -> DraftTree:
    """The `budget` nodes with the largest products of marginals, or all there are.

    Shapes: scores_NV [N, V], row n for position n + 1 after the anchor: `candidate_scores`, or logits. -inf: never proposed.
    branches: candidates of a position at most; None: as many as could matter.
    Numerics: a position's candidates are ranked by its scores, equal ones by id; marginals are softmax in float64. Of equal
        products the lower depth comes first, then the better rank of the token, then the parent that came first.
    Errors: ValueError for a budget or branches below 1.
    """
    for name, value in (("budget", budget), ("branches", branches)):
        if value is not None and value < 1:
            raise ValueError(f"build_tree: {name} must be at least 1; got {value}.")
    num_positions, vocab_size = scores_NV.shape
    width = min(budget, vocab_size, budget if branches is None else branches)
    ids_NK = scores_NV.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    ids = ids_NK.tolist()
    logs = scores_NV.to(torch.float64).log_softmax(-1).gather(1, ids_NK).tolist()
    token_ids: list[int] = []
    parents: list[int] = []
    marginals: list[float] = []
    above: list[float] = []                                             # log product of each node
    frontier: list[tuple[float, int, int, int]] = []                    # (-log product, depth, rank, parent)

    def offer(depth: int, rank: int, parent: int) -> None:
        if depth <= num_positions and rank < width and logs[depth - 1][rank] > -math.inf:
            heapq.heappush(frontier, (-logs[depth - 1][rank] - (0.0 if parent == ANCHOR else above[parent]), depth, rank, parent))

    offer(1, 0, ANCHOR)
    while frontier and len(token_ids) < budget:
        cost, depth, rank, parent = heapq.heappop(frontier)
        token_ids.append(ids[depth - 1][rank])
        parents.append(parent)
        marginals.append(math.exp(logs[depth - 1][rank]))
        above.append(-cost)
        offer(depth, rank + 1, parent)
        offer(depth + 1, 0, len(token_ids) - 1)
    return DraftTree(token_ids=tuple(token_ids), parents=tuple(parents), confidences=tuple(marginals))
