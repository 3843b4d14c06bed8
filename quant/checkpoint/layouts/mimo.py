"""MiMo-V2.5-Pro's: an FP8 checkpoint whose experts are stored in MXFP4 (`store_dtype`), one weight an expert and projection.

    X.weight             uint8 [out, in / 2]     experts: two codes a byte, low nibble the even input
    X.weight_scale       uint8 [out, in / 32]    E8M0 bytes
    Y.weight             float8_e4m3fn           FP8 in 128 x 128 tiles, Y.weight_scale_inv fp32 [ceil(out / 128), ceil(in / 128)], factors

config.json: `quant_method: fp8` with `store_dtype: mxfp4`. Engines take every linear layer for FP8 that `ignored_layers` does not name, by exact
module name, and every routed experts layer for MXFP4.
Source: the cards of MiMo-V2.5-Pro-FP4 and V2.6; gptqmodel 7.7.0 utils/mimo.py; vLLM 0.33.0 Fp8Config (exact match of ignored layers).
"""

from typing import Any

import torch
from torch import Tensor

from ...archs import MoEArch
from ...formats import Packed
from ...formats.fp8_block import TILE
from ..reader import CheckpointReader
from .base import Content, Layout, PackedModule, check_scales, check_wiped, expert_modules, fused_by_engines, linear_module, natural, require_shapes

SCALE, TILE_SCALE = "weight_scale", "weight_scale_inv"


class MiMo(Layout):
    name = "mimo"

    def names(self, stem: str, fmt: str) -> tuple[str, str]:
        return f"{stem}.weight", f"{stem}.{SCALE if fmt == 'mxfp4' else TILE_SCALE}"

    def specs(self, fmt: str, shape: tuple[int, ...], *, scales: torch.dtype) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        rows, columns = shape
        if fmt == "mxfp4":
            return ("U8", (rows, columns // 2)), ("U8", (rows, columns // 32))
        return ("F8_E4M3", shape), ("F32", (-(-rows // TILE), -(-columns // TILE)))

    def to_disk(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return packed.elements, packed.scales if packed.format == "mxfp4" else packed.scales.float()

    def from_disk(self, fmt: str, elements: Tensor, scales: Tensor, *, name: str) -> Packed:
        rows, columns = elements.shape
        expected = (rows, columns // 16) if fmt == "mxfp4" else (-(-rows // TILE), -(-columns // TILE))
        require_shapes(tuple(elements.shape), tuple(scales.shape), expected_scales=expected, name=name)
        check_scales(fmt, scales, name=name)
        if fmt == "mxfp4":
            check_wiped(elements, scales, name=name)
        return Packed(format=fmt, elements=elements, scales=scales if fmt == "mxfp4" else narrowed(scales))

    def find(self, reader: CheckpointReader, *, arch: MoEArch) -> list[PackedModule]:
        found = []
        for name in reader.names:
            stem, _, suffix = name.rpartition(".")
            if suffix == "weight" and reader.info(name)[0] in ("U8", "F8_E4M3"):
                fmt = "mxfp4" if reader.info(name)[0] == "U8" else "fp8_block"
                if (scale := self.names(stem, fmt)[1]) not in reader:
                    raise ValueError(f"{reader.directory}: {name} has no {scale} beside it. The checkpoint is incomplete: copy or export it again.")
                found.append(linear_module(stem, arch=arch, fmt=fmt))
            elif suffix in (SCALE, TILE_SCALE) and f"{stem}.weight" not in reader:
                raise ValueError(f"{reader.directory}: {name} has no weight beside it. The checkpoint is incomplete: copy or export it again.")
        return found

    def matches(self, config: dict[str, Any]) -> bool:
        quantization = config.get("quantization_config") or {}
        return quantization.get("quant_method") == "fp8" and quantization.get("store_dtype") == "mxfp4"

    def problem(self, content: Content) -> str | None:
        if content.arch.stored == "fused":
            return f"it keeps experts one by one, and no reader of it takes a {content.arch.name} model's so"
        for p in content.packed:
            wanted = "fp8_block" if p.place is None else "mxfp4"
            if p.format != wanted:
                return f"it holds MXFP4 experts, FP8 tiles for other linear layers, and bf16; {p.stem} is {p.format}"
        packed_modules = {p.place.fused.rsplit(".", 1)[0] for p in content.packed_experts if p.place is not None}
        for fused in content.kept_experts:
            if fused.rsplit(".", 1)[0] in packed_modules:
                return f"its readers take the experts of a layer as a whole; {fused} alone is not packed"
        return None

    def quantization_config(self, content: Content) -> dict[str, Any]:
        ignored = {*content.linears, "lm_head"} | {m for fused, num in content.kept_experts.items()
                                                   for m in expert_modules(content.arch, fused, num_experts=num)}
        for fused in content.kept_experts:   # engines ask for a layer's experts by the module itself
            module = fused.rsplit(".", 1)[0]
            ignored |= {module, content.arch.disk_module(module)}
        ignored |= fused_by_engines(content.linears)
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE], "store_dtype": "mxfp4",
                "mxfp4_block_size": 32, "ignored_layers": sorted(ignored, key=natural)}


def narrowed(scales: Tensor) -> Tensor:
    """FP8 tile scales in bf16 where that is exact, as ours are; else in fp32."""
    half = scales.to(torch.bfloat16)
    return half if torch.equal(half.float(), scales.float()) else scales.float()
