"""compressed-tensors: one weight an expert and projection, under the names of an unquantized checkpoint.

    X.weight_packed  uint8 [out, in / 2]     MXFP4 (`mxfp4-pack-quantized`), two codes a byte, low nibble the even input
    X.weight_scale   uint8 [out, in / 32]    E8M0 bytes; no transposition, no global scale
    X.weight         float8_e4m3fn           MXFP8 (`mxfp8-quantized`), X.weight_scale uint8 [out, in / 32]
    X.weight         float8_e4m3fn           FP8 (`float-quantized`), X.weight_scale bf16 [ceil(out / 128), ceil(in / 128)]

config.json: one group a format, targets by regular expression on module names, every other linear layer in `ignore`. vLLM looks an experts
layer up as `<experts>.0.gate_proj` whatever the names on disk, and transformers by its names in memory, so targets and kept experts are
given in each spelling.
Source: compressed-tensors 0.20.1 (QuantizationConfig, compressors), transformers 5.24.0 (quantizers), vLLM 0.33.0 (scheme lookup of a fused
experts layer).
"""

import re
from typing import Any

import torch
from torch import Tensor

from ...archs import MoEArch
from ...formats import Packed, find_format
from ...formats.fp8_block import TILE
from ..reader import CheckpointReader
from .base import Content, Layout, PackedModule, check_scales, check_wiped, expert_modules, fused_by_engines, linear_module, natural, neutral, require_shapes

PACKED, SCALE = "weight_packed", "weight_scale"


class CompressedTensors(Layout):
    name = "compressed-tensors"

    def names(self, stem: str, fmt: str) -> tuple[str, str]:
        return f"{stem}.{PACKED if fmt == 'mxfp4' else 'weight'}", f"{stem}.{SCALE}"

    def specs(self, fmt: str, shape: tuple[int, ...], *, scales: torch.dtype) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        rows, columns = shape
        if fmt == "mxfp4":
            return ("U8", (rows, columns // 2)), ("U8", (rows, columns // 32))
        if fmt == "mxfp8":
            return ("F8_E4M3", shape), ("U8", (rows, columns // 32))
        return ("F8_E4M3", shape), ("BF16" if scales == torch.bfloat16 else "F32", (-(-rows // TILE), -(-columns // TILE)))

    def to_disk(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return packed.elements, packed.scales

    def from_disk(self, fmt: str, elements: Tensor, scales: Tensor, *, name: str) -> Packed:
        rows, columns = elements.shape
        expected = {"mxfp4": (rows, columns // 16), "mxfp8": (rows, columns // 32), "fp8_block": (-(-rows // TILE), -(-columns // TILE))}[fmt]
        require_shapes(tuple(elements.shape), tuple(scales.shape), expected_scales=expected, name=name)
        check_scales(fmt, scales, name=name)
        if fmt == "mxfp4":
            check_wiped(elements, scales, name=name)
        return Packed(format=fmt, elements=elements, scales=scales)

    def find(self, reader: CheckpointReader, *, arch: MoEArch) -> list[PackedModule]:
        found = []
        for name in reader.names:
            stem, _, suffix = name.rpartition(".")
            if suffix == PACKED:
                if f"{stem}.{SCALE}" not in reader:
                    raise ValueError(f"{reader.directory}: {name} has no {stem}.{SCALE} beside it. The checkpoint is incomplete: copy or export it again.")
                found.append(linear_module(stem, arch=arch, fmt="mxfp4"))
            elif suffix == SCALE and f"{stem}.{PACKED}" not in reader:
                if f"{stem}.weight" not in reader:
                    raise ValueError(f"{reader.directory}: {name} has no weight beside it. The checkpoint is incomplete: copy or export it again.")
                found.append(linear_module(stem, arch=arch, fmt="mxfp8" if reader.info(name)[0] == "U8" else "fp8_block"))
            elif suffix == "weight" and reader.info(name)[0] == "F8_E4M3" and f"{stem}.{SCALE}" not in reader:
                raise ValueError(f"{reader.directory}: {name} is FP8 and has no {stem}.{SCALE} beside it. The checkpoint is incomplete.")
        return found

    def matches(self, config: dict[str, Any]) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"

    def contradiction(self, config: dict[str, Any], *, formats: set[str]) -> str | None:
        quantization = config["quantization_config"]
        groups = list((quantization.get("config_groups") or {}).values())
        said = {group.get("format") or quantization.get("format") for group in groups}
        if "mxfp4" in formats and groups and "mxfp4-pack-quantized" not in said:
            return f"groups have the format {', '.join(map(str, sorted(said, key=str)))}; packed weights are mxfp4-pack-quantized"
        for group in groups:
            size = (group.get("weights") or {}).get("group_size")
            if (group.get("format") or quantization.get("format")) == "mxfp4-pack-quantized" and size not in (None, 32):
                return f"group_size is {size}; a block of MXFP4 has 32 weights"
        return None

    def problem(self, content: Content) -> str | None:
        return None

    def quantization_config(self, content: Content) -> dict[str, Any]:
        groups: dict[str, Any] = {}
        for fmt in dict.fromkeys(p.format for p in content.packed):   # experts first, where transformers looks
            groups[f"group_{len(groups)}"] = {"targets": _targets(content, fmt=fmt), "input_activations": None, "output_activations": None,
                                              **find_format(fmt).scheme()}
        formats = {g["format"] for g in groups.values()}
        ignored = {*content.linears, "lm_head"}   # where the head is tied to the embedding on disk, it is still a linear layer in memory
        ignored |= fused_by_engines(content.linears)
        ignored |= {m for fused, num in content.kept_experts.items() for m in expert_modules(content.arch, fused, num_experts=num)}
        return {"quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed", "config_groups": groups, "ignore": sorted(ignored, key=natural), "kv_cache_scheme": None}


def _targets(content: Content, *, fmt: str) -> list[str]:
    targets: list[str] = []
    arch, experts = content.arch, [p for p in content.packed_experts if p.format == fmt]
    if experts and fmt == "mxfp4":   # all that are not in `ignore`
        inside, outside = (re.escape(segment) for segment in arch.renamed or (".", "."))
        projections = [p for ps in arch.fused.values() for p in ps] + [p for ps in neutral(arch).values() for p in ps]
        for pattern in dict.fromkeys((arch.experts.replace(inside, outside), arch.experts)):
            prefix = re.sub(r"^model\\\.", ".*", pattern)
            targets.append(rf"re:{_not_these(content, fmt=fmt)}{prefix}\.\d+\.({'|'.join(dict.fromkeys(projections))})$")
    elif experts:
        numbers: dict[str, int] = {}
        for p in experts:
            assert p.place is not None and p.place.expert is not None, p
            numbers[p.place.fused] = max(numbers.get(p.place.fused, 0), p.place.expert + 1)
        targets += [m for fused, num in numbers.items() for m in expert_modules(arch, fused, num_experts=num)]
    for p in content.packed:
        if p.place is None and p.format == fmt:   # in both spellings: engines ask by the names on disk, transformers by those in memory
            targets += dict.fromkeys((p.stem, p.module))
    return targets


def _not_these(content: Content, *, fmt: str) -> str:
    """A lookahead that keeps the experts of another packed format out of a regular expression, whatever the order of the groups."""
    others, arch = [], content.arch
    for fused in dict.fromkeys(p.place.fused for p in content.packed_experts if p.place is not None and p.format != fmt):
        module, leaf = fused.rsplit(".", 1)
        names = "|".join(dict.fromkeys((*arch.fused[leaf], *neutral(arch)[leaf])))
        others += [rf"(?!.*{re.escape(m)}\.\d+\.({names})$)" for m in dict.fromkeys((arch.disk_module(module), module))]
    return "".join(others)
