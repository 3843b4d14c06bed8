"""The seam leaves the model as it was: after a forward, after an exception, in a copy; and steps that must not pass for sound do not."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from seam import BACKWARDS, assert_same_gradients, attached, gradients, logits, loss, model_of, overlays, plan_of, replaced, tokens
from tolerances import assert_equal
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kilotok.quant.experts import Backward, attach_fake_quant
from kilotok.quant.formats import fake_quant_activation

# --- the model is left as it was ---


@pytest.mark.parametrize(("backward", "checkpointed"), BACKWARDS)
def test_an_exception_inside_the_forward_leaves_nothing_behind(backward: Backward, checkpointed: bool) -> None:
    model, quant = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
    expected = logits(model, tokens()).detach()
    experts = model.get_submodule("model.layers.1.mlp.experts")

    class Explode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert set(experts.__dict__) >= {"gate_up_proj", "down_proj"}   # in the middle of it
            raise KeyError("from within")

    real, experts.act_fn = experts.act_fn, Explode()
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


@pytest.mark.parametrize(("backward", "checkpointed"), BACKWARDS)
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


def test_a_master_that_changes_before_backward_is_an_error_where_it_would_be_read_again() -> None:
    """`recompute` would give the gradient of other weights than the forward had; `keep` holds those of the forward."""
    for backward in ("keep", "recompute"):
        model, _ = attached("qwen3_moe", backward=backward)   # type: ignore[arg-type]
        expected, _ = attached("qwen3_moe", backward="keep")
        results = [loss(m, tokens()) for m in (model, expected)]
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.experts.down_proj").mul_(3)
        if backward == "recompute":
            with pytest.raises(RuntimeError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj: must not change between forward and backward"):
                results[0].backward()
            continue
        for result in results:
            result.backward()
        assert_same_gradients(gradients(model), gradients(expected))


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


def test_a_copy_of_an_attached_module_does_not_run_unquantized() -> None:
    """nn.DataParallel runs replicas, which would read their own plain weights."""
    model, _ = attached("qwen2_moe-everything", backward="keep")
    module = model.get_submodule("model.layers.1.mlp.experts")
    replica = module._replicate_for_data_parallel()
    replica._parameters = dict(module._parameters)
    with pytest.raises(RuntimeError, match="runs as a copy of the module"):
        replica(torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))


def test_attaching_twice_is_refused_until_the_first_is_detached() -> None:
    model, first = attached("qwen2_moe-everything", backward="keep")
    with pytest.raises(RuntimeError, match="computes with quantized weights already"):
        attach_fake_quant(model, plan=plan_of("qwen2_moe-everything"))
    first.detach()
    attach_fake_quant(model, plan=plan_of("qwen2_moe-everything")).detach()


def test_a_forward_without_backward_leaves_no_stale_weights_for_the_next_step() -> None:
    """keep under checkpointing hands values from a layer's first run to its second, and to nothing else."""
    model, quant = attached("qwen2_moe-everything", backward="keep", checkpointed=True)
    logits(model, tokens())                      # with gradients, and no backward: a loss that is only logged
    with torch.no_grad():
        for weight in quant.weights:
            model.get_parameter(weight.name).data.mul_(3)   # moves no version counter
    fresh, _ = attached("qwen2_moe-everything", backward="keep")
    fresh.load_state_dict(model.state_dict())
    assert_equal(logits(model, tokens()).detach(), logits(fresh, tokens()).detach())
