"""Training over several devices with FSDP2: parameters, gradients and optimizer in pieces, gathered a layer at a time.

QAT. Each decoder layer is one FSDP unit; embedding, last norm and head are the root's, which stays gathered between forward and backward, so
that the loss can use the head in chunks. The model is laid out on `meta`, sharded, then every rank reads its own pieces from the
checkpoint: no rank ever holds the whole model. Fake quantization runs on the gathered layer; which bits it sees does not depend on the
number of ranks, because the quantizer reads bf16 and that is what is gathered.

Draft. Each of its layers is one FSDP unit, the rest is the root's; its forward is the whole training pass. The frozen target is whole on every
device: its bytes, no gradient.
"""

import os
import shutil
import types
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..dflash.model import DraftModel
from ..quant.checkpoint.shards import ParameterSource, load_sharded


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all devices; checkpoints are folders that appear whole or not at all, and the older one goes when the new one is there."""

    def __init__(self, *, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Errors: OSError from a full disk, after the partial folder is removed; earlier checkpoints stay."""
        target = Path(self.broadcast(str(filepath)))
        partial = target.with_name(f".{target.name}.partial")
        if self.global_rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            for stale in target.parent.glob(".*.partial"):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
            _sync(partial)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)   # the other ranks' pieces too: without this one they are no checkpoint
            raise OSError(f"checkpoint: writing {target} failed ({error}). Free some space and continue with --resume; "
                          "earlier checkpoints are intact.") from error
        self.barrier()
        if self.global_rank == 0:
            partial.replace(target)
            for older in target.parent.glob("step-[0-9]*.ckpt"):
                if older != target:
                    shutil.rmtree(older) if older.is_dir() else older.unlink()
        self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Nothing: `save_checkpoint` has removed the older ones."""


def data_parallel_rank(trainer: L.Trainer) -> int:
    """This process's place among those with different data: under a mesh its row, the same for all ranks of a tensor- or context-parallel group."""
    strategy = trainer.strategy
    return strategy.device_mesh["data_parallel"].get_local_rank() if isinstance(strategy, ModelParallelStrategy) else trainer.global_rank


def data_parallel_size(trainer: L.Trainer) -> int:
    """How many processes have data of their own."""
    strategy = trainer.strategy
    return strategy.device_mesh["data_parallel"].size() if isinstance(strategy, ModelParallelStrategy) else trainer.world_size


def _sync(folder: Path) -> None:
    """Flush a folder's files to the disk before it is renamed."""
    for path in folder.iterdir():
        with path.open("rb") as f:
            os.fsync(f.fileno())


def shard_model(model: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    """Shard a transformers causal model over `mesh` (one dim), decoder layer by decoder layer, in place.

    compute_dtype: what layers are gathered and computed in; gradients are reduced in fp32. None: the parameters' own.
    """
    policy = _policy(compute_dtype)
    body: Any = model.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model.forward = types.MethodType(_hidden_states, model)   # the root's hooks gather embedding, norm and head around a call of the root
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _policy(compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy() if compute_dtype is None else MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)


def shard_draft(draft: DraftModel, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    """Shard a draft over `mesh` (one dim) in place, layer by layer, from the same weights on every rank. compute_dtype: as for `shard_model`."""
    for layer in draft.layers:
        fully_shard(layer, mesh=mesh, mp_policy=_policy(compute_dtype))   # type: ignore[arg-type]
    fully_shard(draft, mesh=mesh, mp_policy=_policy(compute_dtype), reshard_after_forward=False)


@torch.no_grad()
def whole_draft(draft: DraftModel) -> DraftModel:
    """The draft itself, or a copy with whole weights on every rank when it is sharded (all ranks call it)."""
    if not any(isinstance(p, DTensor) for p in draft.parameters()):
        return draft
    copy = DraftModel(draft.config)
    for (name, parameter), whole in zip(draft.named_parameters(), copy.parameters(), strict=True):
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"draft: {name} is gathered for a pass that is not over; weights are read between steps.")
        whole.copy_(parameter.full_tensor())
    for name in ("draft_ids", "own_head", "own_embedding"):   # of every rank alike
        setattr(copy, name, getattr(draft, name))
    return copy.to(next(draft.parameters()).device)


def _hidden_states(model: Any, input_ids: Tensor) -> Tensor:
    """The root's forward: final hidden states; the head is applied in chunks by the loss."""
    states: Tensor = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    return states


def materialize(model: nn.Module, *, source: ParameterSource, device: torch.device, rank: int, world: int) -> None:
    """Give a sharded model on `meta` memory on `device` and its values from the checkpoint."""
    tied = [(name, other) for name, other in _shared_parameters(model)]
    model.to_empty(device=device)
    for name, other in tied:   # to_empty makes two of what was one
        owner, _, leaf = other.rpartition(".")
        first_owner, _, first_leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = model.get_submodule(first_owner)._parameters[first_leaf]
    load_sharded(model, source=source, rank=rank, world=world, initialize=model._init_weights)   # type: ignore[arg-type]


def _shared_parameters(model: nn.Module) -> list[tuple[str, str]]:
    """(first name, other name) of parameters that two modules share."""
    first: dict[int, str] = {}
    shared = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared.append((first[id(parameter)], name))
        else:
            first[id(parameter)] = name
    return shared
