"""The seam of quantization-aware training: modules that compute with fake-quantized weights.

The model keeps its parameters, their names and its state dict, and transformers' grouped product stays in use. A hook before the
forward of a module that owns planned weights quantizes each of them once and lays the result over the parameter, as an attribute of
the module's `__dict__`, which Python finds before the parameter; a hook after the forward takes it away again. So one mechanism
serves every layout: fused experts called by any of transformers' experts functions or by code of their own, linear layers, routers;
also under FSDP2, which puts its gathered parameter in place before the hook reads it. The gradient passes straight through (STE):
the master weight receives the gradient of the quantized one, in the master's dtype.

Backward needs the quantized weights again, for the gradient of the inputs:

    keep        autograd holds them from the forward on: one copy in the compute dtype, 2 bytes a weight in bf16
    recompute   autograd holds a note; the weight is quantized again when backward reaches the layer, and freed after it

With gradient checkpointing the layer's forward runs twice. `keep` then hands the second run the values of the first, `recompute` quantizes again.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .formats import fake_quant_activation, find_format
from .plan import PlannedWeight, QuantPlan

Backward = Literal["keep", "recompute"]
Activations = Literal["mxfp8"]


class _StraightThrough(torch.autograd.Function):
    """`values` forward, identity backward to the master (in the master's dtype)."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, values: Tensor) -> Tensor:
        ctx.master_dtype = master.dtype
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.master_dtype), None


class _ActivationSTE(torch.autograd.Function):
    """MXFP8 activations forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return fake_quant_activation(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class AttachedQuant:
    """The fake quantization attached to a model; made by `attach_fake_quant`.

    calls: how often each planned weight was quantized, by name, since `begin_step`.
    """

    def __init__(self, model: nn.Module, *, plan: QuantPlan, backward: Backward, activations: Activations | None) -> None:
        self.model, self.scale_mode, self.backward, self.activations = model, plan.scale_mode, backward, activations
        self.weights = plan.weights
        self.calls: Counter[str] = Counter()
        self._faults: dict[torch.device, Tensor] = {}
        self._shared: dict[str, tuple[int, Tensor]] = {}   # name -> (version of the master, its values), for the second run of a checkpointed layer
        self._handles: list[Any] = []
        owners: dict[str, list[PlannedWeight]] = {}
        for weight in plan.weights:
            owners.setdefault(weight.module, []).append(weight)
        for name, weights in owners.items():
            path = name.split(".")
            above = [model.get_submodule(".".join(path[:i])) for i in range(1, len(path))]
            seam = _Seam(self, module=model.get_submodule(name), weights=weights, above=[m for m in above if hasattr(m, "gradient_checkpointing")])
            seam.module.__dict__["_kilotok_attached"] = True
            self._handles.append(seam.module.register_forward_pre_hook(seam.enter, with_kwargs=False))
            self._handles.append(seam.module.register_forward_hook(seam.leave, always_call=True))

    def detach(self) -> None:
        """The model computes with its masters again."""
        for handle in self._handles:
            handle.remove()
        for weight in self.weights:
            self.model.get_submodule(weight.module).__dict__.pop("_kilotok_attached", None)
        self._handles = []
        self._shared = {}

    def begin_step(self) -> None:
        """Forget what an interrupted step left, and count anew."""
        self._shared.clear()
        self.calls.clear()

    def end_step(self) -> None:
        """ValueError naming tensor and index when a weight quantized since the last call was NaN, infinite or beyond the format; RuntimeError
        when a planned weight was not quantized at all since `begin_step`, which would train an unquantized model in silence."""
        missed = [w.name for w in self.weights if not self.calls[w.name]]
        if missed:
            raise RuntimeError(f"quantization: {len(missed)} of {len(self.weights)} planned weights were not quantized in this step, first {missed[0]}. "
                               "The model does not call the module that owns it: this family cannot be trained here.")
        for flag in self._faults.values():
            if int(flag):
                flag.zero_()
                self._name_the_fault()

    def _name_the_fault(self) -> None:
        parameters = dict(self.model.named_parameters())
        for w in self.weights:
            find_format(w.format).fake_quant(_local(parameters[w.name].detach()), name=w.name, scale_mode=self.scale_mode, dim=w.dim, dtype=torch.bfloat16,
                                             faults=None)
        raise ValueError("quantization: a weight was NaN, infinite or beyond its format during the step and is no more. Resume from the last checkpoint.")

    def flag(self, device: torch.device) -> Tensor:
        if device not in self._faults:
            self._faults[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._faults[device]


class _Seam:
    """One module's planned weights."""

    def __init__(self, attached: AttachedQuant, *, module: nn.Module, weights: list[PlannedWeight], above: list[nn.Module]) -> None:
        self.attached, self.module, self.weights, self.above = attached, module, weights, above
        self._saved: list[Any] = []      # saved-tensor hooks that are active, innermost last
        self._gated = False              # whether this forward came by `_apply_gate`
        if attached.activations is not None and weights[0].role == "experts" and not hasattr(module, "_apply_gate"):
            raise NotImplementedError(f"{weights[0].module}: quant.activations works where transformers computes the experts ({type(module).__name__} computes "
                                      "them itself). Leave the option out for this family.")

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if module is not self.module:
            raise RuntimeError(f"{self.weights[0].module}: runs as a copy of the module that was attached to (nn.DataParallel?): it would compute unquantized. "
                               "Use DistributedDataParallel or FSDP2.")
        dtype = _compute_dtype(args, default=self.module._parameters[self.weights[0].leaf])
        storages: dict[int, PlannedWeight] = {}
        for weight in self.weights:
            master = self.module._parameters[weight.leaf]
            assert master is not None, weight.name
            values = self._values(weight, master, dtype=dtype)
            storages[values.untyped_storage().data_ptr()] = weight
            # the overlay: found before the parameter, invisible to parameters() and state_dict()
            self.module.__dict__[weight.leaf] = _StraightThrough.apply(master, values) if torch.is_grad_enabled() else values
        if self.attached.backward == "recompute" and torch.is_grad_enabled() and not self._checkpointed():
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack(storages, dtype), _unpack)
            hooks.__enter__()
            self._saved.append(hooks)
        if self.attached.activations is not None and self.weights[0].role == "experts":
            gate = type(self.module)._apply_gate   # type: ignore[attr-defined]
            self._gated = False

            def rounded(x: Tensor) -> Tensor:
                self._gated = True
                result: Tensor = _ActivationSTE.apply(gate(self.module, x))
                return result

            self.module.__dict__["_apply_gate"] = rounded
            return (_ActivationSTE.apply(args[0]), *args[1:])
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for weight in self.weights:
            self.module.__dict__.pop(weight.leaf, None)
        gated = self.module.__dict__.pop("_apply_gate", None) is None or self._gated
        if self._saved:
            self._saved.pop().__exit__(None, None, None)
        if output is not None and not gated:   # transformers' eager experts activate inline: the second product's inputs stay unrounded
            raise NotImplementedError(f"{self.weights[0].module}: quant.activations works with transformers' grouped_mm and batched_mm experts; this model "
                                      "computes them another way (eager?). Call model.set_experts_implementation('grouped_mm').")

    def _checkpointed(self) -> bool:
        """Whether transformers runs this layer's forward again in backward; it then drops by itself what the layer saved."""
        return any(layer.gradient_checkpointing and layer.training for layer in self.above)

    def _values(self, weight: PlannedWeight, master: Tensor, *, dtype: torch.dtype) -> Tensor:
        # A checkpointed layer runs first outside backward and then inside it; only the second run may take over what the first has made.
        in_backward = torch._C._current_graph_task_id() != -1
        shared = self.attached._shared.pop(weight.name, None) if torch.is_grad_enabled() else None
        if in_backward and shared is not None and shared[0] == master._version and shared[1].dtype == dtype:
            return shared[1]
        values = self._quantize(weight, master, dtype=dtype)
        if not in_backward and torch.is_grad_enabled() and self.attached.backward == "keep" and self._checkpointed():
            self.attached._shared[weight.name] = (master._version, values)
        return values

    def _quantize(self, weight: PlannedWeight, master: Tensor, *, dtype: torch.dtype) -> Tensor:
        self.attached.calls[weight.name] += 1
        with torch.no_grad():
            return find_format(weight.format).fake_quant(
                master.detach(), name=weight.name, scale_mode=self.attached.scale_mode, dim=weight.dim, dtype=dtype,
                faults=self.attached.flag(master.device) if master.is_cuda else None)

    def _pack(self, storages: dict[int, PlannedWeight], dtype: torch.dtype) -> Callable[[Tensor], Any]:
        def pack(tensor: Tensor) -> Any:
            weight = storages.get(tensor.untyped_storage().data_ptr())
            if weight is None:
                return tensor

            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            version = self.module._parameters[weight.leaf]._version   # type: ignore[union-attr]

            def again() -> Tensor:
                master = self.module._parameters[weight.leaf]
                assert master is not None, weight.name
                if master._version != version:   # as autograd itself says of a tensor it holds
                    raise RuntimeError(f"{weight.name}: must not change between forward and backward with quant.backward: recompute; got another version. "
                                       "Step the optimizer after backward, or set quant.backward: keep.")
                return self._quantize(weight, master, dtype=dtype).as_strided(size, stride, offset)

            return _Note(again)

        return pack


@dataclass(frozen=True)
class _Note:
    """What autograd holds instead of a quantized weight."""

    again: Callable[[], Tensor]


def _unpack(saved: Tensor | _Note) -> Tensor:
    return saved.again() if isinstance(saved, _Note) else saved


def _compute_dtype(args: tuple[Any, ...], *, default: Tensor | None) -> torch.dtype:
    """What the product runs in. Every value is exact in bf16 and fp32. grouped_mm is not autocast-enabled and follows its weights' dtype."""
    first = next((a for a in args if isinstance(a, Tensor)), default)
    assert first is not None
    if torch.is_autocast_enabled(first.device.type):
        dtype: torch.dtype = torch.get_autocast_dtype(first.device.type)
        return dtype
    return first.dtype if first.is_floating_point() else torch.float32


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded parameter; a plain tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor   # type: ignore[operator]
    return local


def attach_fake_quant(model: nn.Module, *, plan: QuantPlan, backward: Backward = "keep", activations: Activations | None = None) -> AttachedQuant:
    """Make `model` compute with the quantized values of its planned weights from now on.

    activations: `mxfp8` also rounds the inputs of the experts' two products to MXFP8, for servers that compute so; gradients pass through.
    Errors: ValueError for a plan without weights, which would train an unquantized model; AttributeError for one of another model.
    """
    if any("_kilotok_attached" in m.__dict__ for m in model.modules()):
        raise RuntimeError("attach_fake_quant: this model computes with quantized weights already. Call detach() on what attached them first.")
    if not plan.weights:
        raise ValueError("attach_fake_quant: at least one weight is needed; got none. Check the plan.")
    return AttachedQuant(model, plan=plan, backward=backward, activations=activations)

