"""Number formats: MXFP4 for experts, MXFP8 and FP8 as options for attention and router, bf16 for what stays."""

from .base import NumberFormat, Packed
from .bf16 import BF16
from .fp8_block import FP8Block
from .mxfp4 import MXFP4, as_mxfp4
from .mxfp8 import MXFP8, fake_quant_activation

FORMATS: tuple[NumberFormat, ...] = (MXFP4(), MXFP8(), FP8Block(), BF16())


def find_format(name: str) -> NumberFormat:
    """Errors: ValueError naming the formats there are."""
    for fmt in FORMATS:
        if fmt.name == name:
            return fmt
    raise ValueError(f"number format: must be one of {', '.join(f.name for f in FORMATS)}; got {name!r}.")


__all__ = ["FORMATS", "NumberFormat", "Packed", "as_mxfp4", "fake_quant_activation", "find_format"]
