"""A teacher whose decoder layers wait in host memory and visit the device one at a time.

The teacher only runs forward, a layer after the other, so the device needs the weights of the layer at work and of the one that comes next:
two layers instead of all. Once layer i is at work, the copy of layer i + 1 is issued on a stream of its own, from pinned memory, so that it
travels while layer i computes; the copy of layer i - 1 is gone by then, which the host waits for, or it would run ahead and hold all layers.
The weights are copied as they are: results are bit-equal to a teacher that stays on the device. Embedding, final norm, rotary tables and head
do stay there; the loss needs the head.

The price is one transfer of all layers a step over the bus. Where layers compute longer than they travel it is hidden, which long batches
bring about. On a CPU there is no bus and no second memory: the same copies are made and let go, which costs time and saves nothing.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class OffloadedLayers:
    """The decoder layers of a transformers causal model, at rest in host memory; made by `offload_layers`.

    resident: indices of the layers whose copies exist on the device now.
    """

    def __init__(self, layers: list[nn.Module], *, device: torch.device) -> None:
        self.layers, self.device = layers, device
        self._host = [[(m, kind, leaf, _at_rest(t, device)) for m, kind, leaf, t in _tensors(layer)] for layer in layers]
        self._copies: dict[int, tuple[list[Tensor], Any]] = {}   # layer -> its copies, and the event that says they have arrived
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: Any = None   # when the layer that ran last has computed
        for index, layer in enumerate(layers):
            self._lay_out(index, [t for *_, t in self._host[index]])
            layer.register_forward_pre_hook(lambda module, args, index=index: self._enter(index))
            layer.register_forward_hook(lambda module, args, output, index=index: self._leave(index), always_call=True)

    @property
    def resident(self) -> list[int]:
        return sorted(self._copies)

    def _enter(self, index: int) -> None:
        self._fetch(index)
        copies, arrived = self._copies[index]
        if arrived is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(arrived)
            for t in copies:
                t.record_stream(compute)   # made on the other stream: their memory is not reused before this one is done with them
        self._lay_out(index, copies)

    def _leave(self, index: int) -> None:
        self._lay_out(index, [t for *_, t in self._host[index]])
        self._copies.pop(index, None)
        if self._stream is not None:
            if self._done is not None:
                self._done.synchronize()   # the layer before this one
            self._done = torch.cuda.current_stream(self.device).record_event()
        if index + 1 < len(self.layers):
            self._fetch(index + 1)

    def _fetch(self, index: int) -> None:
        """Issue the copies of a layer, unless they are under way."""
        if index in self._copies:
            return
        host = [t for *_, t in self._host[index]]
        if self._stream is None:
            self._copies[index] = ([t.to(self.device, copy=True) for t in host], None)
            return
        with torch.cuda.stream(self._stream):
            copies = [t.to(self.device, non_blocking=True) for t in host]
            self._copies[index] = (copies, self._stream.record_event())

    def _lay_out(self, index: int, tensors: list[Tensor]) -> None:
        for (module, kind, leaf, _), t in zip(self._host[index], tensors, strict=True):
            getattr(module, kind)[leaf] = nn.Parameter(t, requires_grad=False) if kind == "_parameters" else t


def offload_layers(model: nn.Module, *, device: torch.device) -> OffloadedLayers:
    """Keep the decoder layers of a frozen model in host memory (pinned for a CUDA device), and move everything else to `device`.

    Errors: ValueError for a model that is to be trained.
    """
    if any(p.requires_grad for p in model.parameters()):
        raise ValueError("offload_layers: the model must be frozen, as its layers are copies while they run; got parameters that require gradients. "
                         "Call requires_grad_(False) first.")
    layers = list(model.model.layers)   # type: ignore[union-attr, arg-type]
    inside = {id(m) for layer in layers for m in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(device)   # in place: a tied head stays tied
            for leaf, buffer in module.named_buffers(recurse=False):
                module._buffers[leaf] = buffer.to(device)
    return OffloadedLayers(layers, device=device)


def _tensors(layer: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    for module in layer.modules():
        for kind in ("_parameters", "_buffers"):
            for leaf, t in getattr(module, kind).items():
                if t is not None:
                    yield module, kind, leaf, t.detach()


def _at_rest(tensor: Tensor, device: torch.device) -> Tensor:
    host = tensor.cpu()
    return host.pin_memory() if device.type == "cuda" else host
