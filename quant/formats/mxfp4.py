"""MXFP4 in the `mxfp4-pack-quantized` layout of compressed-tensors.

    X.weight_packed  uint8 [out, in / 2]    two codes a byte, low nibble the even input
    X.weight_scale   uint8 [out, in / 32]   E8M0 bytes

Loaded by vLLM, SGLang and transformers; no transposition, no global scale.
Source: compressed-tensors 0.20.1, compressors/mxfp4 and the QuantizationConfig it dumps.
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import MX_BLOCK_SIZE, ScaleMode
from ..tensor import SOURCE_DTYPE, MXFP4Tensor, fake_quant_weight, quantize_weight
from .base import NumberFormat

PACKED, SCALE = "weight_packed", "weight_scale"
PACK_FORMAT = "mxfp4-pack-quantized"


class MXFP4(NumberFormat):
    name = "mxfp4"
    title = "MXFP4"
    suffixes = (PACKED, SCALE)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        elements = torch.Size(shape).numel()
        return elements // 2 + elements // MX_BLOCK_SIZE

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if shape[-1] % MX_BLOCK_SIZE:
            return f"the input dimension must be a multiple of {MX_BLOCK_SIZE}, one MX block; got {shape[-1]}"
        return None

    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        return fake_quant_weight(weight, name=name, scale_mode=scale_mode, dim=dim, dtype=dtype, faults=faults)

    def to_disk(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> dict[str, Tensor]:
        return pack(quantize_weight(weight, name=name, scale_mode=scale_mode), name=name)

    def from_disk(self, tensors: dict[str, Tensor]) -> Tensor:
        return unpack(tensors[PACKED], tensors[SCALE], scale_mode=None).dequantize(dtype=SOURCE_DTYPE)

    def scheme(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": MX_BLOCK_SIZE, "strategy": "group", "dynamic": False,
                   "scale_dtype": "torch.uint8", "observer": "minmax"}
        return {"weights": weights, "format": PACK_FORMAT}


def pack(tensor: MXFP4Tensor, *, name: str) -> dict[str, Tensor]:
    """The tensors that stand for the weight `name` (ending in .weight), [out, in]."""
    stem = name.removesuffix(".weight")
    return {f"{stem}.{PACKED}": tensor.blocks.flatten(-2).contiguous(), f"{stem}.{SCALE}": tensor.scales.contiguous()}


def unpack(packed: Tensor, scale: Tensor, *, scale_mode: ScaleMode | None) -> MXFP4Tensor:
    """The inverse of `pack`."""
    return MXFP4Tensor(blocks=packed.unflatten(-1, (scale.shape[-1], MX_BLOCK_SIZE // 2)), scales=scale, scale_mode=scale_mode)
