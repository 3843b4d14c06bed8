"""A tiny random model of every family in the catalogue, and what is known of each beforehand: its expert weights and their names on disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from saved import saved_once
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

POCKET = Path(__file__).parents[1] / "recipes" / "pocket" / "model"
COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": 1, "initializer_range": 0.15}
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                    "layer_types": ["linear_attention", "full_attention"]}
MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
DENSE_FIRST = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Config fields beyond COMMON; layers with experts; a name on disk of an expert and of the router; whether transformers reads our export."""

    config: dict[str, Any]
    layers: tuple[int, ...] = (0, 1)
    expert_on_disk: str = "model.layers.1.mlp.experts.3.gate_proj.weight"
    router_on_disk: str = "model.layers.1.mlp.gate.weight"
    shared: tuple[str, ...] = field(default=())        # in-memory names of the shared expert's weights in layer 1
    transformers_reads: bool = True                    # under the same names, with compressed-tensors or as its own MXFP4


SHARED = tuple(f"model.layers.1.mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down"))
SHARED_S = tuple(f"model.layers.1.mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down"))
W_NAMES = {"expert_on_disk": "model.layers.1.block_sparse_moe.experts.3.w1.weight", "router_on_disk": "model.layers.1.block_sparse_moe.gate.weight"}
FAMILIES: dict[str, Family] = {
    "mixtral": Family(config={"num_local_experts": 4, "intermediate_size": 32}, **W_NAMES),
    "minimax_m2": Family(config={"num_local_experts": 4, "intermediate_size": 32}, **W_NAMES),
    "qwen2_moe": Family(config={"num_experts": 4, "shared_expert_intermediate_size": 32}, shared=SHARED),
    "qwen3_moe": Family(config={"num_experts": 4, "mlp_only_layers": [0]}, layers=(1,)),
    "qwen3_next": Family(config={"num_experts": 4, "shared_expert_intermediate_size": 32, **LINEAR_ATTENTION}, shared=SHARED),
    "qwen3_5_moe_text": Family(config={"num_experts": 4, "shared_expert_intermediate_size": 32, **LINEAR_ATTENTION}, shared=SHARED),
    "olmoe": Family(config={"num_experts": 4, "intermediate_size": 32}),
    "deepseek_v2": Family(config={**DENSE_FIRST, **MLA, "q_lora_rank": None, "topk_method": "greedy", "num_key_value_heads": 4, "head_dim": 16},
                          layers=(1,), shared=SHARED_S),
    "deepseek_v3": Family(config={**DENSE_FIRST, **MLA, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}, layers=(1,),
                          shared=SHARED_S),
    "glm4_moe": Family(config={**DENSE_FIRST, "n_group": 1, "topk_group": 1}, layers=(1,), shared=SHARED_S),
    "mimo_v2_flash": Family(config={"n_routed_experts": 4, "num_experts": 4}, layers=(1,)),
    "ernie4_5_moe": Family(config={"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}, layers=(1,), shared=SHARED_S),
    "kimi_linear": Family(config={"num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": None, **MLA,
                                  "linear_num_heads": 2, "linear_head_dim": 32}, layers=(1,),
                          shared=SHARED_S, **W_NAMES, transformers_reads=False),   # 5.24.0 fails to merge the convolutions under compressed-tensors
    "deepseek_v4": Family(config={"n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 32,
                                  "o_groups": 2, "qk_rope_head_dim": 16, "num_nextn_predict_layers": 0, "mlp_layer_types": ["moe", "moe"]},
                          expert_on_disk="model.layers.1.ffn.experts.3.w1.weight", router_on_disk="model.layers.1.ffn.gate.weight", shared=SHARED_S,
                          transformers_reads=False),
    "granitemoe": Family(config={"num_local_experts": 4, "intermediate_size": 32}, expert_on_disk="model.layers.1.block_sparse_moe.input_linear.weight",
                         router_on_disk="model.layers.1.block_sparse_moe.router.layer.weight", transformers_reads=False),
    "gpt_oss": Family(config={"num_local_experts": 4, "intermediate_size": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
                      expert_on_disk="model.layers.1.mlp.experts.gate_up_proj", router_on_disk="model.layers.1.mlp.router.weight"),
    "llama4_text": Family(config={"num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 64, "moe_layers": [1]}, layers=(1,),
                          expert_on_disk="model.layers.1.feed_forward.experts.gate_up_proj", router_on_disk="model.layers.1.feed_forward.router.weight",
                          shared=tuple(f"model.layers.1.feed_forward.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")),
                          transformers_reads=False),   # into linear layers of other names: test_export_formats.py compares logits
}


def family_config(name: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[name](**{**COMMON, **FAMILIES[name].config, **changes})


def family_model(name: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(family_config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():   # some families start their experts at torch.empty or ones
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model.to(torch.bfloat16).eval()


def save_family(directory: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """A random bf16 checkpoint of the family, by transformers, with the pocket's tokenizer."""
    def save(first: Path) -> None:
        family_model(name, seed=seed, **changes).save_pretrained(first)
        AutoTokenizer.from_pretrained(POCKET).save_pretrained(first)

    return saved_once(directory, (name, seed, changes), save=save)
