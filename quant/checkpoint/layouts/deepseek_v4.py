"""DeepSeek-V4's own (`expert_dtype: fp4`), read only.

    X.weight   int8 [out, in / 2]      experts: two codes a byte, low nibble the even input
    X.scale    float8_e8m0fnu [out, in / 32]
    Y.weight   float8_e4m3fn           FP8 in 128 x 128 tiles, Y.scale float8_e8m0fnu [ceil(out / 128), ceil(in / 128)]

Source: the released config (`quant_method: fp8`, `scale_fmt: ue8m0`, `expert_dtype: fp4`), transformers 5.24.0 integrations/finegrained_fp8.py.
"""

from typing import Any

import torch
from torch import Tensor

from ...archs import MoEArch
from ...formats import Packed
from ...formats.fp8_block import TILE
from ..reader import CheckpointReader
from .base import Content, Layout, PackedModule, check_scales, check_wiped, linear_module, require_shapes
from .mimo import narrowed


class DeepSeekV4(Layout):
    name = "deepseek-v4"
    can_write = False

    def names(self, stem: str, fmt: str) -> tuple[str, str]:
        return f"{stem}.weight", f"{stem}.scale"

    def specs(self, fmt: str, shape: tuple[int, ...], *, scales: torch.dtype) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        raise NotImplementedError("deepseek-v4: is read only.")

    def to_disk(self, packed: Packed) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("deepseek-v4: is read only.")

    def from_disk(self, fmt: str, elements: Tensor, scales: Tensor, *, name: str) -> Packed:
        rows, columns = elements.shape
        expected = (rows, columns // 16) if fmt == "mxfp4" else (-(-rows // TILE), -(-columns // TILE))
        require_shapes(tuple(elements.shape), tuple(scales.shape), expected_scales=expected, name=name)
        exponents = scales.view(torch.uint8)
        check_scales(fmt, exponents, name=name)
        if fmt == "fp8_block":
            return Packed(format=fmt, elements=elements, scales=narrowed(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)))
        check_wiped(elements.view(torch.uint8), exponents, name=name)
        return Packed(format=fmt, elements=elements.view(torch.uint8), scales=exponents)

    def find(self, reader: CheckpointReader, *, arch: MoEArch) -> list[PackedModule]:
        found = []
        for name in reader.names:
            stem, _, suffix = name.rpartition(".")
            if suffix == "weight" and reader.info(name)[0] in ("I8", "F8_E4M3"):
                if f"{stem}.scale" not in reader:
                    raise ValueError(f"{reader.directory}: {name} has no {stem}.scale beside it. The checkpoint is incomplete: copy it again.")
                found.append(linear_module(stem, arch=arch, fmt="mxfp4" if reader.info(name)[0] == "I8" else "fp8_block"))
            elif suffix == "scale" and reader.info(name)[0] == "F8_E8M0" and f"{stem}.weight" not in reader:
                raise ValueError(f"{reader.directory}: {name} has no weight beside it. The checkpoint is incomplete: copy it again.")
        return found

    def matches(self, config: dict[str, Any]) -> bool:
        quantization = config.get("quantization_config") or {}
        return quantization.get("quant_method") == "fp8" and "fp4" in (config.get("expert_dtype"), quantization.get("expert_dtype"))

    def problem(self, content: Content) -> str | None:
        return "it is read, not written"

    def quantization_config(self, content: Content) -> dict[str, Any]:
        raise NotImplementedError("deepseek-v4: is read only.")
