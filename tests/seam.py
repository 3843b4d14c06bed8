"""Models with a fake-quantization attached, their twins with replaced weights, and a record of what was quantized and is still held."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from families import family_config, family_model
from tolerances import assert_equal
from torch import Tensor, nn
from torch.nn import functional as F

from kilotok.quant.experts import AttachedQuant, Backward, attach_fake_quant
from kilotok.quant.formats import FORMATS, find_format
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
BACKWARDS: tuple[tuple[Backward, bool], ...] = (("keep", False), ("recompute", False), ("keep", True), ("recompute", True))


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
