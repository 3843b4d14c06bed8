"""QAT over several devices with FSDP2: parameters, gradients and optimizer in pieces, gathered a decoder layer at a time.

Each decoder layer is one FSDP unit; embedding, last norm and head are the root's, which stays gathered between forward and backward, so
that the loss can use the head in chunks. The model is laid out on `meta`, sharded, then every rank reads its own pieces from the
checkpoint: no rank ever holds the whole model. Fake quantization runs on the gathered layer; which bits it sees does not depend on the
number of ranks, because the quantizer reads bf16 and that is what is gathered.
"""

import os
import shutil
import types
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def _sync(folder: Path) -> None:
    """Flush a folder's files to the disk before it is renamed."""
    for path in folder.iterdir():
        with path.open("rb") as f:
            os.fsync(f.fileno())


def shard_model(model: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    """Shard a transformers causal model over `mesh` (one dim), decoder layer by decoder layer, in place.

    compute_dtype: what layers are gathered and computed in; gradients are reduced in fp32. None: the parameters' own.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32) if compute_dtype is not None else MixedPrecisionPolicy()
    body: Any = model.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model.forward = types.MethodType(_hidden_states, model)   # the root's hooks gather embedding, norm and head around a call of the root
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


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
