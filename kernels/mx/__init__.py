"""MX (OCP Microscaling) operations on raw tensors: quantize, pack, dequantize, fake-quantize."""

from .dequantize import MAX_EXACT_SCALE, dequantize_mxfp4_ref
from .fake_quant import fake_quant_mxfp4_ref
from .pack import pack_codes_ref, unpack_codes_ref
from .quantize import E2M1_MAGNITUDES, MX_BLOCK_SIZE, SCALE_MODES, ScaleMode, quantize_mxfp4_ref

__all__ = [
    "E2M1_MAGNITUDES",
    "MAX_EXACT_SCALE",
    "MX_BLOCK_SIZE",
    "SCALE_MODES",
    "ScaleMode",
    "dequantize_mxfp4_ref",
    "fake_quant_mxfp4_ref",
    "pack_codes_ref",
    "quantize_mxfp4_ref",
    "unpack_codes_ref",
]
