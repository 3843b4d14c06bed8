"""FP8 (E4M3) with one scale per 128 x 128 tile, as DeepSeek-V3 and MiMo-V2 keep their attention.

The scale is amax / 448 rounded to bf16, so that a reader which keeps scales in bf16 and one that keeps them in fp32 compute the
same product; a weight is element times scale, rounded once to bf16.
Source: DeepSeek-V3 technical report (arXiv 2412.19437) section 3.3; compressed-tensors 0.20.1, FP8_BLOCK.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.mx import ScaleMode
from ..tensor import SOURCE_DTYPE
from .base import NumberFormat, Packed
from .checks import E4M3_LIMIT, require_finite_weight

TILE = 128
E4M3_MAX = 448.0


class FP8Block(NumberFormat):
    name = "fp8_block"
    title = "FP8 128x128"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        *lead, rows, columns = shape
        return torch.Size(lead).numel() * (rows * columns + 2 * -(-rows // TILE) * -(-columns // TILE))

    def problem(self, shape: tuple[int, ...]) -> str | None:
        return None

    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        require_finite_weight(weight, name=name, faults=faults, limit=E4M3_LIMIT)   # tiles are square: the orientation does not matter
        return _values(*_quantize(weight)).to(dtype)

    def encode(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        require_finite_weight(weight, name=name, faults=None, limit=E4M3_LIMIT)
        elements, scales = _quantize(weight)
        return Packed(format=self.name, elements=elements.contiguous(), scales=scales.contiguous())

    def decode(self, packed: Packed) -> Tensor:
        return _values(packed.elements, packed.scales)

    def scheme(self) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [TILE, TILE], "dynamic": False,
                   "observer": "minmax"}
        return {"weights": weights, "format": "float-quantized"}


def _per_weight(scales: Tensor, *, rows: int, columns: int) -> Tensor:
    return scales.float().repeat_interleave(TILE, -2)[..., :rows, :].repeat_interleave(TILE, -1)[..., :columns]


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 elements [..., out, in] and bf16 scales, one a tile."""
    w = weight.to(SOURCE_DTYPE).float()
    rows, columns = w.shape[-2:]
    padded = F.pad(w, (0, -columns % TILE, 0, -rows % TILE))
    tiles = padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))        # [..., tile rows, 128, tile columns, 128]
    scales = (tiles.abs().amax((-3, -1)) / E4M3_MAX).to(SOURCE_DTYPE)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)        # a tile of zeros, or too small for bf16
    elements = (w / _per_weight(scales, rows=rows, columns=columns)).clamp(-E4M3_MAX, E4M3_MAX)
    return elements.to(torch.float8_e4m3fn), scales


def _values(elements: Tensor, scales: Tensor) -> Tensor:
    rows, columns = elements.shape[-2:]
    return (elements.float() * _per_weight(scales, rows=rows, columns=columns)).add(0.0).to(SOURCE_DTYPE)
