"""A draft head inside the resident kernel: its shape, its packed weights, and the memory that rounds read and write beside a step's (StepState).

    draft_embed       residual = the anchor's embedding, or the mask's vector
    of each layer
      draft_qkv       norm, then queries, keys and values of all heads
      draft_attention norm and rope of queries and keys, softmax over the draft's cache and the block
      draft_out       residual += output projection
      draft_gate_up   norm, gate and up, silu(gate) * up
      draft_down      residual += down projection
    draft_head        final norm of the draft, logits by the target's head
    draft_sample      proposals and their probabilities
    choose            how many of them are verified (round_inputs.py); then the target's step, then
    accept            which columns are committed; of these
    fc                context = fc . features
    keys              norm, then keys and values of all layers
    append            norm and rope of keys, to the draft's cache

Rounding points: residual and context are fp32; a norm's output, queries, keys, values, mixed values and activated channels are rounded to bf16, once each.
The cache has the target's pages and page table. draft_ref.py is the twin of every phase.

Legend: L layers of the draft, C columns, D hidden, W qkv width, H query heads, G key/value heads, K head dimension, F intermediate channels, X taps, P pages,
N positions, S sums of a product or, where it stands alone, sequences; A = 2 L G K, keys and values of all layers.
Source: DFlash, arXiv 2602.06036; dflash/model.py for its rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mx.format import MX_BLOCK_SIZE
from .attention import AttentionWorkspace, Heads
from .fragments import DenseLayout, DenseWeight, choose_rolled_layout, pack_dense
from .model import BF16, StepShape, StepState, copy_checked
from .round_inputs import TILE

DRAFT_MATRICES = ("qkv", "out", "gate_up", "down", "fc", "keys")
_SPLIT = {"qkv", "keys"}        # matrices whose sums the reader adds
_MOST_SPLITS = 4
_ROW_HALF = 8                   # a row tile of gate_up: so many gate rows, then the up rows of the same channels


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What rounds must know of a draft head. All its layers are alike; embedding and head are the target's."""

    hidden_size: int
    num_layers: int
    heads: Heads                # of every layer; rms_eps of the norms of queries and keys, which a draft has; window: context at k is seen where q - k < window
    intermediate_size: int
    num_taps: int               # features of a token are so many times hidden_size wide
    mask_token_id: int
    rms_eps: float
    rope_theta: float
    max_length: int             # tokens of context, the target's
    block_size: int = TILE      # the anchor and the masked slots
    causal: bool = False        # a slot sees the slots before it alone; else all of its block

    def __post_init__(self) -> None:
        where = "DraftShape"
        for name, value in (("hidden_size", self.hidden_size), ("intermediate_size", self.intermediate_size)):
            if value < MX_BLOCK_SIZE or value % MX_BLOCK_SIZE:
                raise NotImplementedError(f"{where}: {name} must be a multiple of {MX_BLOCK_SIZE}; got {value}. The draft head in torch takes it.")
        if not 2 <= self.block_size <= TILE:
            raise NotImplementedError(f"{where}: built for blocks of 2 to {TILE} slots, the anchor's included; got {self.block_size}. The draft head in torch "
                                      "takes it.")
        if self.heads.rms_eps is None:
            raise NotImplementedError(f"{where}: built for drafts with norms of queries and keys, as all DFlash drafts have; got heads without rms_eps.")
        if min(self.num_layers, self.num_taps, self.max_length) < 1 or self.mask_token_id < 0:
            raise ValueError(f"{where}: needs a layer, a tap, a position and a mask token; got {self.num_layers}, {self.num_taps}, {self.max_length} and "
                             f"{self.mask_token_id}.")
        if self.heads.window is not None and self.heads.window < self.block_size:
            raise ValueError(f"{where}: a window must be at least the block size ({self.block_size}); got {self.heads.window}.")

    @property
    def keys_width(self) -> int:
        """A: rows of `keys`."""
        return self.num_layers * 2 * self.heads.num_kv_heads * self.heads.head_dim

    def dense_layout(self, matrix: str) -> DenseLayout:
        """Of a matrix of DRAFT_MATRICES, for rolled_dense.py."""
        heads, hidden = self.heads, self.hidden_size
        rows, depth = {"qkv": (heads.qkv_width, hidden), "out": (hidden, heads.num_heads * heads.head_dim), "gate_up": (2 * self.intermediate_size, hidden),
                       "down": (hidden, self.intermediate_size), "fc": (hidden, self.num_taps * hidden), "keys": (self.keys_width, hidden)}[matrix]
        return choose_rolled_layout(rows, depth, max_splits=_MOST_SPLITS if matrix in _SPLIT else 1)

    def require_target(self, target: StepShape) -> None:
        """Errors: ValueError for a target whose width, taps, context or vocabulary are not the draft's."""
        for name, mine, its in (("hidden_size", self.hidden_size, target.hidden_size), ("taps", self.num_taps, len(target.taps)),
                                ("max_length", self.max_length, target.max_length)):
            if mine != its:
                raise ValueError(f"DraftShape: {name} must be the target's, {its}; got {mine}.")
        if self.mask_token_id >= target.vocab_size:
            raise ValueError(f"DraftShape: mask_token_id must be a token of the target, 0..{target.vocab_size - 1}; got {self.mask_token_id}.")


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """One layer in checkpoint order, bf16, matrices as [out, in]."""

    attention_norm: Tensor       # [D]
    qkv: Tensor                  # [W, D]
    qk_norm: Tensor              # [H + G, K]
    out: Tensor                  # [D, H K]
    mlp_norm: Tensor             # [D]
    gate: Tensor                 # [F, D]
    up: Tensor                   # [F, D]
    down: Tensor                 # [D, F]


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """All weights of a draft head on one device."""

    shape: DraftShape
    attention_norm_LD: Tensor    # bf16
    qkv: DenseWeight             # [L, words]
    qk_norm_LHK: Tensor          # bf16 [L, H + G, K]
    out: DenseWeight             # [L, words]
    mlp_norm_LD: Tensor          # bf16
    gate_up: DenseWeight         # [L, words]; rows as `interleave`
    down: DenseWeight            # [L, words]
    fc: DenseWeight              # [words]
    hidden_norm_D: Tensor        # bf16
    keys: DenseWeight            # [words]: rows [A] by layer, keys of all heads, then values
    norm_D: Tensor               # bf16
    mask_D: Tensor               # bf16: what slots 1.. hold

    @staticmethod
    def pack(shape: DraftShape, layers: Iterable[DraftLayer], *, fc: Tensor, hidden_norm_D: Tensor, norm_D: Tensor, mask_D: Tensor,
             device: torch.device | str = "cpu") -> "DraftWeights":
        """From checkpoint order. Shapes: fc [D, X D].

        Errors: ValueError for shapes that are not the draft's or for another number of layers, TypeError for another dtype than bf16.
        """
        weights, taken, keys = _empty(shape, device=torch.device(device)), 0, []
        for i, layer in enumerate(layers):
            taken += 1
            if taken > shape.num_layers:
                break
            for name, tensor, into in (("attention_norm", layer.attention_norm, weights.attention_norm_LD), ("qk_norm", layer.qk_norm, weights.qk_norm_LHK),
                                       ("mlp_norm", layer.mlp_norm, weights.mlp_norm_LD)):
                copy_checked(f"layer {i}: {name}", tensor, into=into[i], where="DraftWeights")
            for matrix, weight in ((layer.qkv, weights.qkv), (layer.out, weights.out), (interleave(layer.gate, layer.up), weights.gate_up),
                                   (layer.down, weights.down)):
                _pack(matrix, into=weight.matrix(i))
            keys.append(layer.qkv[shape.heads.num_heads * shape.heads.head_dim:])
        if taken != shape.num_layers:
            raise ValueError(f"DraftWeights: the draft has {shape.num_layers} layers; got {'more' if taken > shape.num_layers else taken}.")
        _pack(fc, into=weights.fc)
        _pack(torch.cat(keys), into=weights.keys)
        for name, tensor, into in (("hidden_norm", hidden_norm_D, weights.hidden_norm_D), ("norm", norm_D, weights.norm_D), ("mask", mask_D, weights.mask_D)):
            copy_checked(name, tensor, into=into, where="DraftWeights")
        return weights

    @staticmethod
    def random(shape: DraftShape, *, seed: int, device: torch.device | str) -> "DraftWeights":
        """Weights of a size that keeps activations near one, drawn in packed form, for benchmarks; `keys` is drawn for itself."""
        device = torch.device(device)
        weights, g = _empty(shape, device=device), torch.Generator(device=device).manual_seed(seed)
        for name in DRAFT_MATRICES:
            weight: DenseWeight = getattr(weights, name)
            weight.words.view(BF16).normal_(std=weight.layout.depth**-0.5, generator=g)
        weights.mask_D.normal_(generator=g)
        for norm in (weights.attention_norm_LD, weights.qk_norm_LHK, weights.mlp_norm_LD, weights.hidden_norm_D, weights.norm_D):
            norm.fill_(1.0)
        return weights


def interleave(gate_FD: Tensor, up_FD: Tensor) -> Tensor:
    """[2 F, D]: 8 rows of gate and the 8 of up for the same channels, in turn, so that a row tile of a product holds both of a channel."""
    return torch.stack((gate_FD.unflatten(0, (-1, _ROW_HALF)), up_FD.unflatten(0, (-1, _ROW_HALF))), dim=1).flatten(0, 2)


def split_gate_up(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up [..., F] of a product's [..., 2 F], whose rows are as `interleave`."""
    gate, up = x.unflatten(-1, (-1, 2, _ROW_HALF)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def _empty(shape: DraftShape, *, device: torch.device) -> DraftWeights:
    """Memory for all weights."""
    layers, hidden, heads = shape.num_layers, shape.hidden_size, shape.heads

    def dense(matrix: str, *lead: int) -> DenseWeight:
        layout = shape.dense_layout(matrix)
        return DenseWeight(words=torch.empty(*lead, layout.num_bytes // 4, dtype=torch.int32, device=device), layout=layout)

    def plain(*size: int) -> Tensor:
        return torch.empty(*size, dtype=BF16, device=device)

    return DraftWeights(
        shape=shape, attention_norm_LD=plain(layers, hidden), qkv=dense("qkv", layers), out=dense("out", layers), mlp_norm_LD=plain(layers, hidden),
        qk_norm_LHK=plain(layers, heads.num_heads + heads.num_kv_heads, heads.head_dim), gate_up=dense("gate_up", layers), down=dense("down", layers),
        fc=dense("fc"), hidden_norm_D=plain(hidden), keys=dense("keys"), norm_D=plain(hidden), mask_D=plain(hidden))


def _pack(matrix: Tensor, *, into: DenseWeight) -> None:
    into.words.copy_(pack_dense(matrix.to(into.words.device), layout=into.layout).words)


@dataclass(frozen=True, kw_only=True)
class DraftState:
    """The draft's cache and every buffer of a round of `num_columns` columns beside the step's own. Slot n of a sequence is column n of its tile.

    Logits, page table and features are the step's. A phase writes live columns only; of a dead sequence `verify_S` is -1 and `committed_S` 0.
    """

    shape: DraftShape
    cache: Tensor               # bf16 [L, P, 2, G, 128, K]
    cos_NK: Tensor              # fp32 [N, K / 2]
    sin_NK: Tensor
    residual_CD: Tensor         # fp32
    qkv_SCW: Tensor             # fp32: S sums, of the layout
    mixed_CW: Tensor            # bf16 [C, H K]
    inter_CF: Tensor            # bf16
    context_CD: Tensor          # fp32: of committed columns
    keys_SCA: Tensor            # fp32: S sums, of the layout
    attention: AttentionWorkspace
    candidates_C: Tensor        # int32: proposals; slot 0 has the anchor
    confidence_C: Tensor        # fp32: their probabilities, slot 0 1
    verify_S: Tensor            # int32: proposals that are verified
    committed_S: Tensor         # int32: columns that are committed, 1..verify + 1
    cost_8: Tensor              # fp32, of a round that verifies 0..7; the host's
    scale_8: Tensor             # fp32: of a proposal's probability; the first is unused

    @property
    def num_columns(self) -> int:
        return len(self.residual_CD)

    @staticmethod
    def of(shape: DraftShape, step: StepState, *, wide: torch.dtype = torch.float32, narrow: torch.dtype = BF16) -> "DraftState":
        """Beside a step's state, with as many columns and pages. Costs fall, so that the limit is verified until the host knows better; scales are 1.

        wide, narrow: of buffers in fp32 and in bf16; float64 for a twin that does not round. Errors: as `DraftShape.require_target`.
        """
        shape.require_target(step.shape)
        device = step.cache.device
        cos, sin = rotations(head_dim=shape.heads.head_dim, theta=shape.rope_theta, max_length=shape.max_length, dtype=wide, device=device)
        costs = torch.arange(TILE, 0, -1, dtype=torch.float32, device=device)
        cache = torch.zeros(shape.num_layers, *shape.heads.cache_shape(step.cache.shape[1]), dtype=narrow, device=device)
        return _buffers(shape, num_columns=step.num_columns, wide=wide, cache=cache, cos_NK=cos, sin_NK=sin, cost_8=costs,
                        scale_8=torch.ones(TILE, device=device))

    def wider(self, num_columns: int) -> "DraftState":
        """Buffers for another number of columns beside the same cache, costs and scales."""
        return _buffers(self.shape, num_columns=num_columns, wide=self.residual_CD.dtype, cache=self.cache, cos_NK=self.cos_NK, sin_NK=self.sin_NK,
                        cost_8=self.cost_8, scale_8=self.scale_8)


def _buffers(shape: DraftShape, *, num_columns: int, wide: torch.dtype, cache: Tensor, cos_NK: Tensor, sin_NK: Tensor, cost_8: Tensor,
             scale_8: Tensor) -> DraftState:
    device, narrow, heads = cache.device, cache.dtype, shape.heads

    def empty(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    return DraftState(
        shape=shape, cache=cache, cos_NK=cos_NK, sin_NK=sin_NK, residual_CD=empty(num_columns, shape.hidden_size),
        qkv_SCW=empty(shape.dense_layout("qkv").splits, num_columns, heads.qkv_width),
        mixed_CW=empty(num_columns, heads.num_heads * heads.head_dim, dtype=narrow), inter_CF=empty(num_columns, shape.intermediate_size, dtype=narrow),
        context_CD=empty(num_columns, shape.hidden_size), keys_SCA=empty(shape.dense_layout("keys").splits, num_columns, shape.keys_width),
        attention=AttentionWorkspace.of(heads, num_columns=num_columns, max_length=shape.max_length, device=device),
        candidates_C=zeros(num_columns), confidence_C=zeros(num_columns, dtype=torch.float32), verify_S=zeros(num_columns // TILE),
        committed_S=zeros(num_columns // TILE), cost_8=cost_8, scale_8=scale_8)


def rotations(*, head_dim: int, theta: float, max_length: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(cos, sin) [N, K / 2]; angles in fp64, as a draft is trained with, where a target's are fp32 (`rope_table`)."""
    frequencies = theta ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    angles = torch.arange(max_length, dtype=torch.float64).unsqueeze(1) * frequencies
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
