"""The catalogue: one line a layout."""

from . import deepseek_v4, gpt_oss, granitemoe, kimi_linear, llama4, mixtral, qwen_moe
from .base import MoEArch

ARCHS: tuple[MoEArch, ...] = (qwen_moe.ARCH, mixtral.ARCH, kimi_linear.ARCH, granitemoe.ARCH, gpt_oss.ARCH, llama4.ARCH, deepseek_v4.ARCH)


def find_arch(model_type: str | None, *, where: str) -> MoEArch:
    """The family of a model type; ValueError, naming those we know, when it is none of them."""
    for arch in ARCHS:
        if model_type in arch.model_types:
            return arch
    known = ", ".join(sorted(t for a in ARCHS for t in a.model_types))
    raise ValueError(
        f"{where}: model_type must be a mixture-of-experts family of the catalogue ({known}); got {model_type!r}. "
        "A dense model has no experts to quantize; a new family needs one file in quant/archs/.")
