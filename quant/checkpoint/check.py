"""Whether a parent's files are the model its config describes: every tensor there, of the right shape, none left over."""

import re
from typing import Any

import torch

from ..archs import build_model, memory_names
from ..plan import QuantPlan
from .reader import EMBEDDING, HEAD, CheckpointReader


def require_fitting_parent(reader: CheckpointReader, *, config: Any, plan: QuantPlan) -> None:
    """ValueError naming the first tensor that is missing, has another shape, or is an expert the config does not have.

    transformers would fill a missing tensor with random values and go on. Tensors beyond the model (an MTP layer, buffers) are
    allowed: the export copies them.
    """
    model = build_model(config, device="meta")
    arch = plan.arch
    fused = {e.name: e for e in plan.experts}
    experts: dict[str, tuple[int, ...]] = {}     # by name on disk
    for e in plan.experts:
        num_experts, rows, columns = e.canonical_shape
        if arch.stored == "fused":
            experts[arch.stored_name(e.name)] = e.shape
            continue
        for parts in arch.disk_names(e.name, num_experts=num_experts):
            experts.update(dict.fromkeys(parts, (rows // len(parts), columns)))
    others = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in fused}
    names = memory_names(model, reader.names)
    found: dict[str, list[tuple[int, ...]]] = {}
    for disk, memory in names.items():
        if memory in others:
            found.setdefault(memory, []).append(reader.info(disk)[1])
    for name, shape in experts.items():
        if name not in reader:
            raise ValueError(f"{reader.directory}: no tensor named {name}, which the config asks for. The checkpoint is incomplete, or stores its experts in "
                             "another layout than its family does.")
        if reader.info(name)[1] != shape:
            raise ValueError(f"{reader.directory}: {name} has shape {reader.info(name)[1]}; its config.json asks for {shape}. They do not belong together.")
    tied = getattr(config, "tie_word_embeddings", False)
    for name, shape in others.items():
        shapes = found.get(name, [])
        if not shapes:
            if name == HEAD and tied:
                continue
            raise ValueError(f"{reader.directory}: no tensor named {name}, which the config asks for. The checkpoint is incomplete: fetch it again.")
        merged = len(shapes) > 1 or len(shapes[0]) != len(shape)   # on loading, from parts or with a dim of one more or less
        if sum(torch.Size(s).numel() for s in shapes) != torch.Size(shape).numel() or (not merged and shapes[0] != shape):
            raise ValueError(f"{reader.directory}: {name} has shape {shapes[0]}; its config.json asks for {shape}. They do not belong together.")
    if tied and EMBEDDING in reader and HEAD in reader and not torch.equal(reader.get(HEAD), reader.get(EMBEDDING)):
        raise ValueError(f"{reader.directory}: config.json ties the head to the embedding, but the files hold two different tensors, and readers differ about "
                         f"which counts. Set tie_word_embeddings: false, or remove {HEAD}.")
    beyond = _mtp_layers(config)
    for name in reader.names:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if arch.expert_slice(name) is not None and name not in experts and not (layer is not None and int(layer[1]) in beyond):
            raise ValueError(f"{reader.directory}: {name} is an expert that its config.json does not have (num_hidden_layers or num_experts too small). "
                             "They do not belong together.")


def stored_dtypes(reader: CheckpointReader, *, config: Any) -> dict[str, torch.dtype]:
    """The dtype of every parameter's tensor on disk, by in-memory name: what the export writes it in."""
    names = memory_names(build_model(config, device="meta"), reader.names)
    return {memory: _DTYPES[kind] for disk, memory in names.items() if (kind := reader.info(disk)[0]) in _DTYPES}


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def _mtp_layers(config: Any) -> range:
    """Numbers of multi-token-prediction layers, which checkpoints keep behind the model's own and transformers does not build."""
    layers = config.num_hidden_layers
    return range(layers, layers + int(getattr(config, "num_nextn_predict_layers", None) or 0))
