"""bf16: what a weight that is not quantized has in the same run; the control, and experts kept at higher precision."""

from typing import Any

import torch
from torch import Tensor

from ...kernels.mx import ScaleMode
from ..tensor import SOURCE_DTYPE
from .base import NumberFormat, Packed
from .checks import require_finite_weight


class BF16(NumberFormat):
    name = "bf16"
    title = "bf16"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * torch.Size(shape).numel()

    def problem(self, shape: tuple[int, ...]) -> str | None:
        return None

    def fake_quant(self, weight: Tensor, *, name: str, scale_mode: ScaleMode, dim: int, dtype: torch.dtype, faults: Tensor | None) -> Tensor:
        require_finite_weight(weight, name=name, faults=faults)
        return weight.to(SOURCE_DTYPE).to(dtype)

    def encode(self, weight: Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        require_finite_weight(weight, name=name, faults=None)
        return Packed(format=self.name, elements=weight.to(SOURCE_DTYPE).contiguous(), scales=torch.empty(0, dtype=torch.uint8))

    def decode(self, packed: Packed) -> Tensor:
        return packed.elements

    def scheme(self) -> dict[str, Any]:
        raise NotImplementedError("bf16 weights are no group of a quantization config: they are listed in its `ignore`.")
