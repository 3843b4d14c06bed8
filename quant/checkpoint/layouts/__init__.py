"""Layouts of checkpoints with MXFP4 experts: how packed weights are named, shaped and described. One file a layout."""

from typing import Any

from .base import Content, Layout, PackedModule, expert_modules, natural, ordered
from .compressed_tensors import CompressedTensors
from .deepseek_v4 import DeepSeekV4
from .gpt_oss import GptOss
from .mimo import MiMo

LAYOUTS: tuple[Layout, ...] = (CompressedTensors(), GptOss(), MiMo(), DeepSeekV4())
WRITABLE = tuple(layout.name for layout in LAYOUTS if layout.can_write)


def find_layout(name: str) -> Layout:
    """Errors: ValueError naming the layouts there are."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(f"layout: must be one of {', '.join(layout.name for layout in LAYOUTS)}; got {name!r}.")


def layout_of(config: dict[str, Any], *, where: str) -> Layout | None:
    """The layout that a config.json describes; None for an unquantized model. Errors: ValueError for a quantization that is none of ours."""
    for layout in LAYOUTS:
        if layout.matches(config):
            return layout
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    raise ValueError(f"{where}: quantization_config has quant_method {quantization.get('quant_method')!r}, which is none of the layouts with MXFP4 experts "
                     f"that are read here ({', '.join(layout.name for layout in LAYOUTS)}). Give a directory in one of those.")


__all__ = ["LAYOUTS", "WRITABLE", "Content", "Layout", "PackedModule", "expert_modules", "find_layout", "layout_of", "natural", "ordered"]
