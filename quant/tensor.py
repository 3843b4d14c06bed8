"""MXFP4Tensor: what quantizer, checkpoints and engine exchange."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.mx import (
    MX_BLOCK_SIZE,
    SCALE_MODES,
    ScaleMode,
    dequantize_mxfp4,
    fake_quant_mxfp4,
    quantize_mxfp4,
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
        return dequantize_mxfp4(self.blocks, self.scales, dtype=dtype)


def quantize_weight(weight: Tensor, *, name: str, scale_mode: ScaleMode) -> MXFP4Tensor:
    """Pack a weight. The bytes read back to exactly what `fake_quant_weight` gave in training.

    Shapes: weight [..., D], D a multiple of 32, any float dtype (read as bf16).
    Errors: ValueError naming `name` and the index for NaN or infinity, and for a D that is no multiple of 32.
    """
    with _naming(name):
        blocks, scales = quantize_mxfp4(_as_source(weight).contiguous(), scale_mode=scale_mode)
    return MXFP4Tensor(blocks=blocks, scales=scales, scale_mode=scale_mode)


def fake_quant_weight(
    weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int = -1, dtype: torch.dtype = SOURCE_DTYPE, faults: Tensor | None = None,
) -> Tensor:
    """The values the packed weight will have, in `dtype` (bf16 or fp32; exact in both). Shapes and errors as `quantize_weight`.

    dim: -1, or -2 for a weight kept as [..., in, out]. faults: int32 [1] on the weight's device: on a GPU it is set to 1 instead of raising,
        so that a step of training needs one read-back and not one a weight.
    """
    with _naming(name):
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = _as_source(weight)
        return fake_quant_mxfp4(weight, scale_mode=scale_mode, dim=dim, out_dtype=dtype, faults=faults)


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
