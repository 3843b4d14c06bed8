"""A model packed for a persistent step, its inputs, and the twin's own rules: round trips, the column rule, sampling."""

from dataclasses import replace

import pytest
import torch
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash.sampling import Sampling, choose_tokens
from kilotok.kernels.moe.product import weights_of
from kilotok.kernels.mx import dequantize_mxfp4_ref
from kilotok.kernels.persistent import (
    PHASES,
    Heads,
    LayerMatrices,
    StepInputs,
    StepRef,
    StepShape,
    StepState,
    StepWeights,
    sample_ref,
    step_ref,
    unpack_dense,
)
from kilotok.kernels.persistent.fragments import DenseLayout, choose_rolled_layout, pack_dense

SHAPES = {
    "normed": StepShape(hidden_size=64, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6), num_experts=6, experts_per_token=2,
                        expert_hidden=32, normalize_router_weights=False, rms_eps=1e-6, rope_theta=1e4, vocab_size=50, max_length=300, taps=(1, 0)),
    "SmolLM2-MoE": StepShape(hidden_size=576, num_layers=2, heads=Heads(num_heads=9, num_kv_heads=3, head_dim=64), num_experts=8, experts_per_token=4,
                             expert_hidden=384, normalize_router_weights=True, rms_eps=1e-5, rope_theta=1e5, vocab_size=64, max_length=256),
}


def layers_of(shape: StepShape, *, seed: int = 0) -> list[LayerMatrices]:
    g = torch.Generator().manual_seed(seed)
    d, e, f, heads = shape.hidden_size, shape.num_experts, shape.expert_hidden, shape.heads

    def matrix(*size: int) -> Tensor:
        return (torch.randn(*size, generator=g) * size[-1]**-0.5).to(torch.bfloat16)

    def codes(*size: int) -> Tensor:
        return torch.randint(0, 256, size, generator=g, dtype=torch.uint8)

    def scales(*size: int) -> Tensor:
        return torch.randint(119, 123, size, generator=g, dtype=torch.uint8)

    return [LayerMatrices(
        attention_norm=1 + matrix(d), qkv=matrix(heads.qkv_width, d),
        qk_norm=1 + matrix(heads.num_heads + heads.num_kv_heads, heads.head_dim) if shape.has_qk_norm else None,
        out=matrix(d, heads.num_heads * heads.head_dim), experts_norm=1 + matrix(d), router=matrix(e, d), gate_up_blocks=codes(e, 2 * f, d // 32, 16),
        gate_up_scales=scales(e, 2 * f, d // 32), down_blocks=codes(e, d, f // 32, 16), down_scales=scales(e, d, f // 32)) for _ in range(shape.num_layers)]


def ends_of(shape: StepShape, *, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"embedding_VD": torch.randn(shape.vocab_size, shape.hidden_size, generator=g).to(torch.bfloat16),
            "norm_D": (1 + 0.1 * torch.randn(shape.hidden_size, generator=g)).to(torch.bfloat16),
            "head_VD": torch.randn(shape.vocab_size, shape.hidden_size, generator=g).to(torch.bfloat16)}


def state_of(shape: StepShape, *, num_columns: int = 8, num_slots: int = 2) -> StepState:
    """With pages in an order of their own, and NaN in every buffer and in the cache."""
    width = -(-shape.max_length // 128)
    state = StepState.of(shape, num_columns=num_columns, num_slots=num_slots, num_pages=num_slots * width, device="cpu")
    state.pages_SP.copy_(torch.arange(num_slots * width, dtype=torch.int32).flip(0).view(num_slots, width))
    for tensor in (state.cache, state.residual_CD, state.qkv_SCW, state.mixed_CW, state.normed_CD, state.router_logits_SCE, state.inter_MCF, state.features_CXD,
                   state.logits_CV):
        tensor.fill_(torch.nan)
    return state


@pytest.mark.parametrize("name", SHAPES)
def test_packing_loses_nothing(name: str) -> None:
    shape = SHAPES[name]
    layers, ends = layers_of(shape), ends_of(shape)
    weights = StepWeights.pack(shape, iter(layers), **ends)
    assert_equal(weights.embedding_VD, ends["embedding_VD"])
    assert_equal(weights.norm_D, ends["norm_D"])
    assert_equal(unpack_dense(weights.head), ends["head_VD"])
    for i, layer in enumerate(layers):
        for matrix in ("qkv", "out", "router"):
            assert_equal(unpack_dense(getattr(weights, matrix).matrix(i)), getattr(layer, matrix), what=f"{matrix} of layer {i}")
        assert_equal(weights.attention_norm_LD[i], layer.attention_norm)
        assert_equal(weights.experts_norm_LD[i], layer.experts_norm)
        assert (weights.qk_norm_LHK is None) == (layer.qk_norm is None)
        if layer.qk_norm is not None and weights.qk_norm_LHK is not None:
            assert_equal(weights.qk_norm_LHK[i], layer.qk_norm)
        experts = weights.layer_experts(i)
        gate_up = weights_of(experts.gate_up, dtype=torch.float32).view(shape.num_experts, shape.expert_hidden // 8, 2, 8, -1).transpose(1, 2).flatten(1, 3)
        assert_equal(gate_up, dequantize_mxfp4_ref(layer.gate_up_blocks, layer.gate_up_scales, dtype=torch.float32), what=f"gate and up of layer {i}")
        assert_equal(weights_of(experts.down, dtype=torch.float32), dequantize_mxfp4_ref(layer.down_blocks, layer.down_scales, dtype=torch.float32))
    assert weights.dense_bytes == 4 * sum(w.words.numel() for w in (weights.qkv, weights.out, weights.router, weights.head))


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    shape = SHAPES["normed"]
    layers, ends = layers_of(shape), ends_of(shape)
    with pytest.raises(ValueError, match=r"^StepWeights: the model has 2 layers; got 1\.$"):
        StepWeights.pack(shape, layers[:1], **ends)
    with pytest.raises(ValueError, match=r"^StepWeights: the model has 2 layers; got 3\.$"):
        StepWeights.pack(shape, [*layers, layers[0]], **ends)
    with pytest.raises(TypeError, match=r"^StepWeights: layer 0: attention_norm must be bf16; got torch.float32"):
        StepWeights.pack(shape, [replace(layers[0], attention_norm=layers[0].attention_norm.float()), layers[1]], **ends)
    with pytest.raises(ValueError, match=r"^layer 1: qk_norm must be given if and only if"):
        StepWeights.pack(shape, [layers[0], replace(layers[1], qk_norm=None)], **ends)
    with pytest.raises(ValueError, match=r"^StepWeights: embedding must be \[50, 64\]; got \[49, 64\]\.$"):
        StepWeights.pack(shape, layers, **{**ends, "embedding_VD": ends["embedding_VD"][1:]})
    with pytest.raises(ValueError, match=r"^layer 0: experts must be 6 of 64 x 32; got 5 of"):
        StepWeights.pack(shape, [replace(layers[0], **{n: getattr(layers[0], n)[:5] for n in
                                                       ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")}), layers[1]], **ends)
    for change, error in (({"hidden_size": 72}, "hidden_size must be a multiple of 32"), ({"experts_per_token": 17}, "built for up to 512 experts"),
                          ({"expert_hidden": 48}, "expert_hidden must be a multiple")):
        with pytest.raises(NotImplementedError, match=f"^StepShape: {error}"):
            replace(shape, **change)
    with pytest.raises(ValueError, match=r"^StepShape: taps are layers 0\.\.1; got \[2\]\.$"):
        replace(shape, taps=(2,))


def test_random_weights_keep_activations_finite_and_use_many_experts() -> None:
    shape = SHAPES["SmolLM2-MoE"]
    weights = StepWeights.random(shape, seed=3, device="cpu")
    again = StepWeights.random(shape, seed=3, device="cpu")
    assert_equal(weights.experts.gate_up.scales, again.experts.gate_up.scales)
    state, inputs = state_of(shape, num_columns=16, num_slots=16), StepInputs.dead(16)
    for c in range(16):
        inputs.set(c, token_id=c * 3, slot=c, position=0)
    StepRef(weights, state).step(inputs)
    assert bool(state.logits_CV.isfinite().all()) and 0.1 < float(state.logits_CV.std()) < 10 and float(state.residual_CD.std()) < 50
    assert state.distinct_L.tolist() == [8, 8]
    assert len({tuple(row) for row in state.router_logits_CE.tolist()}) == 16


def test_inputs_are_one_buffer_that_keeps_every_bit_of_a_seed() -> None:
    inputs = StepInputs.dead(8)
    assert inputs.slots_C.tolist() == [-1] * 8
    inputs.set(3, token_id=7, slot=1, position=299, temperature=0.7, top_p=0.9, top_k=5, seed=2**63 - 2)
    assert (int(inputs.ids_C[3]), int(inputs.slots_C[3]), int(inputs.positions_C[3]), int(inputs.top_ks_C[3])) == (7, 1, 299, 5)
    assert (float(inputs.temperatures_C[3]), float(inputs.top_ps_C[3])) == (float(torch.tensor(0.7)), float(torch.tensor(0.9)))
    assert inputs.seeds() == [0, 0, 0, 2**63 - 2, 0, 0, 0, 0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_column_has_the_same_bits_alone_and_among_others_in_any_place_and_width(name: str) -> None:
    """A run of five columns, and what other sequences have beside it; cut into single steps, and moved to the end of a wider one."""
    shape = SHAPES[name]
    weights = StepWeights.pack(shape, layers_of(shape), **ends_of(shape))
    ids, first = [3, 9, 27, 31, 44], 126       # over a page's end
    prefix = torch.randint(0, 50, (first,), generator=torch.Generator().manual_seed(5)).tolist()

    def run(num_columns: int, columns: list[list[tuple[int, int, int, int]]]) -> StepState:
        """columns: of every step (column, id, slot, position)."""
        state = state_of(shape, num_columns=num_columns)
        twin = StepRef(weights, state)
        for step in [*([(0, i, 0, p)] for p, i in enumerate(prefix)), *columns]:
            inputs = StepInputs.dead(num_columns)
            for c, token, slot, position in step:
                inputs.set(c, token_id=token, slot=slot, position=position)
            twin.step(inputs)
        return state

    together = run(8, [[(c, token, 0, first + c) for c, token in enumerate(ids)]])
    alone = run(8, [[(2, token, 0, first + c)] for c, token in enumerate(ids)])
    wide = run(16, [[(0, 5, 1, 0), (1, 6, 1, 1), *((11 + c, token, 0, first + c) for c, token in enumerate(ids))]])
    for part in ("residual_CD", "logits_CV", "features_CXD"):
        assert_equal(getattr(wide, part)[11:16], getattr(together, part)[:5], bits=True, what=part)
        assert_equal(getattr(alone, part)[2], getattr(together, part)[4], bits=True, what=part)
        assert bool(getattr(together, part)[5:].isnan().all()), "a dead column was written"
    pages = together.pages_SP[0].long()
    for other in (alone, wide):
        assert_equal(other.cache[:, pages].nan_to_num(), together.cache[:, pages].nan_to_num(), bits=True, what="the cache of the sequence")


def test_the_function_and_the_class_and_single_phases_are_the_same() -> None:
    shape = SHAPES["normed"]
    weights, states = StepWeights.pack(shape, layers_of(shape), **ends_of(shape)), [state_of(shape) for _ in range(3)]
    inputs = StepInputs.dead(8)
    for c in range(3):
        inputs.set(c, token_id=c + 1, slot=0, position=c)
    StepRef(weights, states[0]).step(inputs)
    step_ref(inputs, weights=weights, state=states[1])
    twin = StepRef(weights, states[2], keep=False)
    twin.phase(PHASES[0], inputs)
    for layer in range(2):
        for phase in PHASES[1:-2]:
            twin.phase(phase, inputs, layer=layer)
    for phase in PHASES[-2:]:
        twin.phase(phase, inputs)
    for other in states[1:]:
        assert_equal(other.logits_CV[:3], states[0].logits_CV[:3], bits=True)
        assert_equal(other.next_C, states[0].next_C)


def test_several_steps_in_a_row_are_steps_that_feed_each_other() -> None:
    shape = SHAPES["normed"]
    weights, inputs = StepWeights.pack(shape, layers_of(shape), **ends_of(shape)), StepInputs.dead(8)
    inputs.set(1, token_id=4, slot=0, position=0, temperature=0.9, seed=5)
    inputs.set(6, token_id=8, slot=1, position=0)
    at_once = StepRef(weights, state_of(shape)).run_steps(inputs, 5)
    twin, found = StepRef(weights, state_of(shape)), []
    for position in range(5):
        twin.step(inputs)
        found.append(twin.state.next_C.clone())
        for c, how in ((1, {"temperature": 0.9, "seed": 5}), (6, {})):
            inputs.set(c, token_id=int(twin.state.next_C[c]), slot=c // 6, position=position + 1, **how)  # type: ignore[arg-type]
    assert_equal(at_once[:, [1, 6]], torch.stack(found)[:, [1, 6]])
    assert bool((at_once[:, [0, 2, 3, 4, 5, 7]] == -1).all())
    assert len(set(at_once[:, 1].tolist())) > 1


def test_sampled_tokens_are_those_of_the_draft_verify_loop() -> None:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, 200, generator=g)
    logits[5, 17] = logits[5, 40] = logits[5].max() + 1     # a tie
    for number, row in enumerate(logits):
        for how in (Sampling(), Sampling(temperature=0.8, seed=number), Sampling(temperature=1.3, top_k=5, seed=2**40 + number),
                    Sampling(temperature=0.7, top_p=0.8, seed=number), Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=2**63 - 1)):
            (expected,) = choose_tokens(row.unsqueeze(0), first_position=77 + number, sampling=how)
            got = sample_ref(row, temperature=how.temperature, top_p=how.top_p, top_k=how.top_k or 0, seed=how.seed, position=77 + number)
            assert got == expected, f"row {number}, {how}"


def test_rolled_layouts_are_even_and_hold_every_weight() -> None:
    """Qwen3-30B-A3B: no consumer of two an SM reads more than 4 % over its share of queries, keys and values; one split of the head; a long input is packed."""
    shape = StepShape(hidden_size=2048, num_layers=1, heads=Heads(num_heads=32, num_kv_heads=4, head_dim=128, rms_eps=1e-6), num_experts=128,
                      experts_per_token=8, expert_hidden=768, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e6, vocab_size=1000, max_length=128,
                      rolled=True)
    qkv, out, router, head = (shape.dense_layout(name) for name in ("qkv", "out", "router", "head"))
    assert -(-qkv.num_items // 264) * qkv.item_bytes <= 1.04 * qkv.num_bytes / 264
    assert (shape.qkv_splits, shape.router_splits, head.splits, out.splits) == (4, 4, 1, 1) and out.num_blocks == 16
    assert all(layout.pad_bytes == 0 for layout in (qkv, out, router))
    weight = torch.randn(48, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(unpack_dense(pack_dense(weight, layout=choose_rolled_layout(48, 4096))), weight)
    with pytest.raises(ValueError, match="all warps along the input"):
        DenseLayout(rows=16, depth=64, depth_warps=2, num_blocks=1, rolled=True)
