"""MXFP4: E2M1 elements under one E8M0 scale per 32 weights along the input (quant/tensor.py, kernels/mx)."""

from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import MX_BLOCK_SIZE, ScaleMode
from ..tensor import SOURCE_DTYPE, MXFP4Tensor, fake_quant_weight, quantize_weight
from .base import NumberFormat, Packed


class MXFP4(NumberFormat):
    name = "mxfp4"
    title = "MXFP4"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        elements = torch.Size(shape).numel()
        return elements // 2 + elements // MX_BLOCK_SIZE

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if shape[-1] % MX_BLOCK_SIZE:
            return f"the input dimension must be a multiple of {MX_BLOCK_SIZE}, one MX block; got {shape[-1]}"
        return None

    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        return fake_quant_weight(weight, name=name, scale_mode=scale_mode, dim=dim, dtype=dtype, faults=faults)

    def encode(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        tensor = quantize_weight(weight, name=name, scale_mode=scale_mode)
        return Packed(format=self.name, elements=tensor.blocks.flatten(-2), scales=tensor.scales)

    def decode(self, packed: Packed) -> Tensor:
        return as_mxfp4(packed, scale_mode=None).dequantize(dtype=SOURCE_DTYPE)

    def scheme(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": MX_BLOCK_SIZE, "strategy": "group", "dynamic": False,
                   "scale_dtype": "torch.uint8", "observer": "minmax"}
        return {"weights": weights, "format": "mxfp4-pack-quantized"}


def as_mxfp4(packed: Packed, *, scale_mode: ScaleMode | None) -> MXFP4Tensor:
    """The same bytes as the engine and the kernels take them."""
    return MXFP4Tensor(blocks=packed.elements.unflatten(-1, (packed.scales.shape[-1], MX_BLOCK_SIZE // 2)), scales=packed.scales, scale_mode=scale_mode)
