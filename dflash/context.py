"""Taps: the outputs of some decoder layers of a transformers model, caught by hooks.

Hooks and not `output_hidden_states`, because transformers returns the last layer's states after the final norm, while every
engine captures them before it.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class Taps:
    """While entered, remembers the output of each tapped layer of the newest forward.

    Errors: ValueError for a model whose decoder layers are not at `model.layers`, or a layer it does not have.
    """

    def __init__(self, model: nn.Module, *, layer_ids: Sequence[int]) -> None:
        layers = getattr(getattr(model, "model", None), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(f"taps: decoder layers must be at model.layers; {type(model).__name__} has none there.")
        if any(not 0 <= i < len(layers) for i in layer_ids):
            raise ValueError(f"taps: the target has layers 0..{len(layers) - 1}; got {list(layer_ids)}.")
        self.layers, self.layer_ids = layers, tuple(layer_ids)
        self._outputs: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "Taps":
        for i in self.layer_ids:
            self._hooks.append(self.layers[i].register_forward_hook(self._hook(i)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._outputs.clear()

    def _hook(self, layer_id: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output
        return keep

    def take(self) -> Tensor:
        """Features of the newest forward, [B, T, taps * D], in the order of the layer ids; each forward's can be taken once."""
        missing = [i for i in self.layer_ids if i not in self._outputs]
        if missing:
            raise RuntimeError(f"taps: layers {missing} have not run since the last take; run the target's forward first.")
        features = torch.cat([self._outputs[i] for i in self.layer_ids], dim=-1)
        self._outputs.clear()
        return features
