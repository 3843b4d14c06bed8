"""The QAT seam: attaching changes what the experts compute with, exactly, and nothing else."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import MODES, ScaleMode
from tolerances import EXPERTS_EAGER_FP32, assert_equal, assert_within
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kilotok.quant.archs import build_model
from kilotok.quant.experts import AttachedQuant, attach_fake_quant
from kilotok.quant.formats import MXFP4
from kilotok.quant.plan import PlannedWeight, QuantPlan, make_plan
from kilotok.quant.tensor import fake_quant_weight

LAYERS, NUM_EXPERTS, VOCAB = 2, 5, 96
NAMES = [f"model.layers.{i}.mlp.experts.{leaf}" for i in range(LAYERS) for leaf in ("gate_up_proj", "down_proj")]


def tiny_config() -> PretrainedConfig:
    return Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=NUM_EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=32, intermediate_size=64, vocab_size=VOCAB, max_position_embeddings=64, norm_topk_prob=True, initializer_range=0.1,
        pad_token_id=0, eos_token_id=2, bos_token_id=None)


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(tiny_config(), device="cpu").eval()


def plan_of(scale_mode: ScaleMode = "even") -> QuantPlan:
    plan = make_plan(tiny_config(), scale_mode=scale_mode, where="test")
    assert [w.name for w in plan.weights] == NAMES
    return plan


def attach(model: nn.Module, *, scale_mode: ScaleMode = "even") -> AttachedQuant:
    return attach_fake_quant(model, plan=plan_of(scale_mode))


def attached(model: nn.Module, *, scale_mode: ScaleMode = "even") -> nn.Module:
    attach(model, scale_mode=scale_mode)
    return model


def replaced(state: dict[str, Tensor], *, scale_mode: ScaleMode = "even", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A plain model of the same state whose expert weights are the MXFP4 values, as parameters of `dtype`."""
    model = build_model(tiny_config(), device="cpu").eval()
    model.load_state_dict(state)
    for name in NAMES:
        module, leaf = name.rsplit(".", 1)
        values = fake_quant_weight(state[name], name=name, scale_mode=scale_mode).to(dtype)
        model.get_submodule(module)._parameters[leaf] = nn.Parameter(values)
    return model


def tokens(*, rows: int = 3, length: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, ids_BT: Tensor) -> Tensor:
    result: Tensor = model(input_ids=ids_BT).logits
    return result


def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits(model, ids_BT[:, :-1]).float().flatten(0, 1), ids_BT[:, 1:].flatten())


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ScaleMode, Tensor]]:
    """Every fake-quantization from now on: name, rule and result."""
    calls: list[tuple[str, ScaleMode, Tensor]] = []
    real = MXFP4.fake_quant

    def counting(self: MXFP4, weight: Tensor, *, name: str, scale_mode: ScaleMode, **rest: Any) -> Tensor:
        result = real(self, weight, name=name, scale_mode=scale_mode, **rest)
        calls.append((name, scale_mode, result))
        return result

    monkeypatch.setattr(MXFP4, "fake_quant", counting)
    return calls


def record_weight_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the expert weights that the product receives from now on."""
    dtypes: list[torch.dtype] = []
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def recording(module: Any, *args: Any) -> Tensor:
        dtypes.extend((module.gate_up_proj.dtype, module.down_proj.dtype))
        result: Tensor = grouped(module, *args)
        return result

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", recording)
    return dtypes


# --- forward and backward are those of the quantized weights ---


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_exactly_those_of_replaced_weights(mode: ScaleMode) -> None:
    model = tiny_model()
    state, ids = snapshot(model), tokens()
    with torch.no_grad():
        plain = logits(model, ids)
        got = logits(attached(model, scale_mode=mode), ids)
        expected = logits(replaced(state, scale_mode=mode), ids)
    assert_equal(got, expected)
    assert not torch.equal(got, plain)
    others = [replaced(state, scale_mode=m) for m in MODES if m != mode]
    with torch.no_grad():
        assert not any(torch.equal(got, logits(other, ids)) for other in others)


def test_logits_are_close_to_the_eager_experts_of_transformers() -> None:
    """Another implementation of the experts: one product an expert, summed in another order."""
    model = tiny_model()
    reference = replaced(snapshot(model))
    reference.set_experts_implementation("eager")   # type: ignore[operator]
    with torch.no_grad():
        assert_within(logits(attached(model), tokens()), logits(reference, tokens()), bound=EXPERTS_EAGER_FP32)


@pytest.mark.parametrize("mode", MODES)
def test_master_gets_exactly_the_gradient_of_the_replaced_weight(mode: ScaleMode) -> None:
    model = tiny_model()
    reference = replaced(snapshot(model), scale_mode=mode)
    attached(model, scale_mode=mode)
    loss(model, tokens()).backward()
    loss(reference, tokens()).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_equal(parameter.grad, expected[name].grad, what=name)
    for name in NAMES:
        assert float(model.get_parameter(name).grad.abs().max()) > 0, name   # type: ignore[union-attr]


def test_a_step_of_the_master_is_seen_by_the_next_forward() -> None:
    model = attached(tiny_model())
    with torch.no_grad():
        before = logits(model, tokens())
        for name in NAMES:
            model.get_parameter(name).mul_(-1.5)
        after = logits(model, tokens())
        assert_equal(after, logits(replaced(snapshot(model)), tokens()))
    assert not torch.equal(after, before)


def test_one_fake_quantization_a_fused_weight_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached(tiny_model(), scale_mode="floor")
    calls = count_calls(monkeypatch)
    result = loss(model, tokens())
    assert [(name, mode) for name, mode, _ in calls] == [(name, "floor") for name in NAMES]
    result.backward()
    assert len(calls) == len(NAMES), "backward quantizes nothing"
    loss(model, tokens(seed=1))
    assert len(calls) == 2 * len(NAMES)


def test_an_expert_without_tokens_is_quantized_and_gets_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router rows v, -v, 2v, -2v, 0: of any token the two largest logits are |a| and 2|a|, so expert 4 has no tokens."""
    model = tiny_model()
    with torch.no_grad():
        for i in range(LAYERS):
            router = model.get_parameter(f"model.layers.{i}.mlp.gate.weight")
            v = router[0].clone()
            router.copy_(torch.stack((v, -v, 2 * v, -2 * v, torch.zeros_like(v))))
    chosen: list[Tensor] = []
    for i in range(LAYERS):
        model.get_submodule(f"model.layers.{i}.mlp.experts").register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    state = snapshot(model)
    attached(model)
    calls = count_calls(monkeypatch)
    got = loss(model, tokens())
    got.backward()
    assert len(chosen) == LAYERS and all(set(c.unique().tolist()) == {0, 1, 2, 3} for c in chosen)
    for name, _, values in calls:
        assert_equal(values[4], fake_quant_weight(state[name][4], name=name, scale_mode="even").to(values.dtype), what=name)
        assert not torch.equal(values[4].float(), state[name][4])
    for name in NAMES:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert_equal(gradient[4], torch.zeros_like(gradient[4]), what=name)
        assert all(float(gradient[e].abs().max()) > 0 for e in range(4)), name


# --- nothing else changes ---


def test_state_dict_is_unchanged_by_attaching_and_by_training() -> None:
    model = tiny_model()
    before = snapshot(model)
    parameters = {name: id(p) for name, p in model.named_parameters()}
    attached(model)
    loss(model, tokens()).backward()
    after = model.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert_equal(after[key], value, what=key, bits=True)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in tiny_model().named_buffers()]


def test_a_saved_state_loads_into_a_plain_model_and_back() -> None:
    model = attached(tiny_model())
    plain = build_model(tiny_config(), device="cpu").eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        unquantized = logits(plain, tokens())
        assert not torch.equal(unquantized, logits(model, tokens()))
        other = attached(build_model(tiny_config(), device="cpu").eval())
        other.load_state_dict(plain.state_dict())
        assert_equal(logits(other, tokens()), logits(model, tokens()))


def test_a_copy_of_an_attached_model_has_its_own_weights() -> None:
    model = attached(tiny_model())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert_equal(logits(twin, tokens()), logits(model, tokens()))
        for name in NAMES:
            twin.get_parameter(name).zero_()
        assert_equal(logits(model, tokens()), logits(replaced(snapshot(model)), tokens()))


def test_another_model_stays_unquantized() -> None:
    parent, student = tiny_model(), tiny_model()
    with torch.no_grad():
        before = logits(parent, tokens())
        attached(student)
        assert_equal(logits(parent, tokens()), before)
        assert not torch.equal(logits(student, tokens()), before)


def test_another_model_that_shares_the_config_object_stays_unquantized() -> None:
    config = tiny_config()
    parent, student = build_model(config, device="cpu").eval(), build_model(config, device="cpu").eval()
    with torch.no_grad():
        before = logits(parent, tokens())
        attached(student)
        assert_equal(logits(parent, tokens()), before)


def test_experts_that_are_not_listed_stay_as_they_are() -> None:
    """Only layer 0 listed: layer 1 computes with its own weights."""
    model = tiny_model()
    state = snapshot(model)
    expected = replaced(state)
    for name in NAMES[2:]:
        module, leaf = name.rsplit(".", 1)
        expected.get_submodule(module)._parameters[leaf] = nn.Parameter(state[name])
    attach_fake_quant(model, plan=replace(plan_of(), weights=plan_of().weights[:2]))
    with torch.no_grad():
        assert_equal(logits(model, tokens()), logits(expected, tokens()))


# --- autocast ---


def test_fp32_stays_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached(tiny_model())
    dtypes = record_weight_dtypes(monkeypatch)
    assert logits(model, tokens()).dtype == torch.float32
    assert dtypes == [torch.float32] * len(NAMES)


def test_bf16_model_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().to(torch.bfloat16)
    expected = replaced(snapshot(model), dtype=torch.bfloat16).to(torch.bfloat16)
    with torch.no_grad():
        wanted = logits(expected, tokens())
        dtypes = record_weight_dtypes(monkeypatch)
        assert_equal(logits(attached(model), tokens()), wanted)
    assert dtypes == [torch.bfloat16] * len(NAMES)


def test_bf16_autocast_trains_fp32_masters() -> None:
    model = attached(tiny_model())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits(model, tokens()).dtype == torch.bfloat16
        result = loss(model, tokens())
    result.backward()
    assert bool(torch.isfinite(result))
    for name in NAMES:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.dtype == torch.float32
        assert bool(torch.isfinite(gradient).all()) and float(gradient.abs().max()) > 0, name


def test_bf16_autocast_gives_the_product_bf16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream is fp32 under autocast, so the activations' dtype does not say that the product should be bf16."""
    model = attached(tiny_model())
    dtypes = record_weight_dtypes(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits(model, tokens())
    assert dtypes == [torch.bfloat16] * len(NAMES)


def test_bf16_autocast_logits_are_exactly_those_of_bf16_experts() -> None:
    model = tiny_model()
    expected = replaced(snapshot(model), dtype=torch.bfloat16)   # every MXFP4 value is exact in bf16
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(logits(attached(model), tokens()), logits(expected, tokens()))


# --- refusals ---


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one weight is needed"):
        attach_fake_quant(tiny_model(), plan=replace(plan_of(), weights=()))


def test_a_module_that_is_not_there_is_refused() -> None:
    stranger = PlannedWeight(name="model.layers.7.mlp.experts.down_proj", shape=(5, 64, 32))
    with pytest.raises(AttributeError, match="7"):
        attach_fake_quant(tiny_model(), plan=replace(plan_of(), weights=(stranger,)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_and_infinity_in_a_master_stop_the_forward(name: str, value: float) -> None:
    """Whether a token reaches the expert or not."""
    model = attached(tiny_model())
    with torch.no_grad():
        model.get_parameter(name)[4, 31, 17] = value
        with pytest.raises(ValueError, match=rf"^{name}: .*got {value} at index \(4, 31, 17\)"):
            logits(model, tokens(rows=1, length=1))


def test_an_unknown_scale_mode_stops_the_forward() -> None:
    bad: Any = "nearest"
    model = tiny_model()
    attach_fake_quant(model, plan=replace(plan_of(), scale_mode=bad))
    with pytest.raises(ValueError, match=f"(?s){NAMES[0]}.*got 'nearest'"):
        logits(model, tokens())
