"""MXFP8: E4M3 elements under one E8M0 scale per 32 weights along the input.

The scale is the least power of two that keeps the largest magnitude within 448 (ceil(log2(amax / 448)), the rule of the engines that
quantize activations), so nothing saturates; elements are rounded to nearest, ties to even.
Source: OCP MX v1.0 sections 5.3.1 (E4M3) and 5.4.1 (E8M0); compressed-tensors 0.20.1, compressors/mxfp8.
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import MX_BLOCK_SIZE, ScaleMode
from ..tensor import SOURCE_DTYPE
from .base import NumberFormat, Packed
from .checks import E4M3_LIMIT, require_finite_weight

_BIAS = 127
_E4M3_MAX_EXPONENT = 8            # 448 = 1.75 * 2**8
_LARGEST_MANTISSA = 1.75 / 2      # as frexp gives it


class MXFP8(NumberFormat):
    name = "mxfp8"
    title = "MXFP8"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        elements = torch.Size(shape).numel()
        return elements + elements // MX_BLOCK_SIZE

    def problem(self, shape: tuple[int, ...]) -> str | None:
        if shape[-1] % MX_BLOCK_SIZE:
            return f"the input dimension must be a multiple of {MX_BLOCK_SIZE}, one MX block; got {shape[-1]}"
        return None

    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        require_finite_weight(weight, name=name, faults=faults, limit=E4M3_LIMIT)
        return _values(*_quantize(weight.movedim(dim, -1))).movedim(-1, dim).to(dtype)

    def encode(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        require_finite_weight(weight, name=name, faults=None, limit=E4M3_LIMIT)
        elements, exponents = _quantize(weight)
        return Packed(format=self.name, elements=elements.flatten(-2).contiguous(), scales=(exponents + _BIAS).to(torch.uint8))

    def decode(self, packed: Packed) -> Tensor:
        scales = packed.scales
        if scales.numel() and int(scales.max()) > 2 * _BIAS:
            raise ValueError("mxfp8: scale byte 255 is NaN. The checkpoint is damaged or not MXFP8.")
        return _values(packed.elements.unflatten(-1, (scales.shape[-1], MX_BLOCK_SIZE)), scales.int() - _BIAS)

    def scheme(self) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": MX_BLOCK_SIZE, "strategy": "group", "dynamic": False,
                   "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8", "observer": "minmax"}
        return {"weights": weights, "format": "mxfp8-quantized"}


def fake_quant_activation(x: Tensor) -> Tensor:
    """Activations [..., D] as a server that computes with MXFP8 activations sees them; same dtype. D a multiple of 32."""
    return _values(*_quantize(x)).to(x.dtype)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 elements [..., Q, 32] and unbiased exponents int32 [..., Q]."""
    blocks = weight.to(SOURCE_DTYPE).float().unflatten(-1, (weight.shape[-1] // MX_BLOCK_SIZE, MX_BLOCK_SIZE))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))     # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponents = exponent - 1 - _E4M3_MAX_EXPONENT + (mantissa > _LARGEST_MANTISSA).to(torch.int32)
    exponents = torch.where(mantissa == 0, -_BIAS, exponents.clamp(-_BIAS, _BIAS)).to(torch.int32)
    return torch.ldexp(blocks, -exponents[..., None]).to(torch.float8_e4m3fn), exponents


def _values(elements: Tensor, exponents: Tensor) -> Tensor:
    # + 0.0: negative zero is normalised, as in MXFP4
    return torch.ldexp(elements.float(), exponents[..., None]).flatten(-2).add(0.0).to(SOURCE_DTYPE)
