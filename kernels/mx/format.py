"""The constants of MXFP4 (OCP MX v1.0): 32 E2M1 elements share one E8M0 scale."""

from typing import Literal, get_args

ScaleMode = Literal["even", "floor", "rceil", "mse"]
SCALE_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)
MX_BLOCK_SIZE = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# 6 * 2**(252 - 127) is the largest value bf16 and fp32 hold; 4 * 2**126 and above overflow both.
MAX_EXACT_SCALE = 252
