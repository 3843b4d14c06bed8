"""From a checkpoint directory to an executor: exported (packed experts) or plain, such as the parent."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.archs import check_model_dir, find_arch
from ..quant.checkpoint import PackedCheckpoint
from .archs import graph_of
from .graph import LayerWeights, ModelGraph, ModelWeights
from .reference import ReferenceExecutor


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; FileNotFoundError, or ValueError for a damaged file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there. Give a directory written by `kilotok export`.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}). Restore it.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must be a JSON object; got {type(raw).__name__}. Restore it.")
    return raw


def load_executor(directory: Path, *, device: str, dtype: torch.dtype, taps: tuple[int, ...] = ()) -> ReferenceExecutor:
    """The reference executor on the weights of a directory; packed experts are dequantized (exact in bf16 and wider).

    taps: layers whose outputs a draft head reads.
    Errors: FileNotFoundError and ValueError for what is missing or damaged, NotImplementedError for a family that does not run.
    """
    check_model_dir(directory)
    config = read_json(directory / "config.json")
    graph = graph_of(config, where=str(directory))
    return ReferenceExecutor(graph, read_weights(directory, graph=graph, config=config, device=device, dtype=dtype), taps=taps)


def read_weights(directory: Path, *, graph: ModelGraph, config: dict[str, Any], device: str, dtype: torch.dtype) -> ModelWeights:
    arch = find_arch(config["model_type"], where=str(directory))
    checkpoint = PackedCheckpoint(directory, arch=arch)
    packed = checkpoint.experts() if checkpoint.layout is not None else None

    def get(name: str, *shape: int) -> Tensor:
        tensor = checkpoint.get(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{directory}: {name} has shape {tuple(tensor.shape)}; its config.json asks for {shape}. They do not belong together.")
        return tensor.to(device, dtype)

    def unpacked(name: str) -> Tensor:
        """Experts that are not in MXFP4: a plain checkpoint's, or those a plan keeps at higher precision."""
        return torch.stack([torch.cat([checkpoint.get(p) for p in parts]) for parts in arch.disk_names(name, num_experts=graph.num_experts)])

    def experts(name: str, *shape: int) -> Tensor:
        """A fused expert weight, [E, out, in]."""
        if packed is not None:
            fused = packed[name].dequantize(dtype=torch.bfloat16) if name in packed else unpacked(name)
        else:
            fused = unpacked(name)
        if tuple(fused.shape) != shape:
            raise ValueError(f"{directory}: {name} has shape {tuple(fused.shape)}; its config.json asks for {shape}. They do not belong together.")
        return _inputs_outermost(fused.to(device, dtype))

    d, k, e, f = graph.hidden_size, graph.head_dim, graph.num_experts, graph.expert_hidden
    q_rows, kv_rows = graph.num_heads * k, graph.num_kv_heads * k
    layers = []
    for i in range(graph.num_layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        layers.append(LayerWeights(
            attention_norm=get(f"model.layers.{i}.input_layernorm.weight", d),
            qkv=_inputs_outermost(torch.cat(
                [get(f"{at}.q_proj.weight", q_rows, d), get(f"{at}.k_proj.weight", kv_rows, d), get(f"{at}.v_proj.weight", kv_rows, d)])),
            qk_norm=torch.cat([get(f"{at}.q_norm.weight", k).expand(graph.num_heads, k), get(f"{at}.k_norm.weight", k).expand(graph.num_kv_heads, k)]),
            out=_inputs_outermost(get(f"{at}.o_proj.weight", d, q_rows)),
            experts_norm=get(f"model.layers.{i}.post_attention_layernorm.weight", d), router=get(f"{mlp}.gate.weight", e, d),
            gate_up=experts(f"{mlp}.experts.gate_up_proj", e, 2 * f, d), down=experts(f"{mlp}.experts.down_proj", e, d, f)))
    embedding = get("model.embed_tokens.weight", graph.vocab_size, d)
    head = embedding if graph.tied_head else get("lm_head.weight", graph.vocab_size, d)
    return ModelWeights(embedding=embedding, layers=tuple(layers), norm=get("model.norm.weight", d), head=_inputs_outermost(head))


def _inputs_outermost(weight: Tensor) -> Tensor:
    """The same [..., out, in] values, stored so that a product with few rows reads them in order (a quarter faster on a CPU)."""
    return weight.mT.contiguous().mT
