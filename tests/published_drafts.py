"""The config.json of published DFlash drafts, as far as their values are known to us.

Values given by the publisher stand as they are. What was not at hand is filled in by `_LIKE_QWEN3` or marked "ours" and is only plausible.
"""

from typing import Any

from kilotok.dflash.config import DraftConfig

_LIKE_QWEN3: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}

# block size and rope on the top level only
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
    "num_target_layers": 36, "max_window_layers": 5, "use_sliding_window": False, "sliding_window": None, "rope_theta": 1e6, "rope_scaling": None,
    "max_position_embeddings": 40960, "vocab_size": 151936, "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16"}
QWEN35_35B_A3B = {   # ours: block size; eight layers, five taps
    **_LIKE_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "num_hidden_layers": 8, "num_target_layers": 40,
    "rope_theta": 1e7, "vocab_size": 248320, "block_size": 16, "layer_types": ["full_attention"] * 8,
    "dflash_config": {"target_layer_ids": [1, 10, 19, 28, 37], "mask_token_id": 248070}}
QWEN36_35B_A3B = {   # rope and block size in their sections only. ours: shapes, the taps after the third, the window
    **_LIKE_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "num_hidden_layers": 8, "num_target_layers": 40,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "vocab_size": 248320, "layer_types": ["sliding_attention"] * 8, "sliding_window": 2048,
    "dflash_config": {"target_layer_ids": [1, 6, 11, 16, 21, 27, 32, 37], "mask_token_id": 248070, "block_size": 16}}
QWEN36_27B = {
    **_LIKE_QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_target_layers": 64, "rope_theta": 1e7, "vocab_size": 248320, "block_size": 16,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048,
    "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070}}
LONGCAT_FLASH = {   # the mask token ends sequences, too. ours: intermediate size, heads, rope, block size
    **_LIKE_QWEN3, "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "num_target_layers": 28, "rope_theta": 1e7,
    "vocab_size": 131072, "block_size": 16, "dflash_config": {"target_layer_ids": [1, 7, 13, 19, 25], "mask_token_id": 2}}
KIMI_K26 = {   # six layers, yarn 48 x 4096. ours: width, taps, theta, the scaling's other numbers
    **_LIKE_QWEN3, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_hidden_layers": 6, "num_target_layers": 61,
    "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 48.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    "vocab_size": 163840, "block_size": 8, "max_position_embeddings": 196608,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838}}
GEMMA4_31B = {   # ours: layers of the target, theta, embedding scale (sqrt of the width, as Gemma's)
    **_LIKE_QWEN3, "hidden_size": 5376, "intermediate_size": 10752, "num_attention_heads": 64, "num_target_layers": 60, "rope_theta": 1e6,
    "vocab_size": 262144, "block_size": 16, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048,
    "dflash_config": {"target_layer_ids": [1, 12, 23, 35, 46, 57], "mask_token_id": 4, "input_embedding_scale": 73.5}}
# no layer_types: a window by use_swa only
MIMO_PRO: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 5,
    "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128, "v_head_dim": 128, "partial_rotary_factor": 0.5, "block_size": 8,
    "dflash_config": {"target_layer_ids": [0, 15, 31, 47, 69], "mask_token_id": 151669, "num_anchors": 4096, "block_size": 8, "loss_decay_gamma": 7.0,
                      "use_swa": True, "swa_window_size": 1024, "backbone_rotary_base": 5000000, "attention_value_scale": 0.612, "attention_sink_bias": True},
    "num_target_layers": 70, "vocab_size": 152064, "max_position_embeddings": 262144, "rope_theta": 10000, "sliding_window": 1024, "rms_norm_eps": 1e-5,
    "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": False, "dtype": "bfloat16"}
MIMO_V25 = {   # ours: rope and the options, taken from the larger one
    **MIMO_PRO, "hidden_size": 4096, "num_attention_heads": 64, "num_target_layers": 48, "vocab_size": 152576, "rms_norm_eps": 1e-6,
    "dflash_config": {**MIMO_PRO["dflash_config"], "target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151675}}
# the speculators library's form: ids of hidden_states, a wide residual stream (4 x 4096), a reduced vocabulary. ours: intermediate size, heads, mask, rope
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8, "draft_vocab_size": 32000, "target_hidden_size": 16384,
    "aux_hidden_state_layer_ids": [4, 14, 24, 33, 43], "mask_token_id": 129278, "sliding_window_non_causal": False, "sample_from_anchor": False,
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 129280, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "attention_bias": False, "hidden_act": "silu"},
    "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy",
                           "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
                           "verifier": {"name_or_path": "deepseek-ai/DeepSeek-V4-Flash", "architectures": ["DeepseekV4ForCausalLM"]}}}
PUBLISHED = {
    "Qwen3-8B": QWEN3_8B, "Qwen3.5-35B-A3B": QWEN35_35B_A3B, "Qwen3.6-35B-A3B": QWEN36_35B_A3B, "Qwen3.6-27B": QWEN36_27B, "LongCat-Flash": LONGCAT_FLASH,
    "Kimi-K2.6": KIMI_K26, "Gemma-4-31B": GEMMA4_31B, "MiMo-V2.5-Pro": MIMO_PRO, "MiMo-V2.5": MIMO_V25, "DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH}

_DFLASH2 = {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
DFLASH2: dict[str, dict[str, Any]] = {
    "Qwen3.8-27B": {
        **_LIKE_QWEN3, "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
        "hidden_size": 5120, "intermediate_size": 17408, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "num_target_layers": 64,
        "vocab_size": 248320, "dflash_config": {**_DFLASH2, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]}},
    "Muse-Glimmer-30B": {   # ours: layers of the target, the convolutions' numbers
        **_LIKE_QWEN3, "architectures": ["DFlash2DraftModel"], "hidden_size": 6656, "intermediate_size": 19968, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
        "vocab_size": 202048, "num_target_layers": 52, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "is_causal": False,
        "dflash_config": {**_DFLASH2, "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49], "final_logit_softcapping": 20,
                          "output_multiplier": 0.19611613513818404}},
    "GLM-5.3-Flash": {   # a trained mask embedding, nine taps. ours: theta, vocabulary, layers of the target, the convolutions' numbers
        **_LIKE_QWEN3, "architectures": ["DFlash2DraftModel"], "num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 12288, "rope_theta": 1e6,
        "vocab_size": 154880, "num_target_layers": 46, "layer_types": ["full_attention"] * 8, "is_causal": False,
        "dflash_config": {**_DFLASH2, "mask_token_id": 154856, "target_layer_ids": [5, 9, 14, 19, 24, 28, 33, 38, 42]}}}


def published_shapes(c: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The table of the published checkpoints, 11 tensors a layer and 3; a sink a head where there are sinks."""
    d, i, q, kv = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d, len(c.target_layer_ids) * (c.target_hidden_size or d)), "hidden_norm.weight": (d,),
                                          "norm.weight": (d,)}
    for n in range(c.num_hidden_layers):
        at = f"layers.{n}"
        shapes |= {f"{at}.input_layernorm.weight": (d,), f"{at}.post_attention_layernorm.weight": (d,), f"{at}.self_attn.q_proj.weight": (q, d),
                   f"{at}.self_attn.k_proj.weight": (kv, d), f"{at}.self_attn.v_proj.weight": (kv, d), f"{at}.self_attn.o_proj.weight": (d, q),
                   f"{at}.self_attn.q_norm.weight": (c.head_dim,), f"{at}.self_attn.k_norm.weight": (c.head_dim,), f"{at}.mlp.gate_proj.weight": (i, d),
                   f"{at}.mlp.up_proj.weight": (i, d), f"{at}.mlp.down_proj.weight": (d, i)}
        if c.attention_sinks:
            shapes[f"{at}.self_attn.attention_sink_bias"] = (c.num_attention_heads,)
    return shapes
