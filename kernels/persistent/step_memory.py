"""What the step kernel needs besides a StepState: routing lists, the best of each slice of the vocabulary, and the words that host and device share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .model import StepShape, StepState, StepWeights
from .step_code import LAYER_STAMPS, SLICES, Pointers, StepCode, check_pointers


def taps_of(shape: StepShape) -> Tensor:
    """int32 [L]: the place of each layer's output among the features, or -1."""
    taps = torch.full((shape.num_layers,), -1, dtype=torch.int32)
    for place, layer in enumerate(shape.taps):
        taps[layer] = place
    return taps


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Legend: R routing lists, one a consumer; M column tiles; C columns; N steps."""

    words_8C: Tensor         # int32: the step's StepInputs
    list_tiles_R: Tensor     # int32
    list_experts_RM: Tensor
    list_pairs_RM8: Tensor
    list_weights_RM8: Tensor  # fp32
    list_counts_RC: Tensor
    best_CS: Tensor          # fp32
    best_ids_CS: Tensor
    squares_CP: Tensor       # fp32: parts of the sums of squares of the residual
    taps_L: Tensor
    stop: Tensor             # int32 [1], of the device
    stamps: Tensor           # int64
    ring_tokens_NC: Tensor   # int32, of the host
    ring_count: Tensor       # int32 [1], of the host
    host_stop: Tensor        # int32 [1], of the host

    @staticmethod
    def of(shape: StepShape, code: StepCode, *, max_steps: int, device: torch.device | str) -> "StepMemory":
        """The host's words are in pinned memory where the device is a GPU."""
        device, lists = torch.device(device), code.PARTITIONS * code.PROGRAMS

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        def shared(*size: int) -> Tensor:
            words = torch.zeros(*size, dtype=torch.int32)
            return words.pin_memory() if device.type == "cuda" else words

        words = zeros(8, code.C)
        words[1] = -1
        return StepMemory(
            words_8C=words, list_tiles_R=zeros(lists), list_experts_RM=zeros(lists, code.TILES), list_pairs_RM8=zeros(lists, code.TILES, 8),
            list_weights_RM8=zeros(lists, code.TILES, 8, dtype=torch.float32), list_counts_RC=zeros(lists, code.C),
            best_CS=zeros(code.C, SLICES, dtype=torch.float32), best_ids_CS=zeros(code.C, SLICES),
            squares_CP=zeros(code.C, code.SQUARES, dtype=torch.float32), taps_L=taps_of(shape).to(device), stop=zeros(1),
            stamps=zeros(shape.num_layers * LAYER_STAMPS + 4, dtype=torch.int64), ring_tokens_NC=shared(max_steps, code.C), ring_count=shared(1),
            host_stop=shared(1))

    def pointers(self, weights: StepWeights, state: StepState) -> Pointers:
        """Everything that the kernel is given an address of."""
        w, s, space = weights, state, state.attention
        found = Pointers(
            words=self.words_8C, embedding=w.embedding_VD, attention_norm=w.attention_norm_LD, experts_norm=w.experts_norm_LD, norm=w.norm_D,
            qk_norm=w.attention_norm_LD if w.qk_norm_LHK is None else w.qk_norm_LHK, cos=s.cos_NK, sin=s.sin_NK, cache=s.cache, pages=s.pages_SP,
            residual=s.residual_CD, qkv=s.qkv_SCW, squares=self.squares_CP, mixed=s.mixed_CW, mixed_pairs=s.mixed_CW.view(torch.int32), normed=s.normed_CD,
            normed_pairs=s.normed_CD.view(torch.int32), router_logits=s.router_logits_SCE, list_tiles=self.list_tiles_R, list_experts=self.list_experts_RM,
            list_pairs=self.list_pairs_RM8, list_weights=self.list_weights_RM8, list_counts=self.list_counts_RC, inter=s.inter_MCF,
            inter_pairs=s.inter_MCF.view(torch.int32), partials=s.partial_words_RD2, plan_rows=space.plan.rows_N8, plan_num_rows=space.plan.num_rows,
            plan_spans=space.plan.spans_C, span_mixed=space.mixed, span_stats=space.stats,
            span_words=space.mixed_words, stats_words=space.stats_words, arrivals=space.arrivals, taps=self.taps_L, features=s.features_CXD,
            logits=s.logits_CV, best=self.best_CS, best_ids=self.best_ids_CS, next=s.next_C, distinct=s.distinct_L, barrier=s.barrier, fault=s.fault,
            stop=self.stop, ring_tokens=self.ring_tokens_NC, ring_count=self.ring_count, host_stop=self.host_stop, stamps=self.stamps)
        check_pointers(found)
        return found
