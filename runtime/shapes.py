"""Models by name, for benchmarks that need sizes and no weights."""

import difflib

from ..dflash.config import DraftConfig
from .graph import ModelGraph

SHAPES: dict[str, ModelGraph] = {
    "qwen3-30b-a3b": ModelGraph(
        hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, num_experts=128, experts_per_token=8, expert_hidden=768,
        normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e6, vocab_size=151936, max_length=40960, tied_head=False),
    "smollm2-moe": ModelGraph(
        hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, num_experts=8, experts_per_token=4, expert_hidden=384,
        normalize_router_weights=True, rms_eps=1e-5, rope_theta=1e5, vocab_size=49152, max_length=8192, tied_head=True, has_qk_norm=False),
    "pocket": ModelGraph(
        hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32, num_experts=8, experts_per_token=2, expert_hidden=128,
        normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e4, vocab_size=4096, max_length=2048, tied_head=True),
}

# their draft heads: of Qwen3-30B-A3B in the published sizes of DFlash's five layers, of the others as recipes/ trains them
DRAFTS: dict[str, DraftConfig] = {
    "qwen3-30b-a3b": DraftConfig(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        target_layer_ids=(1, 12, 23, 34, 45), num_target_layers=48, mask_token_id=151669, sliding_window=1024),
    "smollm2-moe": DraftConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=5, num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49152,
        target_layer_ids=(1, 8, 14, 20, 27), num_target_layers=30, mask_token_id=16, sliding_window=1024, rope_theta=1e5, rms_norm_eps=1e-5),
    "pocket": DraftConfig(
        hidden_size=256, intermediate_size=448, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=4096,
        target_layer_ids=(2, 4, 5), num_target_layers=6, mask_token_id=3, sliding_window=128, rope_theta=1e4),
}


def draft_of(name: str) -> DraftConfig:
    """The draft head of a named shape. Errors: as `shape_of`."""
    shape_of(name)
    return DRAFTS[name]


def shape_of(name: str) -> ModelGraph:
    """Errors: ValueError, naming the nearest, for a name that is none."""
    if name in SHAPES:
        return SHAPES[name]
    near = difflib.get_close_matches(name, SHAPES, n=1)
    raise ValueError(f"shape: must be one of {', '.join(SHAPES)}, or a directory with a config.json; got {name!r}."
                     + (f" Did you mean {near[0]}?" if near else ""))
