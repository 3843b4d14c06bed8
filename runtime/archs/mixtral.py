"""Mixtral: no norms on queries and keys, the chosen experts' softmax weights renormalised, no biases."""

from typing import Any

from ..graph import ModelGraph

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "num_local_experts", "intermediate_size",
            "rms_norm_eps", "vocab_size", "max_position_embeddings")


def graph(config: dict[str, Any], where: str) -> ModelGraph:
    """Errors: NotImplementedError for sliding windows, another activation or a scaled rope, each by its key."""
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    refused = {"sliding_window": config.get("sliding_window") is not None, "hidden_act": config.get("hidden_act", "silu") != "silu",
               "rope_parameters": rope.get("rope_type", "default") != "default", "rope_scaling": bool(config.get("rope_scaling"))}
    for key, is_refused in refused.items():
        if is_refused:
            raise NotImplementedError(f"{where}: {key} is {config.get(key)!r}; the reference executor runs Mixtral with full attention, SiLU and the "
                                      "default rope.")
    if rope.get("rope_theta") is None:
        raise ValueError(f"{where}: no rope_theta, neither at the top nor in rope_parameters. The config is incomplete.")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise ValueError(f"{where}: no {missing[0]} in config.json. The config is incomplete.")
    if not 1 <= config["num_experts_per_tok"] <= config["num_local_experts"]:
        raise ValueError(f"{where}: num_experts_per_tok must lie in 1..num_local_experts ({config['num_local_experts']}); got "
                         f"{config['num_experts_per_tok']}. The config is damaged.")
    return ModelGraph(
        hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"], num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"], head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_experts=config["num_local_experts"], experts_per_token=config["num_experts_per_tok"], expert_hidden=config["intermediate_size"],
        normalize_router_weights=True, rms_eps=config["rms_norm_eps"], rope_theta=float(rope["rope_theta"]), vocab_size=config["vocab_size"],
        max_length=config["max_position_embeddings"], tied_head=config.get("tie_word_embeddings", False), has_qk_norm=False)
