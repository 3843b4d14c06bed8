"""Which token a row of logits gives: greedy, or sampled with noise keyed by (seed, position).

Draft and target call the same function with the same position, so they share the noise. A sampled text then does not
depend on whether, or how well, it was drafted, and every token is still drawn from the target's own distribution.

Legend: T positions, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.sampling import gumbel_noise_ref

NOISE_POSITIONS = 16     # whose noise is made together
MIN_TEMPERATURE = 1e-6   # logits divided by less could overflow fp32
TOP_P_TRIES = 8          # before sorting: each try costs a pass over the vocabulary, and about 1 / top_p are needed


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are picked; temperature 0 is greedy, and then nothing else matters."""

    temperature: float = 0.0
    top_p: float = 1.0              # keep the likeliest tokens until their probabilities reach this sum
    top_k: int | None = None        # keep at most so many; None: all
    seed: int = 0                   # of the noise; 0..2**63 - 1

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= 100:
            raise ValueError(f"temperature: must be 0 (greedy) or lie in {MIN_TEMPERATURE}..100; got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must lie in (0, 1]; got {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, or null for all tokens; got {self.top_k}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: must lie in 0..2**63 - 1; got {self.seed}.")


def choose_tokens(logits_TV: Tensor, *, first_position: int, sampling: Sampling) -> list[int]:
    """The tokens at positions first_position, first_position + 1, ...

    Shapes: logits_TV [T, V], row t for position first_position + t.
    Numerics: greedy compares the logits as they are; sampling works in fp32. Ties go to the lowest id. Each row's
        result depends on that row, its position and the seed only.
    """
    if sampling.temperature == 0:
        return [int(row.argmax()) for row in logits_TV]
    return [_sample(row, noise=_noise(logits_TV, position=first_position + t, sampling=sampling), sampling=sampling)
            for t, row in enumerate(logits_TV.float())]


def candidate_scores(logits_TV: Tensor, *, first_position: int, sampling: Sampling) -> Tensor:
    """What a draft ranks its candidates by: the first of a row is what `choose_tokens` gives.

    Greedy: the logits. Sampled: with the target's noise of that position, after temperature, top_k and top_p. The target picks the
    largest noisy score of its own; where its logits are nearly the draft's, its pick is among the draft's largest, and tokens that the
    noise rules out are not worth a place in a tree, however likely they were before. -inf: dropped by top_k or top_p.

    Shapes: logits_TV [T, V], row t for position first_position + t. Returns [T, V], fp32 when sampled.
    """
    if sampling.temperature == 0:
        return logits_TV
    return torch.stack([_kept(row / sampling.temperature, sampling) + _noise(logits_TV, position=first_position + t, sampling=sampling)
                        for t, row in enumerate(logits_TV.float())])


def confidences(logits_TV: Tensor, tokens: Sequence[int], *, sampling: Sampling) -> list[float]:
    """How sure a draft is of the tokens it picked: their softmax probabilities under logits / temperature; greedy, under the logits.

    Shapes: logits_TV [T, V] and T tokens. Numerics: fp32. top_k, top_p and the noise are left out.
    """
    scaled_TV = logits_TV.float() / (sampling.temperature or 1.0)
    picked_T1 = scaled_TV.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device).unsqueeze(1))
    found: list[float] = (picked_T1.squeeze(1) - scaled_TV.logsumexp(1)).exp().tolist()
    return found


def _noise(logits_TV: Tensor, *, position: int, sampling: Sampling) -> Tensor:
    """[V], for logits of this width and place."""
    block, place = divmod(position, NOISE_POSITIONS)
    return _noise_block(sampling.seed, block, logits_TV.shape[1], logits_TV.device)[place]


@functools.lru_cache(maxsize=16)
def _noise_block(seed: int, block: int, vocab_size: int, device: torch.device) -> Tensor:
    """Noise of NOISE_POSITIONS positions: draft and target want the same ones, and one call costs as much as sixteen."""
    positions = range(block * NOISE_POSITIONS, (block + 1) * NOISE_POSITIONS)
    return gumbel_noise_ref(seed=seed, positions=positions, vocab_size=vocab_size, device=device)


def _sample_top_p(scaled_V: Tensor, *, noise: Tensor, top_p: float) -> int | None:
    """The best noisy token whose likelier ones together stay below top_p: the same as masking first, without a sort. None: not soon found."""
    noisy = scaled_V + noise
    if top_p == 1:
        return int(noisy.argmax())
    probabilities = scaled_V.softmax(0)
    for _ in range(TOP_P_TRIES):
        best = int(noisy.argmax())
        likelier = scaled_V > scaled_V[best]
        likelier[:best] |= scaled_V[:best] == scaled_V[best]   # of equal logits the lowest id comes first
        if not bool(likelier.any()) or float(probabilities[likelier].sum()) < top_p:
            return best
        noisy[best] = -torch.inf
    return None


def _sample(logits_V: Tensor, *, noise: Tensor, sampling: Sampling) -> int:
    scaled = logits_V / sampling.temperature
    if sampling.top_k is None:
        found = _sample_top_p(scaled, noise=noise, top_p=sampling.top_p)
        if found is not None:
            return found
    return int((_kept(scaled, sampling) + noise).argmax())


def _kept(scaled_V: Tensor, sampling: Sampling) -> Tensor:
    """The scores with -inf where top_k or top_p drop a token."""
    sorted_V, ids = scaled_V.sort(descending=True, stable=True)   # stable: of equal logits the lowest id is kept first
    keep = torch.ones_like(ids, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[sampling.top_k:] = False
    if sampling.top_p < 1:
        probabilities = sorted_V.masked_fill(~keep, -torch.inf).softmax(0)   # top_p counts what top_k left, as in vLLM
        keep &= probabilities.cumsum(0) - probabilities < sampling.top_p     # always keeps the first
    kept = torch.full_like(scaled_V, -torch.inf)
    kept[ids[keep]] = scaled_V[ids[keep]]
    return kept
