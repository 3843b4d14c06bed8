"""Kimi-Linear: Mixtral's names on disk, with shared experts and a dense first layer that keeps its `mlp` name."""

from .base import MoEArch

ARCH = MoEArch(
    name="kimi_linear",
    model_types=("kimi_linear",),
    fused={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    renamed=(".mlp.", ".block_sparse_moe."),
    misread="transformers 5.24 refuses it: its merging of Kimi-Linear's convolutions fails on any compressed-tensors directory",
)
