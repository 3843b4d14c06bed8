"""gpt-oss: all experts of a layer in one tensor, in the family's interleaved row order.

    <fused>_blocks   uint8 [E, out, in / 32, 16]    low nibble the even input; gate and up rows alternate
    <fused>_scales   uint8 [E, out, in / 32]        E8M0 bytes

Readers transpose after dequantizing: the weight in memory is [E, in, out]. config.json: `quant_method: mxfp4`; the experts of every layer are
packed but those of the modules it names.
Source: transformers 5.24.0 integrations/mxfp4.py, openai/gpt-oss torch/weights.py.
"""

from typing import Any

import torch
from torch import Tensor

from ...archs import ExpertSlice, MoEArch
from ...formats import Packed
from ..reader import CheckpointReader
from .base import Content, Layout, PackedModule, check_scales, check_wiped, natural, require_shapes

BLOCKS, SCALES = "_blocks", "_scales"


class GptOss(Layout):
    name = "gpt-oss"
    is_fused = True

    def names(self, stem: str, fmt: str) -> tuple[str, str]:
        return f"{stem}{BLOCKS}", f"{stem}{SCALES}"

    def specs(self, fmt: str, shape: tuple[int, ...], *, scales: torch.dtype) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        *lead, columns = shape
        return ("U8", (*lead, columns // 32, 16)), ("U8", (*lead, columns // 32))

    def to_disk(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return packed.elements.unflatten(-1, (packed.scales.shape[-1], 16)), packed.scales

    def from_disk(self, fmt: str, elements: Tensor, scales: Tensor, *, name: str) -> Packed:
        require_shapes(tuple(elements.shape), tuple(scales.shape), expected_scales=tuple(elements.shape[:-1]), name=name)
        check_scales(fmt, scales, name=name)
        for e in range(scales.shape[0]):
            check_wiped(elements[e], scales[e], name=f"{name}, expert {e}")
        return Packed(format=fmt, elements=elements.flatten(-2), scales=scales)

    def find(self, reader: CheckpointReader, *, arch: MoEArch) -> list[PackedModule]:
        found = []
        for name in reader.names:
            if name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" not in reader:
                raise ValueError(f"{reader.directory}: {name} has no blocks beside it. The checkpoint is incomplete: copy or export it again.")
            if name.endswith(BLOCKS):
                stem = name.removesuffix(BLOCKS)
                if f"{stem}{SCALES}" not in reader:
                    raise ValueError(f"{reader.directory}: {name} has no {stem}{SCALES} beside it. The checkpoint is incomplete: copy or export it again.")
                found.append(PackedModule(stem=stem, module=stem.rsplit(".", 1)[0], format="mxfp4",
                                          place=ExpertSlice(fused=stem, expert=None, part=0, parts=1)))
        return found

    def matches(self, config: dict[str, Any]) -> bool:
        return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"

    def problem(self, content: Content) -> str | None:
        if not (content.arch.interleaved and content.arch.transposed and content.arch.stored == "fused"):
            return f"readers take it for gpt-oss alone, whose rows alternate gate and up; this is a {content.arch.name} model"
        for p in content.packed:
            if p.place is None or p.format != "mxfp4":
                return f"it holds MXFP4 experts and bf16, nothing else; {p.stem} is {p.format}"
        packed_modules = {p.place.fused.rsplit(".", 1)[0] for p in content.packed_experts if p.place is not None}
        for fused in content.kept_experts:
            if fused.rsplit(".", 1)[0] in packed_modules:
                return f"it keeps the experts of a layer as a whole; {fused} alone is not packed"
        return None

    def quantization_config(self, content: Content) -> dict[str, Any]:
        kept = sorted({fused.rsplit(".", 1)[0] for fused in content.kept_experts}, key=natural)
        return {"quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head", *kept]}
