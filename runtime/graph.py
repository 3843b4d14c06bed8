"""One description of a decoder, which every executor runs, and its weights."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A pre-norm decoder whose every layer is grouped-query attention and a mixture of SwiGLU experts."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_hidden: int
    normalize_router_weights: bool     # the chosen experts' weights are divided by their sum
    rms_eps: float
    rope_theta: float
    vocab_size: int
    max_length: int                    # tokens of context
    tied_head: bool                    # the head is the embedding
    has_qk_norm: bool = True           # queries and keys have RMS norms


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer, matrices as [out, in]; queries, keys and values are one product, and so are their norms."""

    attention_norm: Tensor
    qkv: Tensor              # [(H + 2 G) K, D]
    qk_norm: Tensor | None   # [H + G, K]: the queries' norm H times, the keys' G times
    out: Tensor
    experts_norm: Tensor
    router: Tensor           # [E, D]
    gate_up: Tensor          # [E, 2 F, D]
    down: Tensor             # [E, D, F]


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
