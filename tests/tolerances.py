"""How close is close enough, with the reason; and assertions whose failure says where, and by how much.

Packing, rounding and checkpoints are exact: they use `assert_equal`. A bound exists only where a sum is taken in a
different order or precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP32_EPS = 2.0**-23


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Limits on got - expected: the largest one relative to the largest expected value, the RMS relative to the RMS."""

    maximum: float
    rms: float
    reason: str


# Over 20 seeds of the test's inputs the largest error seen was 1.4 eps for sums, 9.5 eps (maximum) and 2.9 eps (RMS) for gradients.
DISTILL_SUM_FP32 = Bound(maximum=4 * FP32_EPS, rms=4 * FP32_EPS, reason="fp32 logits and log_softmax against fp64; the roundings of 3737 terms average out")
DISTILL_GRAD_FP32 = Bound(maximum=24 * FP32_EPS, rms=8 * FP32_EPS, reason="differences of fp32 probabilities times 100 terms, against fp64")
# The chunk size changes the order of additions, and the tiling of a product by its row count.
DISTILL_CHUNKS_FP32 = Bound(maximum=24 * FP32_EPS, rms=8 * FP32_EPS, reason="the same fp32 terms added in another order")
DISTILL_BF16_LOGITS = Bound(maximum=4 * FP32_EPS, rms=4 * FP32_EPS, reason="the same bf16 logits; only fp32 softmax and sums differ from fp64")
# Another order of the same fp32 products: one product an expert instead of a grouped one, two layers deep.
EXPERTS_EAGER_FP32 = Bound(maximum=32 * FP32_EPS, rms=8 * FP32_EPS, reason="fp32 products of 64 terms summed in another order, through two layers")
# Our fp32 chunked sum against one torch.cross_entropy over all logits.
CROSS_ENTROPY_FP32 = Bound(maximum=4 * FP32_EPS, rms=4 * FP32_EPS, reason="fp32 mean over a few hundred tokens in another order")


def assert_within(got: Tensor, expected: Tensor, *, bound: Bound, what: str = "values") -> None:
    """`got` differs from `expected` by at most `bound`; the message holds count, first coordinates and both values."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    g, e = got.detach().double(), expected.detach().double()
    limit = bound.maximum * float(e.abs().max())
    wrong = ~((g - e).abs() <= limit)   # NaN counts as wrong
    if bool(wrong.any()):
        raise AssertionError(f"{what}: {_first(wrong, got, expected)}; allowed {limit:.3g} ({bound.reason})")
    rms, rms_limit = float((g - e).square().mean().sqrt()), bound.rms * float(e.square().mean().sqrt())
    if rms > rms_limit:
        worst = (g - e).abs() == (g - e).abs().max()
        raise AssertionError(f"{what}: RMS of the error {rms:.3g} exceeds {rms_limit:.3g} ({bound.reason}); largest: {_first(worst, got, expected)}")


def assert_equal(got: Tensor, expected: Tensor, *, what: str = "values", bits: bool = False) -> None:
    """Shape, dtype and values are the same; with `bits` also the sign of zero. Values may be compared as float64 by the caller."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    wrong = got != expected
    if bits and got.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        wrong = got.detach().contiguous().view(integer) != expected.detach().contiguous().view(integer)
    if bool(wrong.any()):
        raise AssertionError(f"{what}: {_first(wrong, got, expected)}")


def _first(wrong: Tensor, got: Tensor, expected: Tensor) -> str:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {got.numel()} differ, first at {index}: got {got[index].item()!r}, expected {expected[index].item()!r}"
