"""Loading a model that is sharded over ranks: each rank reads from the checkpoint what it holds, one parameter at a time.

A parameter of [N, ...] over W ranks lies in pieces of ceil(N / W) along dim 0 (FSDP2's rule; for experts that dim is the expert), so a rank
reads the files of its own experts only, and never holds more than one parameter beside the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..archs import MoEArch, build_model, memory_names, to_disk_state
from .reader import CheckpointReader


class ParameterSource:
    """The parameters and buffers of a model by in-memory name, read from a checkpoint in slices of dim 0."""

    def __init__(self, reader: CheckpointReader, *, config: Any, arch: MoEArch) -> None:
        self.reader, self.arch = reader, arch
        self._disk: dict[str, list[str]] = {}
        model = build_model(config, device="meta")
        for disk, memory in memory_names(model, reader.names).items():
            self._disk.setdefault(memory, []).append(disk)
        state = model.state_dict()
        for memory, names in self._disk.items():
            if len(names) > 1 and memory in state:   # merged on loading: the order of the parts is transformers'
                order = list(to_disk_state(model, {memory: state[memory]}))
                names.sort(key=dict(zip(order, range(len(order)), strict=True)).__getitem__)

    def read(self, name: str, *, start: int, stop: int, shape: torch.Size) -> Tensor:
        """Rows start..stop of a parameter whose whole shape is `shape`. Errors: ValueError for a tensor that is not there or does not fit."""
        module, _, leaf = name.rpartition(".")
        if leaf in self.arch.fused and len(shape) == 3 and self.arch.stored == "per_expert":
            names = self.arch.disk_names(name, num_experts=shape[0])[start:stop]
            experts = [self.arch.join([self.reader.get(n) for n in parts]) for parts in names]
            return self.arch.canonical(torch.stack(experts)) if experts else torch.empty(0, *shape[1:])
        disk = self._disk.get(name, [])
        if len(disk) == 1:
            return self.reader.rows(disk[0], start=start, stop=stop)
        if not disk:
            raise ValueError(f"{self.reader.directory}: no tensor for {name} ({module}). The checkpoint is incomplete.")
        whole = torch.cat([self.reader.get(n) for n in disk])
        if whole.shape != shape:
            raise ValueError(f"{self.reader.directory}: {name} is made of {', '.join(disk)} in a way that cannot be sharded here: "
                             f"{tuple(whole.shape)} instead of {tuple(shape)}. Load it on one rank.")
        return whole[start:stop]


@torch.no_grad()
def load_sharded(model: nn.Module, *, source: ParameterSource, rank: int, world: int, initialize: Callable[[nn.Module], None]) -> None:
    """Fill the materialized parameters and buffers of a sharded model.

    initialize: sets a module's buffers that no checkpoint holds, such as rotary frequencies.
    """
    for module in model.modules():
        if module._non_persistent_buffers_set:
            initialize(module)
    for name, parameter in model.named_parameters():
        sharded = hasattr(parameter, "to_local")
        local: Tensor = parameter.to_local() if sharded else parameter   # type: ignore[attr-defined]
        rows = -(-parameter.shape[0] // world) if sharded else parameter.shape[0]
        start = min(rank * rows, parameter.shape[0]) if sharded else 0
        piece = source.read(name, start=start, stop=start + local.shape[0], shape=parameter.shape)
        if piece.shape != local.shape:
            raise ValueError(f"{source.reader.directory}: {name}: read {tuple(piece.shape)}, this rank holds {tuple(local.shape)}.")
        local.copy_(piece)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            buffer.copy_(source.read(name, start=0, stop=buffer.shape[0], shape=buffer.shape).reshape(buffer.shape))
