"""What a number format must say: which weights it can hold, what they become, and their bytes and description on disk.

A weight is canonical here: [..., out, in], blocks along the input. Every format reads the weight rounded to bf16 (SOURCE_DTYPE) and
gives bf16 values; `from_disk(to_disk(w))` equals `fake_quant(w)` bit for bit, for a weight and for any slice of its leading dims or
whole row groups.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import ScaleMode


class NumberFormat(ABC):
    """One format; stateless."""

    name: str                     # in recipes and records
    title: str                    # in tables
    suffixes: tuple[str, ...]     # of its tensors on disk, each replacing `.weight`

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
    def to_disk(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> dict[str, Tensor]:
        """The tensors that stand for the weight `name` (ending in .weight), [out, in]."""

    @abstractmethod
    def from_disk(self, tensors: dict[str, Tensor]) -> Tensor:
        """The weight, bf16 [out, in], from its tensors by suffix."""

    @abstractmethod
    def scheme(self) -> dict[str, Any]:
        """`weights` and `format` of a config group of compressed-tensors."""

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        return 8 * self.num_bytes(shape) / torch.Size(shape).numel()
