"""Named rounding cases of MXFP4: one table, by hand, for every implementation.

A case is one block of 32 weights, a scale rule, and the scale byte and codes that must come out. `values(...)` and
`codes(...)` name the first elements; the rest are zeros. Where all rules agree, `everywhere` makes one case of each.

Codes are sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Scale byte s means 2**(s - 127).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScaleMode = Literal["even", "floor", "rceil", "mse"]
MODES: tuple[ScaleMode, ...] = ("even", "floor", "rceil", "mse")
MX_BLOCK_SIZE = 32
# what each of the 16 codes stands for; code 8 is minus zero, which a quantizer of ours never writes
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True)
class RoundingCase:
    """One block, one rule, one answer."""

    name: str
    block: tuple[float, ...]
    scale_mode: ScaleMode
    scale: int
    codes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}-{self.scale_mode}"

    def tensor(self) -> Tensor:
        """The block, fp32 [32]; every value is exact in fp32."""
        tensor = torch.tensor(self.block, dtype=torch.float64)
        assert torch.equal(tensor.float().double(), tensor), f"{self.name}: a value is not fp32"
        return tensor.float()


def values(*first: float) -> tuple[float, ...]:
    return (*first, *([0.0] * (MX_BLOCK_SIZE - len(first))))


def codes(*first: int) -> tuple[int, ...]:
    return (*first, *([0] * (MX_BLOCK_SIZE - len(first))))


def above(x: float) -> float:
    """The fp32 value next to `x`, away from zero."""
    return float(torch.nextafter(torch.tensor(x), torch.tensor(float("inf") if x > 0 else float("-inf"))))


def below(x: float) -> float:
    """The fp32 value next to `x`, towards zero."""
    return float(torch.nextafter(torch.tensor(x), torch.tensor(0.0)))


def everywhere(name: str, block: tuple[float, ...], *, scale: int, codes: tuple[int, ...]) -> list[RoundingCase]:
    return [RoundingCase(name=name, block=block, scale_mode=m, scale=scale, codes=codes) for m in MODES]


def by_rule(name: str, block: tuple[float, ...], **expected: tuple[int, tuple[int, ...]]) -> list[RoundingCase]:
    """`expected` is rule -> (scale byte, codes), all rules."""
    assert set(expected) == set(MODES), name
    return [RoundingCase(name=name, block=block, scale_mode=m, scale=expected[m][0], codes=expected[m][1]) for m in MODES]


# tie -> (code of the tie, code just above, code just below); the tie goes to the code with an even mantissa bit
TIES = {0.25: (0, 1, 0), 0.75: (2, 2, 1), 1.25: (2, 3, 2), 1.75: (4, 4, 3), 2.5: (4, 5, 4), 3.5: (6, 6, 5), 5.0: (6, 7, 6)}

# amax -> rule -> (scale byte, code of amax, code of -1.0)
AMAX = {
    6.0: {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (127, 7, 10), "mse": (127, 7, 10)},
    above(6.0): {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (128, 5, 9), "mse": (127, 7, 10)},   # rceil never clips
    6.25: {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (128, 5, 9), "mse": (127, 7, 10)},   # 3.125 -> 3
    6.5: {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (128, 5, 9), "mse": (127, 7, 10)},
    6.75: {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (128, 5, 9), "mse": (127, 7, 10)},
    below(7.0): {"floor": (127, 7, 10), "even": (127, 7, 10), "rceil": (128, 5, 9), "mse": (127, 7, 10)},   # the last amax that even clips
    7.0: {"floor": (127, 7, 10), "even": (128, 6, 9), "rceil": (128, 6, 9), "mse": (127, 7, 10)},   # 3.5 is a tie -> 4; an error of 1 either way
    7.96875: {"floor": (127, 7, 10), "even": (128, 6, 9), "rceil": (128, 6, 9), "mse": (128, 6, 9)},
    below(8.0): {"floor": (127, 7, 10), "even": (128, 6, 9), "rceil": (128, 6, 9), "mse": (128, 6, 9)},   # log2() in fp32 says 3
    8.0: {"floor": (128, 6, 9), "even": (128, 6, 9), "rceil": (128, 6, 9), "mse": (128, 6, 9)},
    above(8.0): {"floor": (128, 6, 9), "even": (128, 6, 9), "rceil": (128, 6, 9), "mse": (128, 6, 9)},
}


def _table() -> Iterator[list[RoundingCase]]:
    for tie, (at, up, down) in TIES.items():
        for sign, bit, word in ((1.0, 0, "plus"), (-1.0, 8, "minus")):
            def signed(code: int, bit: int = bit) -> int:
                return code | bit if code else 0   # minus zero is code 0

            yield everywhere(f"tie_{word}_{tie}", values(6.0, sign * tie), scale=127, codes=codes(7, signed(at)))
            yield everywhere(f"above_tie_{word}_{tie}", values(6.0, above(sign * tie)), scale=127, codes=codes(7, signed(up)))
            yield everywhere(f"below_tie_{word}_{tie}", values(6.0, below(sign * tie)), scale=127, codes=codes(7, signed(down)))
    yield everywhere("grid", CODE_VALUES + CODE_VALUES, scale=127, codes=(*range(8), 0, *range(9, 16)) * 2)
    yield everywhere("amax_last", (*([1.0] * 31), -6.0), scale=127, codes=(*([2] * 31), 15))

    yield everywhere("zero_block", values(), scale=0, codes=codes())
    yield everywhere("minus_zero_block", (-0.0,) * 32, scale=0, codes=codes())
    yield everywhere("minus_zero_element", values(6.0, -0.0), scale=127, codes=codes(7, 0))
    yield everywhere("small_negative", values(-6.0, -0.125, -0.25, -(2.0**-140), above(-0.25)), scale=127, codes=codes(15, 0, 0, 0, 9))

    for amax, rules in AMAX.items():
        for sign, bit in ((1.0, 0), (-1.0, 8)):
            expected = {m: (scale, codes(top | bit, one)) for m, (scale, top, one) in rules.items()}
            yield by_rule(f"amax_{sign * amax!r}", values(sign * amax, -1.0), **expected)
    yield by_rule("ulp_below_2p13", values(below(2.0**13), 2.0**11), floor=(137, codes(7, 4)), even=(138, codes(6, 2)), rceil=(138, codes(6, 2)),
                  mse=(138, codes(6, 2)))
    yield by_rule("ulp_above_6x2p10", values(above(6 * 2.0**10), 2.0**11), floor=(137, codes(7, 4)), even=(137, codes(7, 4)), rceil=(138, codes(5, 2)),
                  mse=(137, codes(7, 4)))
    yield by_rule("ulp_below_1", values(below(1.0), 0.25), floor=(124, codes(7, 4)), even=(125, codes(6, 2)), rceil=(125, codes(6, 2)),
                  mse=(125, codes(6, 2)))

    yield by_rule("saturation", values(7.5, -7.5, 6.5, 5.0, -5.5), floor=(127, codes(7, 15, 7, 6, 15)),   # 5 is a tie
                  even=(128, codes(6, 14, 5, 4, 13)), rceil=(128, codes(6, 14, 5, 4, 13)),   # 3.75, 3.25, 2.5 (tie), 2.75
                  mse=(128, codes(6, 14, 5, 4, 13)))   # 2 against 6
    yield by_rule("saturation_even", values(6.875, -6.5), floor=(127, codes(7, 15)), even=(127, codes(7, 15)), rceil=(128, codes(5, 13)),
                  mse=(127, codes(7, 15)))   # the next scale would give 6 and -6 as well

    # 4 errs by 1 under half the scale, where 3 is the largest value; each 0.75 by 1/16 under the whole one: 16 of them tie, 17 win.
    whole, half = (127, codes(6, *([2] * 17))), (126, codes(7, *([3] * 17)))
    yield by_rule("half_scale_wins", values(4.0, *([0.75] * 17)), floor=whole, even=whole, rceil=whole, mse=half)
    yield everywhere("half_scale_ties", values(4.0, *([0.75] * 16)), scale=127, codes=codes(6, *([2] * 16)))

    # Below 2**-125 the scale stays at its smallest, 2**-127 (itself an fp32 subnormal), and the grid runs out from the top.
    tiny = 2.0**-127
    yield everywhere("smallest_scale_6", values(6 * tiny, -3 * tiny), scale=0, codes=codes(7, 13))
    yield by_rule("smallest_scale_7", values(7 * tiny, tiny), floor=(0, codes(7, 2)), even=(1, codes(6, 1)), rceil=(1, codes(6, 1)),
                  mse=(0, codes(7, 2)))
    yield everywhere("min_normal", values(2.0**-126, -(2.0**-126)), scale=0, codes=codes(4, 12))
    yield everywhere("subnormal_1.5", values(1.5 * tiny, -1.5 * tiny), scale=0, codes=codes(3, 11))
    yield everywhere("subnormal_1", values(-tiny), scale=0, codes=codes(10))
    yield everywhere("subnormal_0.75_tie", values(0.75 * tiny), scale=0, codes=codes(2))
    yield everywhere("subnormal_0.5", values(0.5 * tiny), scale=0, codes=codes(1))
    yield everywhere("subnormal_0.25_tie", values(0.25 * tiny, -0.25 * tiny), scale=0, codes=codes())
    yield everywhere("subnormal_above_0.25", values(above(0.25 * tiny), -above(0.25 * tiny)), scale=0, codes=codes(1, 9))
    yield everywhere("smallest_subnormal", values(2.0**-149, -(2.0**-149)), scale=0, codes=codes())

    # The largest weights that have a scale that reads back: 252.
    yield everywhere("largest_scale_6", values(6 * 2.0**125, -4 * 2.0**125, 2.0**125), scale=252, codes=codes(7, 14, 2))
    yield by_rule("largest_even", values(below(7 * 2.0**125), 2.0**125), floor=(252, codes(7, 2)), even=(252, codes(7, 2)), rceil=(253, codes(5, 1)),
                  mse=(252, codes(7, 2)))
    yield by_rule("fp32_max", values(torch.finfo(torch.float32).max, 2.0**125), floor=(252, codes(7, 2)), even=(253, codes(6, 1)), rceil=(253, codes(6, 1)),
                  mse=(253, codes(6, 1)))


CASES: tuple[RoundingCase, ...] = tuple(case for group in _table() for case in group)
