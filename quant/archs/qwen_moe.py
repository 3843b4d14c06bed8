"""One layout, many families: experts under `mlp.experts`, the same names in memory and on disk, one tensor an expert and projection.

They differ in what stands beside the experts: shared experts (Qwen2-MoE, Qwen3-Next, Qwen3.5, DeepSeek, GLM, Ernie), dense first layers
(DeepSeek, GLM, MiMo, Ernie), other router tensors (correction biases); none of that is an expert.
"""

from .base import MoEArch

ARCH = MoEArch(
    name="qwen_moe",
    model_types=("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe",
                 "deepseek_v2", "deepseek_v3", "glm4_moe", "mimo_v2_flash", "ernie4_5_moe"),
    router=r".*\.mlp\.(gate\..*|moe_statics\..*|shared_expert_gate\..*)",
)
