"""Gumbel noise keyed by (seed, position): the randomness of a sampled token, without any state.

Adding Gumbel noise to log-probabilities and taking the largest draws from their distribution (Gumbel-max). When the noise
of a position is a function of (seed, position) alone, whoever samples there, draft or target, one token at a time or
eight, adds the same numbers: a draft that agrees with the target is accepted, and the text does not depend on drafting.

The generator is Philox 4x32-10, counter (token // 4, position, 0, 0), key (seed low, seed high); one counter gives the
uniforms of four neighbouring tokens. It has no state, runs anywhere, and Triton's `tl.philox` computes the same words.

Legend: T positions, V vocabulary.
Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); Gumbel-max as in Maddison et al. 2014.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PHILOX_M = (0xD2511F53, 0xCD9E8D57)   # multipliers and key increments of the paper
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox_4x32_ref(counters: tuple[Tensor, Tensor, Tensor, Tensor], *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each counter, after ten rounds.

    Shapes: four int64 tensors of one shape holding 0..2**32 - 1, in and out.
    Numerics: exact; a 32 by 32 bit product is put together from 16-bit halves, because int64 holds 63 bits.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = seed & MASK, seed >> 32 & MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, PHILOX_M[0])
        high1, low1 = _multiply(c2, PHILOX_M[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + PHILOX_W[0] & MASK, k1 + PHILOX_W[1] & MASK
    return c0, c1, c2, c3


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * m."""
    low, high = a * (m & 0xFFFF), a * (m >> 16)          # at most 48 bits each
    middle = high + (low >> 16)                          # at most 49 bits
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF


def gumbel_noise_ref(*, seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise of the tokens at some positions.

    Shapes: returns fp32 [T, V].
    Numerics: uniforms are (word + 0.5) / 2**32 in fp64, strictly inside (0, 1); noise lies in -3.1..22.9.
    Errors: ValueError for a seed outside 0..2**64 - 1 or a negative position.
    """
    if not 0 <= seed < 2**64 or any(not 0 <= p < 2**32 for p in positions):
        raise ValueError(f"gumbel_noise: the seed must lie in 0..2**64 - 1 and positions in 0..2**32 - 1; got {seed} and {list(positions)}.")
    groups = (vocab_size + 3) // 4
    group = torch.arange(groups, device=device).expand(len(positions), groups)
    position = torch.tensor(list(positions), dtype=torch.int64, device=device).unsqueeze(1).expand(len(positions), groups)
    zero = torch.zeros_like(group)
    words = torch.stack(philox_4x32_ref((group, position, zero, zero), seed=seed), dim=-1).flatten(1)[:, :vocab_size]
    uniform = (words.double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log().float()
