"""The seam of quantization-aware training: expert modules that compute with fake-quantized weights.

The model keeps its parameters, names and state dict; only the function that its experts modules call is replaced, so
transformers' grouped product stays in use. Each fused weight is fake-quantized once a forward. The gradient passes
straight through (STE): the master weight receives the gradient of the quantized one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.mx import ScaleMode
from .archs import experts_function, use_experts_function
from .plan import ExpertWeight
from .tensor import fake_quant_weight

EXPERTS_FUNCTION = "kilotok_mxfp4"
BASE_FUNCTION = "grouped_mm"


class _StraightThrough(torch.autograd.Function):
    """Fake-quantize forward, identity backward (in the master's dtype)."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, name: str, scale_mode: ScaleMode, dtype: torch.dtype) -> Tensor:
        ctx.master_dtype = master.dtype
        return fake_quant_weight(master, name=name, scale_mode=scale_mode).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad.to(ctx.master_dtype), None, None, None


class _WithWeights:
    """An experts module seen with other weights; everything else is the module's own."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self._module = module
        self.__dict__.update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _mxfp4_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    names: dict[str, str] = module.__dict__.get("_mxfp4_names", {})   # none: a module that was not attached stays as it is
    scale_mode: ScaleMode = module.__dict__.get("_mxfp4_scale_mode", "even")
    # Every MXFP4 value is exact in bf16 and fp32, so the weights take the dtype the product is to run in. grouped_mm is not
    # autocast-enabled and follows its weights' dtype; under autocast the residual stream is fp32.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    weights = {leaf: _StraightThrough.apply(module._parameters[leaf], name, scale_mode, dtype) for leaf, name in names.items()}
    output: Tensor = experts_function(BASE_FUNCTION)(_WithWeights(module, weights), hidden, top_k_index, top_k_weights)
    return output


def attach_fake_quant(model: nn.Module, *, experts: Sequence[ExpertWeight], scale_mode: ScaleMode) -> None:
    """Make `model` compute with the MXFP4 values of its expert weights from now on.

    Errors: ValueError for an empty list, which would train an unquantized model.
    """
    if not experts:
        raise ValueError("attach_fake_quant: at least one expert weight is needed; got none. Check the plan.")
    for weight in experts:
        module = model.get_submodule(weight.module)
        names = module.__dict__.setdefault("_mxfp4_names", {})
        names[weight.name.rsplit(".", 1)[1]] = weight.name
        module.__dict__["_mxfp4_scale_mode"] = scale_mode
    use_experts_function(model, name=EXPERTS_FUNCTION, function=_mxfp4_experts)
