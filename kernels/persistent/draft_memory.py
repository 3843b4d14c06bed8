"""What a kernel of rounds needs beside a StepState and a DraftState: a step's memory with the words of all three sets of columns, and rows for the host."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .draft_code import DRAFT_POINTER_TYPES, WORD_SETS, DraftCode, DraftPointers
from .draft_model import DraftState, DraftWeights
from .model import StepInputs, StepShape, StepState, StepWeights
from .round_inputs import TILE, RoundInputs
from .step_code import DTYPES, SLICES, Pointers, StepCode
from .step_memory import StepMemory

STAMPS_OF_LAYER = 7         # boundaries of a layer of the target
STAMPS_OF_DRAFT_LAYER = 5
STAMPS_OF_ROUND = 16        # and room for the others


@dataclass(frozen=True, kw_only=True)
class RoundMemory:
    """Legend: C columns, S sequences (C / 8), N rounds, W sets of words (draft_code.py)."""

    step: StepMemory
    words_W8C: Tensor        # int32; the first set is the step's
    limits_S: Tensor         # int32
    shares_3CS: Tensor       # fp32, by slices of the vocabulary
    ring_verify_NS: Tensor   # int32, of the host: proposals that a round verified, -1 of dead sequences and without drafts
    draft: DraftCode

    @staticmethod
    def of(shape: StepShape, code: StepCode, draft: DraftCode, *, max_rounds: int, device: torch.device | str) -> "RoundMemory":
        device = torch.device(device)
        step = StepMemory.of(shape, code, max_steps=max_rounds, device=device)
        words = torch.zeros(WORD_SETS, 8, code.C, dtype=torch.int32, device=device)
        words[:, 1] = -1
        stamps = shape.num_layers * STAMPS_OF_LAYER + draft.LAYERS * STAMPS_OF_DRAFT_LAYER + STAMPS_OF_ROUND
        ring = torch.zeros(max_rounds, code.C // TILE, dtype=torch.int32)
        return RoundMemory(
            step=replace(step, words_8C=words[0], stamps=torch.zeros(stamps, dtype=torch.int64, device=device)), words_W8C=words,
            limits_S=torch.zeros(code.C // TILE, dtype=torch.int32, device=device),
            shares_3CS=torch.zeros(3, code.C, SLICES, device=device), ring_verify_NS=ring.pin_memory() if device.type == "cuda" else ring, draft=draft)

    def set_rounds(self, inputs: RoundInputs) -> None:
        """The sequences of the next round: their blocks, and what a step is told of all columns of a tile."""
        words = self.words_W8C.new_empty(self.words_W8C.shape, device=inputs.words_9S.device)
        words[:] = inputs.words_9S[:8].repeat_interleave(TILE, dim=1)
        n = torch.arange(TILE, dtype=torch.int32, device=words.device).repeat(len(inputs.slots_S))
        words[:, 2] += n
        words[1, 1] = torch.where((n < self.draft.N) & (words[1, 2] < self.draft.MAX_LENGTH), words[1, 1], -1)
        words[0, 1] = words[2, 1] = -1       # nothing is verified before it is chosen
        self.words_W8C.copy_(words, non_blocking=True)
        self.limits_S.copy_(inputs.limits_S, non_blocking=True)

    def set_columns(self, inputs: StepInputs) -> None:
        """The columns of a step without drafts."""
        self.step.words_8C.copy_(inputs.words_8C, non_blocking=True)

    def pointers(self, weights: StepWeights, state: StepState) -> Pointers:
        """Of the target; the words are those of all sets."""
        return self.step.pointers(weights, state)._replace(words=self.words_W8C)

    def draft_pointers(self, weights: DraftWeights, state: DraftState) -> DraftPointers:
        """Everything of the draft that the kernel is given an address of."""
        w, s, space = weights, state, state.attention
        found = DraftPointers(
            mask=w.mask_D, attention_norm=w.attention_norm_LD, mlp_norm=w.mlp_norm_LD, hidden_norm=w.hidden_norm_D, norm=w.norm_D, qk_norm=w.qk_norm_LHK,
            cos=s.cos_NK, sin=s.sin_NK, cache=s.cache, residual=s.residual_CD, qkv=s.qkv_SCW, mixed=s.mixed_CW, inter=s.inter_CF, context=s.context_CD,
            keys=s.keys_SCA, plan_rows=space.plan.rows_N8, plan_num_rows=space.plan.num_rows, plan_spans=space.plan.spans_C, span_mixed=space.mixed,
            span_stats=space.stats, span_words=space.mixed_words, stats_words=space.stats_words, arrivals=space.arrivals,
            shares=self.shares_3CS, candidates=s.candidates_C, confidence=s.confidence_C, limits=self.limits_S,
            verify=s.verify_S, committed=s.committed_S, cost=s.cost_8, scale=s.scale_8, ring_verify=self.ring_verify_NS)
        for name, tensor, kind in zip(DraftPointers._fields, found, DRAFT_POINTER_TYPES, strict=True):
            assert tensor.dtype == DTYPES[kind] and tensor.is_contiguous(), f"{name} must be contiguous {kind}; got {tensor.dtype}"
        return found
