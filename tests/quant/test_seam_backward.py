"""The seam in backward: `keep`, `recompute` and gradient checkpointing give the same bits, and hold or free what they say."""

import copy
import math
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import family_config, family_model
from tolerances import assert_equal
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kilotok.quant.experts import AttachedQuant, Backward, attach_fake_quant
from kilotok.quant.formats import FORMATS, fake_quant_activation, find_format
from kilotok.quant.plan import PlanOptions, QuantPlan, make_plan

# every role and format in one model: MXFP4 and MXFP8 experts, MXFP4 shared experts, FP8 attention, MXFP8 router
EVERYTHING = PlanOptions(shared_experts=True, attention="fp8_block", router="mxfp8", keep=("model.layers.1.*.down_proj",), keep_format="mxfp8")
CASES = {
    "qwen3_moe": ("qwen3_moe", PlanOptions(), "grouped_mm"),
    "qwen3_moe-eager": ("qwen3_moe", PlanOptions(), "eager"),
    "qwen3_moe-batched": ("qwen3_moe", PlanOptions(), "batched_mm"),
    "qwen2_moe-everything": ("qwen2_moe", EVERYTHING, "grouped_mm"),
    "gpt_oss": ("gpt_oss", PlanOptions(router="mxfp8"), "grouped_mm"),
    "llama4": ("llama4_text", PlanOptions(shared_experts=True, attention="mxfp8"), None),
    "qwen3_moe-kept": ("qwen3_moe", PlanOptions(keep=("*.down_proj",)), "grouped_mm"),
}
MODES: tuple[tuple[Backward, bool], ...] = (("keep", False), ("recompute", False), ("keep", True), ("recompute", True))


class Recorder:
    """Every call of a format's fake_quant from now on: its name, and a weak reference to what it returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.values: list[weakref.ref[Tensor]] = []
        for fmt in FORMATS:
            self._wrap(type(fmt), monkeypatch)

    def _wrap(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        real = kind.fake_quant

        def recording(fmt: Any, weight: Tensor, *, name: str, **rest: Any) -> Tensor:
            result: Tensor = real(fmt, weight, name=name, **rest)
            self.names.append(name)
            self.values.append(weakref.ref(result.untyped_storage()))   # type: ignore[arg-type]
            return result

        monkeypatch.setattr(kind, "fake_quant", recording)

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)

    @property
    def alive(self) -> list[str]:
        return [n for n, v in zip(self.names, self.values, strict=True) if v() is not None]


def model_of(case: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    name, _, experts = CASES[case]
    model = family_model(name).to(dtype)
    if experts is not None:
        model.set_experts_implementation(experts)   # type: ignore[operator]
    return model


def plan_of(case: str) -> QuantPlan:
    name, options, _ = CASES[case]
    return make_plan(family_config(name), scale_mode="even", where="test", options=options)


def checkpoint_layers(model: nn.Module) -> None:
    """Gradient checkpointing as a student in evaluation mode has it: transformers looks at the layer's own `training`."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})   # type: ignore[operator]
    for layer in model.model.layers:   # type: ignore[union-attr]
        layer.training = True


def attached(case: str, *, backward: Backward, checkpointed: bool = False, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, AttachedQuant]:
    model = model_of(case, dtype=dtype)
    if checkpointed:
        checkpoint_layers(model)
    return model, attach_fake_quant(model, plan=plan_of(case), backward=backward)


def replaced(case: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A plain model whose planned parameters are the quantized values."""
    model = model_of(case, dtype=dtype)
    with torch.no_grad():
        for w in plan_of(case).weights:
            parameter = model.get_parameter(w.name)
            parameter.copy_(find_format(w.format).fake_quant(parameter, name=w.name, scale_mode="even", dim=w.dim, dtype=torch.float32, faults=None))
    return model


def tokens(seed: int = 0, *, rows: int = 3) -> Tensor:
    return torch.randint(4, 4096, (rows, 9), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, ids_BT: Tensor) -> Tensor:
    result: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    return result


def loss(model: nn.Module, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits(model, ids_BT)[:, :-1].float().flatten(0, 1), ids_BT[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert [n for n in expected if (got[n] is None) != (expected[n] is None)] == []
    for name, gradient in expected.items():
        if gradient is not None:
            assert_equal(got[name], gradient, what=name, bits=True)   # type: ignore[arg-type]


def overlays(model: nn.Module) -> list[str]:
    """Attributes that hide a parameter or a method of transformers: none may outlive a forward."""
    return [f"{n}.{leaf}" for n, m in model.named_modules() for leaf in m.__dict__ if leaf in m._parameters or leaf == "_apply_gate"]


# --- the numbers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_are_those_of_replaced_weights_however_backward_goes(case: str) -> None:
    reference = replaced(case)
    loss(reference, tokens()).backward()
    expected_logits, expected = logits(reference, tokens()).detach(), gradients(reference)
    planned = {w.name for w in plan_of(case).weights}
    assert all(expected[n] is not None and float(expected[n].abs().max()) > 0 for n in planned if "shared_expert_gate" not in n)   # type: ignore[union-attr]
    for backward, checkpointed in MODES:
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)
        assert_equal(logits(model, tokens()).detach(), expected_logits)
        quant.begin_step()
        loss(model, tokens()).backward()
        quant.end_step()
        assert_same_gradients(gradients(model), expected)
        assert overlays(model) == []


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe-everything"])
def test_bf16_autocast_gives_the_same_bits_however_backward_goes(case: str) -> None:
    found = []
    for backward, checkpointed in MODES:
        model, _ = attached(case, backward=backward, checkpointed=checkpointed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = loss(model, tokens())
        result.backward()
        found.append((result.detach(), gradients(model)))
    for result, got in found[1:]:
        assert_equal(result, found[0][0], bits=True)
        assert_same_gradients(got, found[0][1])
    assert all(g is None or (g.dtype == torch.float32 and bool(torch.isfinite(g).all())) for g in found[0][1].values())


@pytest.mark.parametrize(("backward", "checkpointed"), MODES)
def test_gradients_of_two_micro_batches_add_up(backward: Backward, checkpointed: bool) -> None:
    reference = replaced("qwen2_moe-everything")
    model, quant = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
    for seed in (1, 2):
        loss(reference, tokens(seed)).backward()
        quant.begin_step()
        loss(model, tokens(seed)).backward()
        quant.end_step()
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.parametrize(("backward", "checkpointed"), MODES)
def test_two_forwards_before_their_backwards(backward: Backward, checkpointed: bool) -> None:
    reference = replaced("qwen3_moe")
    model, _ = attached("qwen3_moe", backward=backward, checkpointed=checkpointed)
    for m in (reference, model):
        first, second = loss(m, tokens(1)), loss(m, tokens(2))
        second.backward()
        first.backward()
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.parametrize(("backward", "checkpointed"), MODES)
def test_a_step_of_the_optimizer_is_seen_by_the_next_step(backward: Backward, checkpointed: bool) -> None:
    """Nothing of a step's values is left for the next, whose masters differ."""
    model, _ = attached("qwen3_moe", backward=backward, checkpointed=checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(model, tokens(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    fresh = model_of("qwen3_moe")
    fresh.load_state_dict(model.state_dict())
    attach_fake_quant(fresh, plan=plan_of("qwen3_moe"))
    for m in (model, fresh):
        loss(m, tokens(2)).backward()
    assert_same_gradients(gradients(model), gradients(fresh))


# --- how often, and what is held ---


@pytest.mark.parametrize("case", CASES)
def test_one_fake_quantization_a_weight_a_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    names = Counter(w.name for w in plan_of(case).weights)
    for backward, checkpointed in MODES:
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)
        recorder.names.clear()
        recorder.values.clear()
        loss(model, tokens())
        assert recorder.counts == names == quant.calls
        with torch.no_grad():
            logits(model, tokens())
        assert recorder.counts == names + names == quant.calls
        quant.begin_step()
        assert not quant.calls


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe-everything", "gpt_oss", "llama4"])
@pytest.mark.parametrize(("backward", "checkpointed", "times"), [("keep", False, 1), ("keep", True, 1), ("recompute", False, 2), ("recompute", True, 2)])
def test_quantizations_of_a_whole_step(case: str, backward: Backward, checkpointed: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    model, _ = attached(case, backward=backward, checkpointed=checkpointed)
    model.get_input_embeddings().weight.requires_grad_(True)   # type: ignore[operator]
    loss(model, tokens()).backward()
    counts = recorder.counts
    assert set(counts) == {w.name for w in plan_of(case).weights}
    for name, n in counts.items():
        assert n == times, f"{name}: {n}"


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe-eager", "qwen2_moe-everything", "gpt_oss", "llama4"])
def test_what_autograd_holds_after_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep: every quantized weight, until backward. recompute: none. Checkpointed: none in `recompute`; `keep` hands them to the second run."""
    recorder = Recorder(monkeypatch)
    planned = sorted(w.name for w in plan_of(case).weights)
    for backward, checkpointed, held in (("keep", False, planned), ("recompute", False, []), ("keep", True, planned), ("recompute", True, [])):
        recorder.names.clear()
        recorder.values.clear()
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)   # type: ignore[arg-type]
        result = loss(model, tokens())
        assert sorted(recorder.alive) == held, (backward, checkpointed)
        result.backward()
        del result
        quant.begin_step()
        assert recorder.alive == [], (backward, checkpointed)


def test_without_gradients_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for backward, checkpointed in MODES:
        model, _ = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
        with torch.no_grad():
            result = logits(model, tokens())
        assert recorder.alive == [] and not result.requires_grad


# --- the model is left as it was ---


@pytest.mark.parametrize(("backward", "checkpointed"), MODES)
def test_an_exception_inside_the_forward_leaves_nothing_behind(backward: Backward, checkpointed: bool) -> None:
    model, quant = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
    expected = logits(model, tokens()).detach()
    experts = model.get_submodule("model.layers.1.mlp.experts")

    def explode(*args: Any) -> Any:
        assert set(experts.__dict__) >= {"gate_up_proj", "down_proj"}   # in the middle of it
        raise KeyError("from within")

    real, experts.act_fn = experts.act_fn, explode
    with pytest.raises(KeyError, match="from within"):
        loss(model, tokens())
    assert overlays(model) == []
    experts.act_fn = real
    # saved-tensor hooks are off again: a tensor saved now is a tensor, and a step goes as if nothing had been
    x = torch.ones(3, requires_grad=True)
    assert isinstance((x * x).grad_fn._saved_self, Tensor)   # type: ignore[union-attr]
    quant.begin_step()
    result = loss(model, tokens())
    quant.end_step()
    result.backward()
    assert_equal(logits(model, tokens()).detach(), expected)
    reference = replaced("qwen2_moe-everything")
    loss(reference, tokens()).backward()
    assert_same_gradients(gradients(model), gradients(reference))


def test_a_weight_that_cannot_be_quantized_leaves_nothing_behind() -> None:
    """The second weight of a module fails when the first is overlaid already."""
    model, _ = attached("qwen3_moe", backward="recompute")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[2, 5, 7] = math.nan
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj: .*got nan at index \(2, 5, 7\)"):
        logits(model, tokens())
    assert overlays(model) == []


@pytest.mark.parametrize("case", ["qwen2_moe-everything", "llama4"])
def test_state_dict_and_parameters_are_the_masters_during_a_forward(case: str) -> None:
    model, _ = attached(case, backward="recompute")
    before = {n: w.clone() for n, w in model.state_dict().items()}
    identities = {n: id(p) for n, p in model.named_parameters()}
    seen: list[str] = []

    def look(module: nn.Module, args: Any, output: Any = None) -> None:
        seen.append(module._get_name())
        assert {n: id(p) for n, p in model.named_parameters()} == identities
        state = model.state_dict()
        assert list(state) == list(before) and all(torch.equal(state[n], w) for n, w in before.items())

    inner: list[nn.Module] = [m for n, m in model.named_modules() if n.endswith((".experts.act_fn", ".o_proj"))]
    for module in inner:
        module.register_forward_pre_hook(look)
    loss(model, tokens()).backward()
    assert len(seen) >= len(inner) >= 2
    look(model, ())


@pytest.mark.parametrize(("backward", "checkpointed"), MODES)
def test_a_model_is_copied_between_forward_and_backward(backward: Backward, checkpointed: bool) -> None:
    model, _ = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
    result = loss(model, tokens())
    twin = copy.deepcopy(model)
    result.backward()
    expected = gradients(model)
    loss(twin, tokens()).backward()
    assert_same_gradients(gradients(twin), expected)
    with torch.no_grad():
        for w in plan_of("qwen2_moe-everything").weights:
            twin.get_parameter(w.name).zero_()
        assert_equal(logits(model, tokens()), logits(replaced("qwen2_moe-everything"), tokens()))


def test_detach_gives_the_masters_back() -> None:
    plain = model_of("qwen2_moe-everything")
    model, quant = attached("qwen2_moe-everything", backward="recompute")
    expected = logits(plain, tokens()).detach()
    assert not torch.equal(logits(model, tokens()), expected)
    quant.detach()
    assert_equal(logits(model, tokens()).detach(), expected)
    loss(plain, tokens()).backward()
    loss(model, tokens()).backward()
    assert_same_gradients(gradients(model), gradients(plain))


# --- steps that must not pass for sound ---


def test_a_module_that_is_not_called_is_named() -> None:
    """A layer skipped, or a family whose code reads its experts' weights from outside: training would go on unquantized."""
    model, quant = attached("qwen2_moe-everything", backward="keep")
    quant.begin_step()
    loss(model, tokens())
    quant.end_step()
    experts = model.get_submodule("model.layers.1.mlp.experts")
    model.model.layers[1].mlp.experts.__class__.__call__   # noqa: B018  # type: ignore[union-attr]
    model.get_submodule("model.layers.1.mlp")._modules["experts"] = _Bypass(experts)
    quant.begin_step()
    loss(model, tokens())
    with pytest.raises(RuntimeError, match=r"2 of \d+ planned weights were not quantized in this step, first model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        quant.end_step()


class _Bypass(nn.Module):
    """Runs the experts' forward without calling the module."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner = (experts,)

    def forward(self, *args: Any) -> Any:
        return self.inner[0].forward(*args)


def test_the_steps_are_counted_apart() -> None:
    model, quant = attached("qwen3_moe", backward="keep")
    with pytest.raises(RuntimeError, match="2 of 2 planned weights were not quantized"):
        quant.end_step()
    loss(model, tokens())
    quant.end_step()
    quant.begin_step()
    with pytest.raises(RuntimeError, match="2 of 2"):
        quant.end_step()


@pytest.mark.parametrize("name", [w.name for w in plan_of("qwen2_moe-everything").weights if ".1." in w.name])
def test_nan_in_a_weight_of_any_role_stops_the_forward(name: str) -> None:
    model, _ = attached("qwen2_moe-everything", backward="keep")
    with torch.no_grad():
        model.get_parameter(name)[..., 0, 17] = math.nan
    with pytest.raises(ValueError, match=rf"^{name}: .*got nan at index \((0, )?0, 17\)"):
        logits(model, tokens())
    assert overlays(model) == []


# --- activations ---


def explicit_experts(module: Any, hidden_TD: Tensor, expert_ids_TK: Tensor, expert_weights_TK: Tensor) -> Tensor:
    """The experts by transformers' grouped product, with both products' inputs rounded by hand."""
    class Rounding(nn.Module):
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def _apply_gate(self, x: Tensor) -> Tensor:
            return fake_quant_activation(type(module)._apply_gate(module, x))

    result: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](Rounding(), fake_quant_activation(hidden_TD), expert_ids_TK, expert_weights_TK)
    return result


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("backward", ["keep", "recompute"])
def test_mxfp8_activations_are_the_rounded_inputs_of_both_products(case: str, backward: Backward) -> None:
    model, reference = model_of(case), replaced(case)
    with torch.no_grad():
        weights_only = logits(attached(case, backward="keep")[0], tokens())
    attach_fake_quant(model, plan=plan_of(case), backward=backward, activations="mxfp8")
    for layer in {w.module for w in plan_of(case).experts}:
        experts: Any = reference.get_submodule(layer)
        experts.forward = explicit_experts.__get__(experts)
    with torch.no_grad():
        expected = logits(reference, tokens())
    got = logits(model, tokens())
    assert_equal(got.detach(), expected)
    assert not torch.equal(got, weights_only)
    got.sum().backward()
    assert all(bool(torch.isfinite(model.get_parameter(w.name).grad).all()) for w in plan_of(case).weights)   # type: ignore[arg-type]
    assert overlays(model) == []


def test_gradients_pass_through_rounded_activations() -> None:
    """With inputs that are MXFP8 already, rounding them changes neither values nor gradients of the first product's input."""
    model = model_of("qwen3_moe")
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    plan = replace(plan_of("qwen3_moe"), weights=tuple(w for w in plan_of("qwen3_moe").weights if w.module == "model.layers.1.mlp.experts"))
    attach_fake_quant(model, plan=plan, activations="mxfp8")
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.full((3, 2), 0.5)
    x = fake_quant_activation(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    inputs = [x.clone().requires_grad_(), (x * (1 + 2.0**-8)).requires_grad_()]   # the second rounds to the first
    for i in inputs:
        experts(i, ids, weights).square().sum().backward()
    assert float(inputs[0].grad.abs().max()) > 0   # type: ignore[union-attr]
    assert_equal(inputs[1].grad, inputs[0].grad, bits=True)   # type: ignore[arg-type]


def test_activations_are_refused_where_transformers_does_not_compute_the_experts() -> None:
    with pytest.raises(NotImplementedError, match=r"^model\.layers\.1\.feed_forward\.experts: quant\.activations works where transformers computes"):
        attach_fake_quant(model_of("llama4"), plan=plan_of("llama4"), activations="mxfp8")


def test_activations_are_refused_for_eager_experts_which_never_call_the_gate() -> None:
    model = model_of("qwen3_moe-eager")
    attach_fake_quant(model, plan=plan_of("qwen3_moe-eager"), activations="mxfp8")
    with pytest.raises(NotImplementedError, match=r"quant\.activations works with transformers' grouped_mm and batched_mm experts"):
        logits(model, tokens())
    assert overlays(model) == []
