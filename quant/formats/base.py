"""What a number format must say: which weights it can hold, what they become, and their bytes and description on disk.

A weight is canonical here: [..., out, in], blocks along the input. Every format reads the weight rounded to bf16 (SOURCE_DTYPE) and
gives bf16 values; `decode(encode(w))` equals `fake_quant(w)` bit for bit, for a weight and for any slice of its leading dims or
whole row groups. What the two tensors of an encoded weight are called on disk, and how they lie there, is a layout's word
(checkpoint/layouts).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import ScaleMode


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A weight [..., out, in] in a format: the exchange form of all layouts, which only name, shape and cast these two tensors.

        mxfp4       elements uint8 [..., out, in / 2], low nibble the even input    scales uint8 [..., out, in / 32], E8M0
        mxfp8       elements float8_e4m3fn [..., out, in]                           scales uint8 [..., out, in / 32], E8M0
        fp8_block   elements float8_e4m3fn [out, in]      scales bf16 or fp32 [ceil(out / 128), ceil(in / 128)], factors
    """

    format: str
    elements: Tensor
    scales: Tensor


class NumberFormat(ABC):
    """One format; stateless."""

    name: str                     # in recipes and records
    title: str                    # in tables

    @abstractmethod
    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight [..., out, in], scales included."""

    @abstractmethod
    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight [..., out, in] cannot be held; None when it can."""

    @abstractmethod
    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        """The values that the packed weight will have, in `dtype` (bf16 or fp32; exact in both).

        dim: -1, or -2 for a weight kept as [..., in, out]. faults: int32 [1] on the weight's device, set to 1 instead of an error for NaN,
            infinity and what the format cannot hold; without it they raise ValueError naming `name` and the index.
        """

    @abstractmethod
    def encode(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        """The weight [..., out, in] in this format. Errors: ValueError naming `name` and the index for what it cannot hold."""

    @abstractmethod
    def decode(self, packed: Packed) -> Tensor:
        """The weight, bf16 [..., out, in]. Errors: ValueError for scales that stand for no number."""

    @abstractmethod
    def scheme(self) -> dict[str, Any]:
        """`weights` and `format` of a config group of compressed-tensors."""

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        return 8 * self.num_bytes(shape) / torch.Size(shape).numel()
