"""Qwen2-MoE, Qwen3-MoE and OLMoE: one layout, with and without a shared expert."""

from .base import MoEArch

ARCH = MoEArch(
    name="qwen_moe",
    model_types=("qwen2_moe", "qwen3_moe", "olmoe"),
    experts=r"model\.layers\.\d+\.mlp\.experts",
    fused={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    not_experts=(r".*\.mlp\.shared_expert\..*", r".*\.mlp\.(gate|up|down)_proj\..*"),
)
