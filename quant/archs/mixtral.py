"""Mixtral and MiniMax-M2: `block_sparse_moe` and w1 (gate), w3 (up), w2 (down) on disk, `mlp.experts` in memory."""

from .base import MoEArch

ARCH = MoEArch(
    name="mixtral",
    model_types=("mixtral", "minimax_m2"),
    fused={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    renamed=(".mlp.", ".block_sparse_moe."),
    router=r".*\.mlp\.(gate\..*|e_score_correction_bias)",
)
