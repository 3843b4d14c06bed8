"""GraniteMoE: fused on disk too, as `input_linear` (gate rows first) and `output_linear`. Packed one expert at a time, under Mixtral's names."""

from .base import MoEArch

ARCH = MoEArch(
    name="granitemoe",
    model_types=("granitemoe",),
    experts=r"model\.layers\.\d+\.block_sparse_moe\.experts",
    fused={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    stored="fused",
    stored_names={"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"},
    misread="transformers 5.24 takes no experts one by one for GraniteMoE: it loads them with RANDOM weights and only warns; vLLM 0.33 leaves them out as well",
    not_experts=(),
    router=r".*\.block_sparse_moe\.router\..*",
)
