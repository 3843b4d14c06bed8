"""The `mxfp4-pack-quantized` layout of compressed-tensors: one packed weight and one scale tensor an expert projection.

    X.weight_packed  uint8 [out, in / 2]    two codes a byte, low nibble the even input
    X.weight_scale   uint8 [out, in / 32]   E8M0 bytes

Loaded by vLLM, SGLang and transformers; no transposition, no global scale.
Source: compressed-tensors 0.20.1, compressors/mxfp4 and the QuantizationConfig it dumps.
"""

import re
from typing import Any

from torch import Tensor

from ...kernels.mx import ScaleMode
from ..archs import MoEArch
from ..tensor import MXFP4Tensor

FORMAT = "mxfp4-pack-quantized"
PACKED, SCALE = "weight_packed", "weight_scale"


def to_disk(tensor: MXFP4Tensor, *, name: str) -> dict[str, Tensor]:
    """The tensors that stand for the weight `name` (ending in .weight), [out, in]."""
    stem = name.removesuffix(".weight")
    return {f"{stem}.{PACKED}": tensor.blocks.flatten(-2).contiguous(), f"{stem}.{SCALE}": tensor.scales.contiguous()}


def from_disk(packed: Tensor, scale: Tensor, *, scale_mode: ScaleMode | None) -> MXFP4Tensor:
    """The inverse of `to_disk`."""
    return MXFP4Tensor(blocks=packed.unflatten(-1, (scale.shape[-1], 16)), scales=scale, scale_mode=scale_mode)


def quantization_config(arch: MoEArch, *, kept_linears: list[str]) -> dict[str, Any]:
    """What config.json says of it: experts packed, every other linear layer named in `ignore`.

    Targets are regular expressions on module names; vLLM looks a layer up as `<experts>.0.gate_proj` and so on.
    """
    projections = "|".join(p for ps in arch.fused.values() for p in ps)
    experts = re.sub(r"^model\\\.", ".*", arch.experts)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32, "strategy": "group", "dynamic": False,
               "scale_dtype": "torch.uint8", "observer": "minmax"}
    group = {"targets": [rf"re:{experts}\.\d+\.({projections})$"], "weights": weights, "input_activations": None,
             "output_activations": None, "format": FORMAT}
    return {"quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": kept_linears, "kv_cache_scheme": None}
