"""A draft's directory read into what rounds of the resident kernel run, and what they are not built for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tolerances import assert_equal

from kilotok.dflash.checkpoint import read_draft
from kilotok.kernels.persistent import unpack_dense
from kilotok.kernels.persistent.draft_model import split_gate_up
from kilotok.runtime.draft_weights import draft_shape, draft_weights, read_draft_weights

POCKET = Path(__file__).parents[2] / "recipes/pocket/draft"
EMBEDDING = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_the_pocket_draft_is_read_whole() -> None:
    model = read_draft(POCKET, dtype=torch.bfloat16)
    weights = read_draft_weights(POCKET, embedding_VD=EMBEDDING, max_length=512)
    shape, state = weights.shape, model.state_dict()
    assert (shape.hidden_size, shape.num_layers, shape.num_taps, shape.block_size, shape.causal, shape.mask_token_id) == (256, 3, 3, 8, False, 3)
    assert (shape.heads.num_heads, shape.heads.num_kv_heads, shape.heads.head_dim, shape.heads.window, shape.heads.rms_eps) == (8, 4, 32, 128, 1e-6)
    assert_equal(unpack_dense(weights.fc), state["fc.weight"])
    assert_equal(weights.mask_D, EMBEDDING[3])
    keys = unpack_dense(weights.keys).view(3, 2, 128, 256)
    for i in range(3):
        layer = f"layers.{i}."
        assert_equal(unpack_dense(weights.qkv.matrix(i))[:256], state[layer + "self_attn.q_proj.weight"])
        assert_equal(keys[i, 0], state[layer + "self_attn.k_proj.weight"])
        assert_equal(keys[i, 1], state[layer + "self_attn.v_proj.weight"])
        assert_equal(unpack_dense(weights.out.matrix(i)), state[layer + "self_attn.o_proj.weight"])
        gate, up = split_gate_up(unpack_dense(weights.gate_up.matrix(i)).T)
        assert_equal(gate.T, state[layer + "mlp.gate_proj.weight"])
        assert_equal(up.T, state[layer + "mlp.up_proj.weight"])
        assert_equal(unpack_dense(weights.down.matrix(i)), state[layer + "mlp.down_proj.weight"])
        q_norm, k_norm = (state[f"{layer}self_attn.{name}_norm.weight"] for name in "qk")
        assert_equal(weights.qk_norm_LHK[i], torch.cat((q_norm.expand(8, 32), k_norm.expand(4, 32))))
        assert_equal(weights.attention_norm_LD[i], state[layer + "input_layernorm.weight"])
        assert_equal(weights.mlp_norm_LD[i], state[layer + "post_attention_layernorm.weight"])
    assert_equal(weights.norm_D, state["norm.weight"])
    assert_equal(weights.hidden_norm_D, state["hidden_norm.weight"])


def test_a_trained_mask_vector_takes_the_place_of_the_embeddings_row() -> None:
    model = read_draft(POCKET, dtype=torch.bfloat16)
    vector = torch.randn(256, generator=torch.Generator().manual_seed(2))
    model.config, model.mask_embedding = replace(model.config, mask_embedding=True), torch.nn.Parameter(vector)
    assert_equal(draft_weights(model, embedding_VD=EMBEDDING, max_length=512).mask_D, vector.to(torch.bfloat16))


REFUSED = {
    "attention_sinks": {"attention_sinks": True}, "attention_value_scale": {"attention_value_scale": 0.5},
    "input_embedding_scale": {"input_embedding_scale": 2.0}, "output_multiplier": {"output_multiplier": 0.5},
    "logit_softcap": {"logit_softcap": 30.0}, "draft_vocab_size": {"draft_vocab_size": 100},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5}, "rope_scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "full_attention_layers": {"full_attention_layers": (1,), "causal": "sliding"}, "target_hidden_size": {"target_hidden_size": 128},
    "blocks of 2 to 8 slots": {"block_size": 16}, "head_dim 32, 64 or 128": {"head_dim": 16},
    "intermediate_size must be a multiple": {"intermediate_size": 100}}


@pytest.mark.parametrize("what", REFUSED)
def test_an_option_that_rounds_are_not_built_for_is_refused_by_name(what: str) -> None:
    config = replace(read_draft(POCKET, dtype=torch.bfloat16).config, **REFUSED[what])  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=what):
        draft_shape(config, max_length=512)


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_a_draft_that_brings_its_own_head_or_embedding_is_refused(name: str) -> None:
    model = read_draft(POCKET, dtype=torch.bfloat16)
    setattr(model, f"own_{name}", EMBEDDING)
    with pytest.raises(NotImplementedError, match=f"built for drafts that use the target's {name}; this one brings its own"):
        draft_weights(model, embedding_VD=EMBEDDING, max_length=512)
