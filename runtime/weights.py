"""From a checkpoint directory to an executor: exported (packed experts) or plain, such as the parent."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.archs import check_model_dir, find_arch
from ..quant.checkpoint import PackedCheckpoint
from ..quant.checkpoint.metadata import read_json
from ..quant.tensor import MXFP4Tensor
from .archs import graph_of
from .graph import LayerWeights, ModelGraph, ModelWeights
from .reference import ReferenceExecutor


def load_executor(directory: Path, *, device: str, dtype: torch.dtype, taps: tuple[int, ...] = ()) -> ReferenceExecutor:
    """The reference executor on the weights of a directory; packed experts are dequantized (exact in bf16 and wider).

    taps: layers whose outputs a draft head reads.
    Errors: FileNotFoundError and ValueError for what is missing or damaged, NotImplementedError for a family that does not run.
    """
    check_model_dir(directory)
    config = read_json(directory / "config.json")
    graph = graph_of(config, where=str(directory))
    return ReferenceExecutor(graph, read_weights(directory, graph=graph, config=config, device=device, dtype=dtype), taps=taps)


class CheckpointTensors:
    """A directory's tensors by what they are in a graph, as stored.

    Errors: ValueError for a tensor of another shape than the graph's.
    """

    def __init__(self, directory: Path, *, graph: ModelGraph, config: dict[str, Any]) -> None:
        self.directory, self.graph = directory, graph
        self.arch = find_arch(config["model_type"], where=str(directory))
        self.checkpoint = PackedCheckpoint(directory, arch=self.arch)
        self.packed = self.checkpoint.experts() if self.checkpoint.layout is not None else {}

    def get(self, name: str, *shape: int) -> Tensor:
        tensor = self.checkpoint.get(name)
        self._require(name, tensor.shape, shape)
        return tensor

    def dense(self, layer: int) -> dict[str, Tensor | None]:
        """A layer's tensors apart from its experts, by their names in LayerWeights."""
        g, at = self.graph, f"model.layers.{layer}.self_attn"
        d, k = g.hidden_size, g.head_dim
        rows = {"q": g.num_heads * k, "k": g.num_kv_heads * k, "v": g.num_kv_heads * k}
        norms = None
        if g.has_qk_norm:
            norms = torch.cat([self.get(f"{at}.{n}_norm.weight", k).expand(heads, k) for n, heads in (("q", g.num_heads), ("k", g.num_kv_heads))])
        return {"attention_norm": self.get(f"model.layers.{layer}.input_layernorm.weight", d),
                "qkv": torch.cat([self.get(f"{at}.{n}_proj.weight", rows[n], d) for n in rows]), "qk_norm": norms,
                "out": self.get(f"{at}.o_proj.weight", d, rows["q"]),
                "experts_norm": self.get(f"model.layers.{layer}.post_attention_layernorm.weight", d),
                "router": self.get(f"{self.arch.disk_module(f'model.layers.{layer}.mlp.gate')}.weight", g.num_experts, d)}

    def packed_experts(self, layer: int, leaf: str) -> MXFP4Tensor | None:
        """gate_up_proj or down_proj in MXFP4; None where a plain checkpoint, or a plan, has them in higher precision."""
        name = self._name(layer, leaf)
        found = self.packed.get(name)
        if found is not None:
            self._require(name, found.shape, self._shape(leaf))
        return found

    def experts(self, layer: int, leaf: str) -> Tensor:
        """gate_up_proj [E, 2 F, D] or down_proj [E, D, F], however they are stored."""
        packed = self.packed_experts(layer, leaf)
        if packed is not None:
            return packed.dequantize(dtype=torch.bfloat16)
        name = self._name(layer, leaf)
        fused = torch.stack([torch.cat([self.checkpoint.get(p) for p in parts]) for parts in self.arch.disk_names(name, num_experts=self.graph.num_experts)])
        self._require(name, fused.shape, self._shape(leaf))
        return fused

    @property
    def embedding(self) -> Tensor:
        return self.get("model.embed_tokens.weight", self.graph.vocab_size, self.graph.hidden_size)

    @property
    def norm(self) -> Tensor:
        return self.get("model.norm.weight", self.graph.hidden_size)

    @property
    def head(self) -> Tensor | None:
        """None: the embedding."""
        return None if self.graph.tied_head else self.get("lm_head.weight", self.graph.vocab_size, self.graph.hidden_size)

    def _name(self, layer: int, leaf: str) -> str:
        return f"model.layers.{layer}.mlp.experts.{leaf}"

    def _shape(self, leaf: str) -> tuple[int, int, int]:
        g = self.graph
        return (g.num_experts, 2 * g.expert_hidden, g.hidden_size) if leaf == "gate_up_proj" else (g.num_experts, g.hidden_size, g.expert_hidden)

    def _require(self, name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if tuple(got) != expected:
            raise ValueError(f"{self.directory}: {name} has shape {tuple(got)}; its config.json asks for {expected}. They do not belong together.")


def read_weights(directory: Path, *, graph: ModelGraph, config: dict[str, Any], device: str, dtype: torch.dtype) -> ModelWeights:
    tensors = CheckpointTensors(directory, graph=graph, config=config)

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    def matrix(tensor: Tensor) -> Tensor:
        """The same [..., out, in] values, stored so that a product with few rows reads them in order (a quarter faster on a CPU)."""
        return to(tensor).mT.contiguous().mT

    layers = []
    for i in range(graph.num_layers):
        dense = {name: None if t is None else matrix(t) if name in ("qkv", "out") else to(t) for name, t in tensors.dense(i).items()}
        layers.append(LayerWeights(**dense, gate_up=matrix(tensors.experts(i, "gate_up_proj")), down=matrix(tensors.experts(i, "down_proj"))))  # type: ignore[arg-type]
    embedding, head = to(tensors.embedding), tensors.head
    return ModelWeights(embedding=embedding, layers=tuple(layers), norm=to(tensors.norm), head=matrix(embedding if head is None else head))
