"""A round of the resident kernel: a block of drafts is made, verified by one step of the target, and accepted as far as the target says the same.

A sequence has a tile of 8 columns to itself, sequence s columns 8 s .. 8 s + 7. Between rounds its state is an anchor, the newest token, which the target has
not read, its position p, and the draft's context up to p - 1.

    draft     slots at positions p .. p + N - 1, the anchor's token and then masks; slot n proposes the token at p + n
    verify    the target reads the anchor and the first v proposals, columns 0 .. v; column n picks the token at p + n + 1
    accept    a, the proposals in a row that are what the column before them picked; columns 0 .. a are committed, and what they picked is the text
    go on     the anchor is what column a picked, at position p + a + 1; the draft's context takes the features of the committed columns

So a round commits 1 to v + 1 tokens, those of plain decoding: proposals and v decide how many, never which.

How many are verified: with c_n the probability that the draft gives its n-th proposal, q_n = min(1, c_n * scale_n) stands for the chance that the target
agrees as well, and E(v) = 1 + sum_{k <= v} prod_{n <= k} q_n are the tokens to expect. v maximizes E(v) / cost(v), among equals the smallest. It is at most
the sequence's limit, the block's proposals, and what keeps the next anchor inside the context. Costs that fall with v always take the limit.

A sequence whose anchor is at the context's end or behind it is dead: its tokens and its v are -1.

Legend: C columns, S sequences (C / 8), R rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Column, StepInputs

TILE = 8                # columns of a sequence
MAX_LIMIT = TILE - 1


@dataclass(frozen=True, kw_only=True)
class RoundColumn(Column):
    """The anchor of a sequence, how its tokens are picked, and how many proposals are verified at most. Tokens are greedy or picked by temperature alone."""

    limit: int = MAX_LIMIT

    def words(self) -> tuple[int, ...]:
        """As int32, a column of RoundInputs."""
        return (*super().words(), self.limit)


_DEAD = (0, -1, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """The sequences of a round, one a tile of columns, in one buffer. A slot below 0 is a dead tile. A device changes ids and positions in place.

    words_9S: int32, by row: anchor's id, slot, position, temperature (fp32; 0 is greedy), top_p (fp32, 1), top_k (0), the seed's low and high word, limit.
    """

    words_9S: Tensor

    @staticmethod
    def of(sequences: Sequence["RoundColumn | None"], *, device: torch.device | str = "cpu") -> "RoundInputs":
        """None for a dead tile.

        Errors: NotImplementedError for top_k and top_p, ValueError for another limit than 0..7 or a sequence that is there twice.
        """
        where, live = "RoundInputs", [s for s in sequences if s is not None and s.slot >= 0]
        for one in live:
            if one.temperature > 0 and (one.top_p < 1 or one.top_k):
                raise NotImplementedError(f"{where}: rounds pick greedily or by temperature alone; got top_p {one.top_p} and top_k {one.top_k}. Run steps, and "
                                          "pick from their logits.")
            if not 0 <= one.limit <= MAX_LIMIT:
                raise ValueError(f"{where}: limit counts the proposals that are verified, 0..{MAX_LIMIT}; got {one.limit}.")
        if len({one.slot for one in live}) < len(live):
            raise ValueError(f"{where}: a sequence has one tile; got slots {[one.slot for one in live]}.")
        rows = [_DEAD if one is None else one.words() for one in sequences]
        return RoundInputs(words_9S=torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device))

    ids_S = property(lambda self: self.words_9S[0])
    slots_S = property(lambda self: self.words_9S[1])
    positions_S = property(lambda self: self.words_9S[2])
    limits_S = property(lambda self: self.words_9S[8])

    def clone(self) -> "RoundInputs":
        return RoundInputs(words_9S=self.words_9S.clone())

    def live(self, *, max_length: int) -> list[int]:
        """Sequences that take part in a round: their anchors are inside the context."""
        both = zip(self.slots_S.tolist(), self.positions_S.tolist(), strict=True)
        return [i for i, (slot, position) in enumerate(both) if slot >= 0 and position < max_length]

    def columns(self, ids_C: Tensor, counts_S: Tensor, *, max_length: int) -> StepInputs:
        """A step's columns: of each sequence the first `counts_S` of its tile, ids `ids_C`, at positions from the anchor's on; dead beyond the context."""
        at = torch.arange(TILE, dtype=torch.int32, device=ids_C.device)
        positions = self.positions_S.unsqueeze(1) + at
        words = self.words_9S[:8].repeat_interleave(TILE, dim=1)
        words[0] = ids_C
        words[1] = torch.where((at < counts_S.unsqueeze(1)) & (positions < max_length), self.slots_S.unsqueeze(1), -1).flatten()
        words[2] = positions.flatten()
        return StepInputs(words_8C=words)


def verify_length_ref(confidence_N: Tensor, *, cost_8: Tensor, scale_8: Tensor, limit: int) -> int:
    """How many proposals a round verifies, 0..limit; in fp32, in this order.

    Shapes: confidence_N fp32 [limit or more], of proposals 1, 2, ...; scale_8, of proposal n at n, the first unused. Units: cost_8, of verifying v, any.
    """
    best, best_ratio = 0, torch.tensor(1.0) / cost_8[0].cpu()
    expected, together = torch.tensor(1.0), torch.tensor(1.0)
    for v in range(1, limit + 1):
        together = together * torch.minimum(torch.tensor(1.0), confidence_N[v - 1].float().cpu() * scale_8[v].cpu())
        expected = expected + together
        ratio = expected / cost_8[v].cpu()
        if ratio > best_ratio:
            best, best_ratio = v, ratio
    return best


def limit_at(position: int, *, limit: int, block_size: int, max_length: int) -> int:
    """The most proposals that a round at this anchor verifies: the next anchor must lie inside the context."""
    return max(0, min(limit, block_size - 1, max_length - 2 - position))
