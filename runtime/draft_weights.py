"""From a draft head to what rounds of the resident kernel run: its shape and its packed weights."""

from pathlib import Path

import torch
from torch import Tensor

from ..dflash.checkpoint import read_draft
from ..dflash.config import DraftConfig
from ..dflash.model import DraftModel
from ..kernels.persistent import Heads
from ..kernels.persistent.draft_model import DraftLayer, DraftShape, DraftWeights

BF16 = torch.bfloat16


def draft_shape(config: DraftConfig, *, max_length: int) -> DraftShape:
    """The shape of a draft; max_length: the target's context.

    Errors: NotImplementedError for an option or a size that rounds are not built for.
    """
    c = config
    for name, value, neutral in (
            ("attention_sinks", c.attention_sinks, False), ("attention_value_scale", c.attention_value_scale, 1.0),
            ("input_embedding_scale", c.input_embedding_scale, 1.0), ("output_multiplier", c.output_multiplier, 1.0), ("logit_softcap", c.logit_softcap, None),
            ("draft_vocab_size", c.draft_vocab_size, None), ("partial_rotary_factor", c.partial_rotary_factor, 1.0), ("rope_scaling", c.rope_scaling, None),
            ("full_attention_layers", c.full_attention_layers, ()), ("target_hidden_size", c.target_hidden_size or c.hidden_size, c.hidden_size)):
        if value != neutral:
            raise NotImplementedError(f"draft in the kernel: built for {name} {neutral}; got {value}. The draft head in torch takes it.")
    heads = Heads(num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_eps=c.rms_norm_eps, window=c.sliding_window)
    return DraftShape(
        hidden_size=c.hidden_size, num_layers=c.num_hidden_layers, heads=heads, intermediate_size=c.intermediate_size, num_taps=len(c.target_layer_ids),
        mask_token_id=c.mask_token_id, rms_eps=c.rms_norm_eps, rope_theta=c.rope_theta, max_length=max_length, block_size=c.block_size,
        causal=c.causal == "always")


def require_rounds(model: DraftModel, *, max_length: int) -> DraftShape:
    """The shape of a draft head that rounds are built for. Errors: as `draft_shape`, and for a draft with a head or an embedding of its own."""
    for name, tensor in (("head", model.own_head), ("embedding", model.own_embedding)):
        if tensor is not None:
            raise NotImplementedError(f"draft in the kernel: built for drafts that use the target's {name}; this one brings its own. The draft head in torch "
                                      "takes it.")
    return draft_shape(model.config, max_length=max_length)


def draft_weights(model: DraftModel, *, embedding_VD: Tensor, max_length: int, device: torch.device | str = "cpu") -> DraftWeights:
    """Packed on `device`; what is wider than bf16 is rounded. embedding_VD: the target's, whose row of the mask token fills slots without a trained vector.

    Errors: as `require_rounds`.
    """
    shape, heads = require_rounds(model, max_length=max_length), model.config.num_attention_heads
    state: dict[str, Tensor] = {name: tensor.detach().to(BF16) for name, tensor in model.state_dict().items()}

    def layer(i: int) -> DraftLayer:
        def weight(name: str) -> Tensor:
            return state[f"layers.{i}.{name}.weight"]

        q_norm, k_norm = (weight(f"self_attn.{name}_norm") for name in "qk")
        return DraftLayer(
            attention_norm=weight("input_layernorm"), qkv=torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"]),
            qk_norm=torch.cat((q_norm.expand(heads, -1), k_norm.expand(shape.heads.num_kv_heads, -1))), out=weight("self_attn.o_proj"),
            mlp_norm=weight("post_attention_layernorm"), gate=weight("mlp.gate_proj"), up=weight("mlp.up_proj"), down=weight("mlp.down_proj"))

    mask = state.get("mask_embedding", embedding_VD[shape.mask_token_id].to(BF16))
    return DraftWeights.pack(shape, (layer(i) for i in range(shape.num_layers)), fc=state["fc.weight"], hidden_norm_D=state["hidden_norm.weight"],
                             norm_D=state["norm.weight"], mask_D=mask, device=device)


def read_draft_weights(directory: Path, *, embedding_VD: Tensor, max_length: int, device: torch.device | str = "cpu") -> DraftWeights:
    """Of an exported draft's directory. Errors: as `read_draft` and `draft_weights`."""
    return draft_weights(read_draft(directory, dtype=BF16), embedding_VD=embedding_VD, max_length=max_length, device=device)
