"""MXFP4Tensor: what quantizer, checkpoints and engine exchange."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.mx import (
    MAX_EXACT_SCALE,
    MX_BLOCK_SIZE,
    SCALE_MODES,
    ScaleMode,
    dequantize_mxfp4_ref,
    fake_quant_mxfp4_ref,
    pack_codes_ref,
    quantize_mxfp4_ref,
)

# Whatever the master weights are kept in, the quantizer reads them rounded to bf16: a bf16 model, a bf16 mixed-precision
# shard and an fp32 master then give the same bytes. The rule is stored in every checkpoint.
SOURCE_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class MXFP4Tensor:
    """A weight in MXFP4, blocks along the input (last) dimension.

    Shapes: blocks uint8 [..., Q, 16] (low nibble holds the even element), scales uint8 [..., Q] (2**(s - 127)).
    scale_mode: the rule its scales were chosen by; None where a checkpoint does not say.
    """

    blocks: Tensor
    scales: Tensor
    scale_mode: ScaleMode | None

    def __post_init__(self) -> None:
        if self.blocks.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            raise TypeError(f"MXFP4Tensor: blocks and scales must be uint8; got {self.blocks.dtype} and {self.scales.dtype}.")
        if self.blocks.dim() < 2 or self.blocks.shape[-1] != MX_BLOCK_SIZE // 2 or self.blocks.shape[:-1] != self.scales.shape:
            raise ValueError(
                f"MXFP4Tensor: blocks must be [..., Q, 16] with scales [..., Q]; "
                f"got {tuple(self.blocks.shape)} and {tuple(self.scales.shape)}.")
        if self.scale_mode is not None and self.scale_mode not in SCALE_MODES:
            raise ValueError(f"MXFP4Tensor: scale_mode must be one of {', '.join(SCALE_MODES)}; got {self.scale_mode!r}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [..., 32 * Q]."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * MX_BLOCK_SIZE)

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() + self.scales.numel()

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in bf16 and fp32."""
        return dequantize_mxfp4_ref(self.blocks, self.scales, dtype=dtype)


def quantize_weight(weight: Tensor, *, name: str, scale_mode: ScaleMode) -> MXFP4Tensor:
    """Pack a weight. The bytes read back to exactly what `fake_quant_weight` gave in training.

    Shapes: weight [..., D], D a multiple of 32, any float dtype (read as bf16).
    Errors: ValueError naming `name` and the index for NaN or infinity, and for a D that is no multiple of 32.
    """
    with _naming(name):
        codes, scales = quantize_mxfp4_ref(_as_source(weight), scale_mode=scale_mode)
        if scales.numel() and int(scales.max()) > MAX_EXACT_SCALE:
            raise ValueError(f"a block of magnitude {float(weight.abs().max()):.3g} needs scale byte {int(scales.max())}, which bf16 and fp32 readers cannot "
                             f"hold (largest {MAX_EXACT_SCALE}). The weight has diverged: repair it before quantizing.")
    return MXFP4Tensor(blocks=pack_codes_ref(codes), scales=scales, scale_mode=scale_mode)


def fake_quant_weight(weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Tensor:
    """The values the packed weight will have, bf16. Shapes and errors as `quantize_weight`."""
    with _naming(name):
        return fake_quant_mxfp4_ref(_as_source(weight), scale_mode=scale_mode)


def _as_source(weight: Tensor) -> Tensor:
    if not weight.is_floating_point():
        raise TypeError(f"quantize_weight: weights must be a floating-point tensor; got {weight.dtype}.")
    return weight.to(SOURCE_DTYPE)


class _naming:
    """Put the tensor's name in front of an error of the quantizer, which knows only the values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self.name}: {error}") from error
