"""Kimi-Linear: Mixtral's names on disk, with shared experts and a dense first layer that keeps its `mlp` name."""

from .base import MoEArch

ARCH = MoEArch(
    name="kimi_linear",
    model_types=("kimi_linear",),
    fused={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    renamed=(".mlp.", ".block_sparse_moe."),
    misread="transformers 5.24 loads Kimi-Linear's convolutions with RANDOM weights from any compressed-tensors directory and only warns",
)
