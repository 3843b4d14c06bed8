"""Llama 4 (text): transposed [E, in, out], gate columns first, fused on disk; its experts module is plain torch, not one of transformers' functions."""

from .base import MoEArch

ARCH = MoEArch(
    name="llama4",
    model_types=("llama4_text",),
    experts=r"model\.layers\.\d+\.feed_forward\.experts",
    stored="fused",
    transposed=True,
    not_experts=(r".*\.feed_forward\.shared_expert\..*", r".*\.feed_forward\.(gate|up|down)_proj\..*"),
    shared=r".*\.feed_forward\.shared_expert\.(gate|up|down)_proj\.weight",
    router=r".*\.feed_forward\.router\..*",
)
