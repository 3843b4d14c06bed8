"""Random numbers that depend on nothing but (seed, position, token)."""

from .noise import gumbel_noise_ref, philox_4x32_ref

__all__ = ["gumbel_noise_ref", "philox_4x32_ref"]
