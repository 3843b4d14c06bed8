"""MX (OCP Microscaling) operations on raw tensors: quantize, pack, dequantize, fake-quantize.

`x` runs a Triton kernel on CUDA and 16-bit integer steps on the CPU (cpu.py); `x_ref` is the plain-torch twin of both, bit-equal.
"""

from .dequantize import dequantize_mxfp4, dequantize_mxfp4_ref
from .fake_quant import fake_quant_mxfp4, fake_quant_mxfp4_ref
from .format import E2M1_MAGNITUDES, MAX_EXACT_SCALE, MX_BLOCK_SIZE, SCALE_MODES, ScaleMode
from .pack import pack_codes_ref, unpack_codes_ref
from .quantize import quantize_mxfp4, quantize_mxfp4_ref

__all__ = [
    "E2M1_MAGNITUDES",
    "MAX_EXACT_SCALE",
    "MX_BLOCK_SIZE",
    "SCALE_MODES",
    "ScaleMode",
    "dequantize_mxfp4",
    "dequantize_mxfp4_ref",
    "fake_quant_mxfp4",
    "fake_quant_mxfp4_ref",
    "pack_codes_ref",
    "quantize_mxfp4",
    "quantize_mxfp4_ref",
    "unpack_codes_ref",
]
