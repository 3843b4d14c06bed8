"""Weights that no format can hold."""

import math

import torch
from torch import Tensor

from ..tensor import SOURCE_DTYPE

# From here on an E4M3 element, 4 significant bits, may round up to 2**128, which bf16 and fp32 do not have.
E4M3_LIMIT = 1.9375 * 2.0**127


def require_finite_weight(weight: Tensor, *, name: str, faults: Tensor | None, limit: float = math.inf) -> None:
    """ValueError naming `name` and the first index of what is NaN or infinite in bf16, or not below `limit`; with `faults`, a 1 in it
    instead and no read-back."""
    source = weight.to(SOURCE_DTYPE)   # an fp32 master above 3.39e38 rounds to infinity
    sound = source.abs() < limit
    if faults is not None:
        faults.copy_(torch.where(sound.all(), faults, torch.ones_like(faults)))
        return
    if not bool(sound.all()):
        index = tuple(int(i) for i in (~sound).nonzero()[0])
        rule = "finite" if math.isinf(limit) else f"finite and below {limit:.6g} in magnitude"
        raise ValueError(f"{name}: weights must be {rule}; got {float(source[index])} at index {index} of shape {tuple(weight.shape)}. "
                         "Repair the weight before quantizing.")
