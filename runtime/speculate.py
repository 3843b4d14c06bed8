"""How many proposals of a draft are worth verifying, round by round. Pure arithmetic: no torch, no clock.

Every verified token is a column of the target's step, and in a mixture of experts it may touch experts that no other column needs, so columns are
not free. A draft says how sure it is of each proposal. With the confidence c of a proposal given that those before it were right, and a scale s of its
depth that is learned from what was accepted, the tokens that a round of v proposals commits are on average

    E(v) = 1 + sum over k = 1..v of prod over n = 1..k of min(1, c_n * s_n)

the bonus being the 1. A round of v costs C(v) seconds, measured (draft_costs.py), so tokens per second are largest at

    v* = argmax E(v) / C(v), the smaller v of equals.

Of a tree the nodes stand in order of their products, so its first v nodes are its best v, and E(v) is 1 plus the sum of the first v products: a chain
is the tree with one child a node. Whether to draft at all is another question, asked over many rounds (draft_gate.py).

Only the number of proposals depends on any of this. Which tokens are committed is the target's choice alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..dflash.tree import ANCHOR, DraftTree

PRIOR = 8.0               # expected acceptances at the draft's word, with which a calibration starts
MEMORY = 0.995            # of what was seen before, kept at each further proposal of that depth: some 200 proposals count
MIN_SCALE, MAX_SCALE = 0.1, 4.0


@dataclass
class Calibration:
    """Observed acceptances by confidence, of each depth; the scale is their ratio, drawn to 1 by a prior and bounded."""

    _expected: dict[int, float] = field(default_factory=dict)
    _accepted: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)     # proposals seen, by depth

    def add(self, depth: int, *, confidence: float, accepted: bool) -> None:
        """A proposal whose predecessors were accepted, or a tree's children of one node, whose confidences add up."""
        self._expected[depth] = MEMORY * self._expected.get(depth, 0.0) + confidence
        self._accepted[depth] = MEMORY * self._accepted.get(depth, 0.0) + accepted
        self.counts[depth] = self.counts.get(depth, 0) + 1

    def add_round(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """What was verified, and the tokens that the target picked."""
        if tree.confidences is None:
            raise ValueError("calibration: needs a tree with confidences; got one without.")
        at = ANCHOR
        for depth, token in enumerate(tokens, start=1):
            children = [node for node, parent in enumerate(tree.parents) if parent == at]
            if not children:
                return
            child = tree.child(at, token)
            self.add(depth, confidence=sum(tree.confidences[node] for node in children), accepted=child is not None)
            if child is None:
                return
            at = child

    def scale(self, depth: int) -> float:
        ratio = (PRIOR + self._accepted.get(depth, 0.0)) / (PRIOR + self._expected.get(depth, 0.0))
        return min(MAX_SCALE, max(MIN_SCALE, ratio))

    def scales(self, most: int) -> list[float]:
        """[n - 1]: of depth n, up to `most`."""
        return [self.scale(depth) for depth in range(1, most + 1)]


def expected_tokens(tree: DraftTree, *, scales: Sequence[float]) -> list[float]:
    """[v]: E(v) of the first v nodes, v = 0..len(tree).

    scales: of depths 1, 2, ... Errors: ValueError for a tree without confidences, or deeper than there are scales.
    """
    if tree.confidences is None:
        raise ValueError("expected_tokens: needs a tree with confidences; got one without.")
    if max(tree.depths, default=0) > len(scales):
        raise ValueError(f"expected_tokens: needs a scale of every depth; got {len(scales)} for a tree of depth {max(tree.depths)}.")
    products: list[float] = []
    expected = [1.0]
    for parent, depth, confidence in zip(tree.parents, tree.depths, tree.confidences, strict=True):
        products.append((1.0 if parent == ANCHOR else products[parent]) * min(1.0, confidence * scales[depth - 1]))
        expected.append(expected[-1] + products[-1])
    return expected


def best_length(expected: Sequence[float], costs: Sequence[float]) -> int:
    """v* of E(v) and C(v), v = 0, 1, ... Errors: ValueError for lists of different lengths, or a cost that is not above 0."""
    if len(expected) != len(costs) or not expected:
        raise ValueError(f"best_length: needs a cost for every length; got {len(expected)} expectations and {len(costs)} costs.")
    if min(costs) <= 0:
        raise ValueError(f"best_length: costs are times above 0; got {min(costs)}.")
    return max(range(len(costs)), key=lambda v: (expected[v] / costs[v], -v))
