"""A decoder as a persistent step runs it: its shape, its packed weights, and the memory that a step reads and writes.

    embed       residual = embedding[id]
    of each layer
      qkv       norm, then queries, keys and values of all heads
      attention norm and rope of queries and keys, their append to the cache, softmax over it
      out       residual += output projection
      router    norm, router logits, the experts of every column
      experts   residual += gate and up, down; handed out for the draft head if the layer is tapped
    head        final norm, logits
    sample      the next token

Rounding points: the residual is fp32; a norm's output, queries, keys, values, the mixed values and activated channels are rounded to bf16, once each;
qkv, router logits and logits are fp32 sums. step_ref.py is the twin of every phase.

Matrices of all layers lie one after the other, as the products of a resident kernel find them: a layer is an offset.

Legend: L layers, C columns, D hidden, W qkv width, H query heads, G key/value heads, K head dimension, E experts of a layer, V vocabulary, P pages,
S sequence slots, N positions, X taps.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..moe.routing import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, TILE_COLUMNS, Routing
from ..moe.weights import ExpertWeights, pack_experts
from ..mx.format import MX_BLOCK_SIZE
from ..mx.layouts import FragmentLayout, FragmentWeight, choose_layout
from .attention import AttentionWorkspace, Heads, rope_table
from .fragments import H200_SMS, DenseLayout, DenseWeight, choose_dense_layout, choose_rolled_layout, pack_dense
from .plan import CHUNK
from .router import empty_routing
from .tagged import TagCounter

BF16 = torch.bfloat16
MAX_STEPS = 6           # of an expert's product: two consumers leave a thread 112 registers, and a step's activations take 8
MATRICES = ("qkv", "out", "router", "head")
_MOST_SPLITS = 4
_CODE_RMS = 2.93        # of the eight magnitudes of E2M1, drawn evenly


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step must know of a model. Every layer is grouped-query attention and a mixture of SwiGLU experts."""

    hidden_size: int
    num_layers: int
    heads: Heads                       # of every layer; without rms_eps queries and keys have no norm
    num_experts: int
    experts_per_token: int
    expert_hidden: int
    normalize_router_weights: bool     # the chosen experts' weights are divided by their sum
    rms_eps: float
    rope_theta: float
    vocab_size: int
    max_length: int                    # tokens of context
    taps: tuple[int, ...] = ()         # layers whose outputs are handed out for a draft head
    rolled: bool = False               # dense matrices are packed for rolled_dense.py, with more sums for the reader to add

    def __post_init__(self) -> None:
        where = "StepShape"
        for name, value in (("hidden_size", self.hidden_size), ("expert_hidden", self.expert_hidden)):
            if value < MX_BLOCK_SIZE or value % MX_BLOCK_SIZE:
                raise NotImplementedError(f"{where}: {name} must be a multiple of {MX_BLOCK_SIZE}, one MX block; got {value}. The reference executor takes it.")
        if self.num_experts > MAX_EXPERTS or not 1 <= self.experts_per_token <= min(self.num_experts, MAX_EXPERTS_PER_TOKEN):
            raise NotImplementedError(f"{where}: built for up to {MAX_EXPERTS} experts of which a token has 1 to {MAX_EXPERTS_PER_TOKEN}; got "
                                      f"{self.experts_per_token} of {self.num_experts}.")
        if min(self.num_layers, self.vocab_size, self.max_length) < 1:
            raise ValueError(f"{where}: needs a layer, a token and a position at least; got {self.num_layers}, {self.vocab_size} and {self.max_length}.")
        if any(not 0 <= tap < self.num_layers for tap in self.taps):
            raise ValueError(f"{where}: taps are layers 0..{self.num_layers - 1}; got {list(self.taps)}.")

    @property
    def has_qk_norm(self) -> bool:
        return self.heads.rms_eps is not None

    def dense_layout(self, matrix: str, *, programs: int = H200_SMS) -> DenseLayout:
        """Of a matrix of MATRICES. Errors: NotImplementedError for an input that no layout holds."""
        rows, depth = {"qkv": (self.heads.qkv_width, self.hidden_size), "out": (self.hidden_size, self.heads.num_heads * self.heads.head_dim),
                       "router": (self.num_experts, self.hidden_size), "head": (self.vocab_size, self.hidden_size)}[matrix]
        if self.rolled:
            return choose_rolled_layout(rows, depth, max_splits=_MOST_SPLITS if matrix in ("qkv", "router") else 1)
        splits = self.qkv_splits if matrix == "qkv" else 1
        return choose_dense_layout(rows, depth, min_splits=splits, max_splits=splits, programs=programs)

    @property
    def qkv_splits(self) -> int:
        """Sums that whoever reads queries, keys and values adds: what an H200 wants, as a state's memory does not depend on the GPU."""
        if self.rolled:
            return self.dense_layout("qkv").splits
        return choose_dense_layout(self.heads.qkv_width, self.hidden_size, max_splits=2).splits

    @property
    def router_splits(self) -> int:
        """Sums that whoever chooses experts adds."""
        return self.dense_layout("router").splits if self.rolled else 1

    @property
    def gate_up_layout(self) -> FragmentLayout:
        return choose_layout(2 * self.expert_hidden, self.hidden_size, max_steps=MAX_STEPS)

    @property
    def down_layout(self) -> FragmentLayout:
        return choose_layout(self.hidden_size, self.expert_hidden, max_steps=MAX_STEPS)


@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """One layer in checkpoint order: bf16 matrices as [out, in], experts as MX blocks with gate rows before up rows."""

    attention_norm: Tensor       # [D]
    qkv: Tensor                  # [W, D]
    qk_norm: Tensor | None       # [H + G, K]
    out: Tensor                  # [D, H K]
    experts_norm: Tensor         # [D]
    router: Tensor               # [E, D]
    gate_up_blocks: Tensor       # uint8 [E, 2 F, D / 32, 16]
    gate_up_scales: Tensor       # uint8 [E, 2 F, D / 32]
    down_blocks: Tensor          # uint8 [E, D, F / 32, 16]
    down_scales: Tensor          # uint8 [E, D, F / 32]


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """All weights of a model on one device."""

    shape: StepShape
    embedding_VD: Tensor         # bf16
    attention_norm_LD: Tensor    # bf16
    qkv: DenseWeight             # [L, words]
    qk_norm_LHK: Tensor | None   # bf16 [L, H + G, K]
    out: DenseWeight             # [L, words]
    experts_norm_LD: Tensor      # bf16
    router: DenseWeight          # [L, words]
    experts: ExpertWeights       # of all layers, L E in all
    norm_D: Tensor               # bf16
    head: DenseWeight            # [words]; packed also where it is the embedding

    def layer_experts(self, layer: int) -> ExpertWeights:
        """The experts of one layer: the same memory."""
        mine = slice(layer * self.shape.num_experts, (layer + 1) * self.shape.num_experts)

        def part(weight: FragmentWeight) -> FragmentWeight:
            return replace(weight, codes=weight.codes[mine], scales=weight.scales[mine])

        return replace(self.experts, gate_up=part(self.experts.gate_up), down=part(self.experts.down))

    @property
    def bytes_per_expert(self) -> int:
        return self.experts.bytes_per_expert

    @property
    def dense_bytes(self) -> int:
        """What every step reads whatever its experts are: all dense matrices, pad included."""
        return 4 * sum(w.words.numel() for w in (self.qkv, self.out, self.router, self.head))

    @staticmethod
    def pack(shape: StepShape, layers: Iterable[LayerMatrices], *, embedding_VD: Tensor, norm_D: Tensor, head_VD: Tensor,
             device: torch.device | str = "cpu", programs: int = H200_SMS) -> "StepWeights":
        """From checkpoint order, a layer at a time; `layers` may make them as it goes.

        Errors: ValueError for shapes that are not the model's or for another number of layers, TypeError for another dtype than bf16, and as
            `pack_dense` and `pack_experts`.
        """
        weights = _empty(shape, device=torch.device(device), programs=programs)
        count = 0
        for layer in layers:
            if count < shape.num_layers:
                _pack_layer(weights, layer, index=count)
            count += 1
        if count != shape.num_layers:
            raise ValueError(f"StepWeights: the model has {shape.num_layers} layers; got {count}.")
        for name, given, into in (("embedding", embedding_VD, weights.embedding_VD), ("norm", norm_D, weights.norm_D)):
            copy_checked(name, given, into=into)
        weights.head.words.copy_(pack_dense(head_VD.to(device), layout=weights.head.layout).words)
        return weights

    @staticmethod
    def random(shape: StepShape, *, seed: int, device: torch.device | str, programs: int = H200_SMS) -> "StepWeights":
        """Weights of a size that keeps activations near one, drawn in packed form, so that a large model takes seconds; pads are random too.

        For benchmarks: times of a step depend on the sizes and on which experts are chosen. Routers are drawn like the rest.
        """
        device = torch.device(device)
        weights = _empty(shape, device=device, programs=programs)
        g = torch.Generator(device=device).manual_seed(seed)
        weights.embedding_VD.normal_(generator=g)
        for weight in (weights.qkv, weights.out, weights.router, weights.head):
            for words in weight.words.view(-1, weight.layout.num_bytes // 4):
                words.view(BF16).normal_(std=weight.layout.depth**-0.5, generator=g)
        for expert in (weights.experts.gate_up, weights.experts.down):
            middle = 127 - round(torch.tensor(_CODE_RMS * expert.layout.depth**0.5).log2().item())
            for codes, scales in zip(expert.codes, expert.scales, strict=True):
                codes.random_(-(2**31), 2**31, generator=g)
                bytes_4 = torch.randint(middle - 1, middle + 2, (4, len(scales)), dtype=torch.int32, device=device, generator=g)
                word = bytes_4[0] << 24 | bytes_4[1] << 16 | bytes_4[2] << 8 | bytes_4[3]
                scales.copy_(((word >> 1) & 0x7FFFFFFF) | (word << 31))    # rotated right by one, as a product reads them
        for norm in (weights.attention_norm_LD, weights.experts_norm_LD, weights.norm_D, weights.qk_norm_LHK):
            if norm is not None:
                norm.fill_(1.0)
        return weights


def _empty(shape: StepShape, *, device: torch.device, programs: int) -> StepWeights:
    """Memory for all weights."""
    layers, hidden, heads = shape.num_layers, shape.hidden_size, shape.heads

    def dense(matrix: str, *lead: int) -> DenseWeight:
        layout = shape.dense_layout(matrix, programs=programs)
        return DenseWeight(words=torch.empty(*lead, layout.num_bytes // 4, dtype=torch.int32, device=device), layout=layout)

    def experts(layout: FragmentLayout, **how: Any) -> FragmentWeight:
        number = layers * shape.num_experts
        return FragmentWeight(codes=torch.empty(number, layout.num_units * layout.unit_code_words, dtype=torch.int32, device=device),
                              scales=torch.empty(number, layout.num_units * layout.unit_scale_words, dtype=torch.int32, device=device), layout=layout, **how)

    def plain(*size: int) -> Tensor:
        return torch.empty(*size, dtype=BF16, device=device)

    return StepWeights(
        shape=shape, embedding_VD=plain(shape.vocab_size, hidden), attention_norm_LD=plain(layers, hidden), qkv=dense("qkv", layers),
        qk_norm_LHK=plain(layers, heads.num_heads + heads.num_kv_heads, heads.head_dim) if shape.has_qk_norm else None, out=dense("out", layers),
        experts_norm_LD=plain(layers, hidden), router=dense("router", layers), norm_D=plain(hidden), head=dense("head"),
        experts=ExpertWeights(gate_up=experts(shape.gate_up_layout, pairs="split"), down=experts(shape.down_layout), activation="silu"))


def _pack_layer(weights: StepWeights, layer: LayerMatrices, *, index: int) -> None:
    device = weights.embedding_VD.device
    where = f"layer {index}"
    copy_checked(f"{where}: attention_norm", layer.attention_norm, into=weights.attention_norm_LD[index])
    copy_checked(f"{where}: experts_norm", layer.experts_norm, into=weights.experts_norm_LD[index])
    if (layer.qk_norm is None) != (weights.qk_norm_LHK is None):
        raise ValueError(f"{where}: qk_norm must be given if and only if the heads have rms_eps.")
    if layer.qk_norm is not None and weights.qk_norm_LHK is not None:
        copy_checked(f"{where}: qk_norm", layer.qk_norm, into=weights.qk_norm_LHK[index])
    for matrix, weight in ((layer.qkv, weights.qkv), (layer.out, weights.out), (layer.router, weights.router)):
        weight.words[index].copy_(pack_dense(matrix.to(device), layout=weight.layout).words)
    packed = pack_experts(gate_up_blocks=layer.gate_up_blocks.to(device), gate_up_scales=layer.gate_up_scales.to(device),
                          down_blocks=layer.down_blocks.to(device), down_scales=layer.down_scales.to(device), order="split", activation="silu",
                          max_steps=MAX_STEPS)
    into = weights.layer_experts(index)
    if (packed.gate_up.layout, packed.down.layout, packed.num_experts) != (into.gate_up.layout, into.down.layout, into.num_experts):
        raise ValueError(f"{where}: experts must be {into.num_experts} of {into.hidden_size} x {into.channels}; got {packed.num_experts} of "
                         f"{packed.hidden_size} x {packed.channels}.")
    for a, b in ((packed.gate_up, into.gate_up), (packed.down, into.down)):
        b.codes.copy_(a.codes)
        b.scales.copy_(a.scales)


def copy_checked(name: str, tensor: Tensor, *, into: Tensor, where: str = "StepWeights") -> None:
    """Errors: TypeError for another dtype than bf16, ValueError for another shape than is asked for."""
    if tensor.dtype != BF16:
        raise TypeError(f"{where}: {name} must be bf16; got {tensor.dtype}. Round it first.")
    if tensor.shape != into.shape:
        raise ValueError(f"{where}: {name} must be {list(into.shape)}; got {list(tensor.shape)}.")
    into.copy_(tensor)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A token of a sequence, and how the one after it is picked."""

    token_id: int
    slot: int
    position: int
    temperature: float = 0.0      # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None      # None: all
    seed: int = 0                 # of the noise; 0..2**64 - 1

    def words(self) -> tuple[int, ...]:
        """As int32, a column of StepInputs."""
        return (self.token_id, self.slot, self.position,
                *struct.unpack("<5i", struct.pack("<ffIQ", self.temperature, self.top_p, self.top_k or 0, self.seed)))


_DEAD = (0, -1, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What the columns of a step are: one buffer, so that it takes one copy to a device. A slot below 0 is a dead column.

    words_8C: int32, by row: token id, slot, position, temperature (fp32; 0 is greedy), top_p (fp32), top_k (0: all), the seed's low and high word.
    """

    words_8C: Tensor

    @staticmethod
    def of(columns: Sequence["Column | None"], *, device: torch.device | str = "cpu") -> "StepInputs":
        """None for a dead column."""
        rows = [_DEAD if column is None else column.words() for column in columns]
        return StepInputs(words_8C=torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device))

    @staticmethod
    def dead(num_columns: int, *, device: torch.device | str = "cpu") -> "StepInputs":
        return StepInputs.of([None] * num_columns, device=device)

    def set(self, column: int, **what: Any) -> None:
        """Make a column of this buffer live; `what` as Column."""
        self.words_8C[:, column] = torch.tensor(Column(**what).words(), dtype=torch.int32)

    ids_C = property(lambda self: self.words_8C[0])
    slots_C = property(lambda self: self.words_8C[1])
    positions_C = property(lambda self: self.words_8C[2])
    temperatures_C = property(lambda self: self.words_8C[3].view(torch.float32))
    top_ps_C = property(lambda self: self.words_8C[4].view(torch.float32))
    top_ks_C = property(lambda self: self.words_8C[5])

    def seeds(self) -> list[int]:
        """Of all columns; waits for the device."""
        low, high = (self.words_8C[6:8].long() & 0xFFFFFFFF).tolist()
        return [a | b << 32 for a, b in zip(low, high, strict=True)]


@dataclass(frozen=True, kw_only=True)
class StepState:
    """The cache, the page table and every buffer of a step of `num_columns` columns. A phase writes live columns only."""

    shape: StepShape
    cache: Tensor               # bf16 [L, P, 2, G, 128, K]
    pages_SP: Tensor            # int32: the page of a slot's chunk
    cos_NK: Tensor              # fp32 [N, K / 2]
    sin_NK: Tensor
    residual_CD: Tensor         # fp32
    qkv_SCW: Tensor             # fp32: S sums, see StepShape.qkv_splits
    mixed_CW: Tensor            # bf16 [C, H K]
    normed_CD: Tensor           # bf16: what the experts read
    router_logits_SCE: Tensor   # fp32: S sums, see StepShape.router_splits
    routing: Routing
    inter_MCF: Tensor           # bf16 [tiles, 8, F]
    partial_words_RD2: Tensor   # fp32 [C * experts per token, D, 2]: tagged words (tagged.py)
    attention: AttentionWorkspace
    features_CXD: Tensor        # bf16: outputs of the tapped layers
    logits_CV: Tensor           # fp32
    next_C: Tensor              # int32
    distinct_L: Tensor          # int32: experts that the step read
    barrier: Tensor             # int32 [1]
    fault: Tensor               # int32 [1]
    tags: TagCounter            # of words

    qkv_CW = property(lambda self: self.qkv_SCW.sum(0))                             # their sums added
    router_logits_CE = property(lambda self: self.router_logits_SCE.sum(0))         # likewise
    partials_RD = property(lambda self: self.partial_words_RD2[..., 0])             # the values of words

    @property
    def num_columns(self) -> int:
        return len(self.residual_CD)

    @property
    def num_slots(self) -> int:
        return len(self.pages_SP)

    @staticmethod
    def of(shape: StepShape, *, num_columns: int, num_slots: int, num_pages: int, device: torch.device | str, wide: torch.dtype = torch.float32) -> "StepState":
        """wide: of residual, sums and logits; float64 for the twin's bounds. Errors: as AttentionWorkspace for the number of columns."""
        device = torch.device(device)
        cos, sin = rope_table(head_dim=shape.heads.head_dim, theta=shape.rope_theta, max_length=shape.max_length, device=device)
        return StepState._of(
            shape, num_columns=num_columns, wide=wide, cos_NK=cos, sin_NK=sin,
            cache=torch.zeros(shape.num_layers, *shape.heads.cache_shape(num_pages), dtype=BF16, device=device),
            pages_SP=torch.zeros(num_slots, -(-shape.max_length // CHUNK), dtype=torch.int32, device=device))

    def wider(self, num_columns: int) -> "StepState":
        """Buffers for another number of columns beside the same cache and page table."""
        return StepState._of(self.shape, num_columns=num_columns, wide=self.logits_CV.dtype, cos_NK=self.cos_NK, sin_NK=self.sin_NK, cache=self.cache,
                             pages_SP=self.pages_SP)

    @staticmethod
    def _of(shape: StepShape, *, num_columns: int, wide: torch.dtype, cos_NK: Tensor, sin_NK: Tensor, cache: Tensor, pages_SP: Tensor) -> "StepState":
        device = cache.device
        heads, pairs = shape.heads, num_columns * shape.experts_per_token
        routing = empty_routing(num_columns=num_columns, experts_per_token=shape.experts_per_token, num_experts=shape.num_experts, device=device)

        def empty(*size: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        tags = TagCounter.of((pairs, shape.hidden_size), dtype=wide, device=device)
        attention = AttentionWorkspace.of(heads, num_columns=num_columns, max_length=shape.max_length, device=device)
        tags.words += [attention.mixed_words, attention.stats_words]
        return StepState(
            shape=shape, cache=cache, pages_SP=pages_SP, cos_NK=cos_NK, sin_NK=sin_NK, residual_CD=empty(num_columns, shape.hidden_size),
            qkv_SCW=empty(shape.qkv_splits, num_columns, heads.qkv_width), mixed_CW=empty(num_columns, heads.num_heads * heads.head_dim, dtype=BF16),
            normed_CD=empty(num_columns, shape.hidden_size, dtype=BF16),
            router_logits_SCE=empty(shape.router_splits, num_columns, shape.num_experts), routing=routing,
            inter_MCF=empty(len(routing.experts_M), TILE_COLUMNS, shape.expert_hidden, dtype=BF16), partial_words_RD2=tags.words[0],
            attention=attention, features_CXD=empty(num_columns, len(shape.taps), shape.hidden_size, dtype=BF16),
            logits_CV=empty(num_columns, shape.vocab_size),
            next_C=zeros(num_columns), distinct_L=zeros(shape.num_layers), barrier=zeros(1), fault=zeros(1), tags=tags)
