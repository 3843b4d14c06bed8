"""The twin of rounds: a draft's phases in plain torch around the target's (step_ref.py), on the same buffers as the device's.

The slots of a block are computed together, each sequence alone; context is taken a column at a time, so its bits do not depend on when a token came or
beside which others. Rounding is what the state's buffers have: with buffers in float64 nothing is rounded.

Legend: as draft_model.py.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Step, attention_ref
from .draft_model import DraftState, DraftWeights, split_gate_up
from .fragments import DenseWeight, unpack_dense
from .model import StepInputs, StepState, StepWeights
from .plan import CHUNK
from .round_inputs import TILE, RoundInputs, limit_at, verify_length_ref
from .step_ref import StepRef, sample_ref

DRAFT_LAYER_PHASES = ("draft_qkv", "draft_attention", "draft_out", "draft_gate_up", "draft_down")
DRAFT_PHASES = ("draft_embed", *DRAFT_LAYER_PHASES, "draft_head", "draft_sample")      # on the block's columns
OBSERVE_PHASES = ("fc", "keys", "append")                                               # on columns that are committed


class RoundRef(StepRef):
    """Runs rounds on a state of the target and one of the draft. Its steps leave the draft's context complete: every live column is observed.

    Single phases, of the target's, DRAFT_PHASES and OBSERVE_PHASES, run by `phase` on the live columns of their inputs. dtype and keep: as StepRef.
    """

    def __init__(self, weights: StepWeights, state: StepState, draft_weights: DraftWeights, draft_state: DraftState, *, dtype: torch.dtype = torch.float32,
                 keep: bool = True) -> None:
        super().__init__(weights, state, dtype=dtype, keep=keep)
        draft_weights.shape.require_target(weights.shape)
        assert draft_state.shape == draft_weights.shape and draft_state.num_columns == state.num_columns, "states of one draft and one width"
        self.draft_weights, self.draft_state, self.draft_shape = draft_weights, draft_state, draft_weights.shape

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> None:
        """One step without drafting."""
        super().step(inputs)
        self.observe(inputs)

    @torch.inference_mode()
    def run_rounds(self, inputs: RoundInputs, num_rounds: int, *, stopped: Callable[[], bool] = lambda: False) -> tuple[Tensor, Tensor]:
        """(tokens, verified): of every round the committed tokens, int32 [R, C], of sequence s from column 8 s on, and the proposals verified, int32 [R, S].

        Both -1 where there are none. The inputs are left as they are. stopped: asked after each round; if it says so that round is the last.
        """
        inputs = inputs.clone()
        tokens, verified = [], []
        for _ in range(num_rounds):
            tokens.append(self.round(inputs))
            verified.append(self.draft_state.verify_S.clone())
            if stopped():
                break
        return torch.stack(tokens), torch.stack(verified)

    @torch.inference_mode()
    def round(self, inputs: RoundInputs) -> Tensor:
        """One round, which moves the inputs on to the next anchors. Returns the committed tokens, int32 [C], -1 elsewhere."""
        self.draft(inputs)
        columns = self.choose(inputs)
        super().step(columns)
        tokens = self.accept(inputs)
        self.observe(self.committed(columns))
        return tokens

    @torch.inference_mode()
    def draft(self, inputs: RoundInputs) -> None:
        """Proposals and their probabilities, into `candidates_C` and `confidence_C`."""
        block = self.block(inputs)
        self.phase("draft_embed", block)
        for layer in range(self.draft_shape.num_layers):
            for name in DRAFT_LAYER_PHASES:
                self.phase(name, block, layer=layer)
        self.phase("draft_head", block)
        self.phase("draft_sample", block)

    @torch.inference_mode()
    def choose(self, inputs: RoundInputs) -> StepInputs:
        """How many proposals are verified, into `verify_S`; the columns of the step that does it."""
        s, shape = self.draft_state, self.draft_shape
        s.verify_S.fill_(-1)
        for i in inputs.live(max_length=shape.max_length):
            limit = limit_at(int(inputs.positions_S[i]), limit=int(inputs.limits_S[i]), block_size=shape.block_size, max_length=shape.max_length)
            s.verify_S[i] = verify_length_ref(s.confidence_C[i * TILE + 1:(i + 1) * TILE], cost_8=s.cost_8, scale_8=s.scale_8, limit=limit)
        return inputs.columns(s.candidates_C, s.verify_S + 1, max_length=shape.max_length)

    @torch.inference_mode()
    def accept(self, inputs: RoundInputs) -> Tensor:
        """Compare what the step picked with the proposals: `committed_S`, the next anchors into the inputs. Returns committed tokens, -1 elsewhere."""
        s, picked = self.draft_state, self.state.next_C
        tokens = torch.full_like(picked, -1)
        s.committed_S.zero_()
        for i in inputs.live(max_length=self.draft_shape.max_length):
            first, accepted = i * TILE, 0
            while accepted < int(s.verify_S[i]) and s.candidates_C[first + accepted + 1] == picked[first + accepted]:
                accepted += 1
            s.committed_S[i] = accepted + 1
            tokens[first:first + accepted + 1] = picked[first:first + accepted + 1]
            inputs.ids_S[i] = picked[first + accepted]
            inputs.positions_S[i] += accepted + 1
        return tokens

    @torch.inference_mode()
    def observe(self, inputs: StepInputs) -> None:
        """Keys and values of the live columns' features, into the draft's cache."""
        for name in OBSERVE_PHASES:
            self.phase(name, inputs)

    def block(self, inputs: RoundInputs) -> StepInputs:
        """The columns of the draft: the slots of each block that lie inside the context."""
        counts = torch.full_like(self.draft_state.verify_S, self.draft_shape.block_size)
        return inputs.columns(inputs.ids_S.repeat_interleave(TILE), counts, max_length=self.draft_shape.max_length)

    def committed(self, columns: StepInputs) -> StepInputs:
        """Of a round's columns those that `accept` has committed."""
        kept = StepInputs(words_8C=columns.words_8C.clone())
        place = torch.arange(self.state.num_columns, device=kept.words_8C.device) % TILE
        kept.slots_C[place >= self.draft_state.committed_S.repeat_interleave(TILE)] = -1
        return kept

    # --- phases ---

    def _draft_embed(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for c in columns:
            row = self.draft_weights.mask_D if c % TILE else self.weights.embedding_VD[int(inputs.ids_C[c])]
            self.draft_state.residual_CD[c] = row.to(self.draft_state.residual_CD.dtype)

    def _draft_qkv(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for run in _runs(columns):
            normed = self._normed(self.draft_state.residual_CD[run], self.draft_weights.attention_norm_LD[layer])
            self.draft_state.qkv_SCW[:, run] = self._draft_sums("qkv", normed, layer=layer)

    def _draft_attention(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, shape = self.draft_state, self.draft_shape
        for run in _runs(columns):
            step = Step(slots_C=inputs.slots_C[run], positions_C=inputs.positions_C[run], pages_SP=self.state.pages_SP)
            sees = None if shape.causal else step.positions_C.max().expand(len(run))
            s.mixed_CW[run] = attention_ref(s.qkv_SCW[:, run].sum(0), step, heads=shape.heads, cache=s.cache[layer], cos_LK=s.cos_NK, sin_LK=s.sin_NK,
                                            qk_norm=self.draft_weights.qk_norm_LHK[layer], rounded=s.cache.dtype, dtype=self.dtype, sees_C=sees
                                            ).to(s.mixed_CW.dtype)

    def _draft_out(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for run in _runs(columns):
            self.draft_state.residual_CD[run] += self._draft_sums("out", self.draft_state.mixed_CW[run], layer=layer)[0]

    def _draft_gate_up(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s = self.draft_state
        for run in _runs(columns):
            gate, up = split_gate_up(self._draft_sums("gate_up", self._normed(s.residual_CD[run], self.draft_weights.mlp_norm_LD[layer]), layer=layer)[0])
            s.inter_CF[run] = (F.silu(gate) * up).to(s.inter_CF.dtype)

    def _draft_down(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for run in _runs(columns):
            self.draft_state.residual_CD[run] += self._draft_sums("down", self.draft_state.inter_CF[run], layer=layer)[0]

    def _draft_head(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for run in _runs(columns):
            normed = self._normed(self.draft_state.residual_CD[run], self.draft_weights.norm_D)
            self.state.logits_CV[run] = self._times(normed, self.weights.head, "head")[0].to(self.state.logits_CV.dtype)

    def _draft_sample(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, seeds = self.draft_state, inputs.seeds()
        for c in columns:
            if c % TILE == 0:
                s.candidates_C[c], s.confidence_C[c] = inputs.ids_C[c], 1.0
                continue
            logits, temperature = self.state.logits_CV[c].float(), float(inputs.temperatures_C[c])
            token = sample_ref(logits, temperature=temperature, top_p=1.0, top_k=0, seed=seeds[c], position=int(inputs.positions_C[c]))
            s.candidates_C[c], s.confidence_C[c] = token, (logits / (temperature or 1.0)).softmax(0)[token]

    def _fc(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s = self.draft_state
        for c in columns:
            s.context_CD[c] = self._draft_sums("fc", self.state.features_CXD[c:c + 1].flatten(1).to(s.cache.dtype))[0, 0]

    def _keys(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s = self.draft_state
        for c in columns:
            s.keys_SCA[:, c] = self._draft_sums("keys", self._normed(s.context_CD[c:c + 1], self.draft_weights.hidden_norm_D))[:, 0]

    def _append(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, shape, heads = self.draft_state, self.draft_shape, self.draft_shape.heads
        assert heads.rms_eps is not None, "a draft has norms of keys"
        for c in columns:
            position = int(inputs.positions_C[c])
            keys_LGK, values_LGK = s.keys_SCA[:, c].sum(0).to(self.dtype).view(shape.num_layers, 2, heads.num_kv_heads, heads.head_dim).unbind(1)
            norm_LGK = self.draft_weights.qk_norm_LHK[:, heads.num_heads:].to(self.dtype)
            a, b = (keys_LGK * torch.rsqrt(keys_LGK.square().mean(-1, keepdim=True) + heads.rms_eps) * norm_LGK).chunk(2, dim=-1)
            cos, sin = s.cos_NK[position].to(self.dtype), s.sin_NK[position].to(self.dtype)
            place = s.cache[:, int(self.state.pages_SP[int(inputs.slots_C[c]), position // CHUNK]), :, :, position % CHUNK]     # L 2 G K
            place[:, 0], place[:, 1] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(place.dtype), values_LGK.to(place.dtype)

    def _normed(self, x_CD: Tensor, norm_D: Tensor) -> Tensor:
        wide = x_CD.to(self.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.draft_shape.rms_eps) * norm_D.to(self.dtype)).to(self.draft_state.cache.dtype)

    def _draft_sums(self, matrix: str, a_CD: Tensor, *, layer: int = 0) -> Tensor:
        return self._times(a_CD, getattr(self.draft_weights, matrix), f"draft_{matrix}", layer=layer)

    def _times(self, a_CD: Tensor, weight: DenseWeight, name: str, *, layer: int = 0) -> Tensor:
        """[S, C, R]: the layout's sums."""
        w_RD, layout = self._unpacked(name, layer, lambda: unpack_dense(weight.matrix(layer)).to(self.dtype)), weight.layout
        width = layout.padded_depth // layout.splits
        return torch.stack([a_CD[:, i:i + width].to(self.dtype) @ w_RD[:, i:i + width].mT for i in range(0, layout.padded_depth, width)])


def _runs(columns: list[int]) -> list[list[int]]:
    """Columns by tile: a sequence's."""
    return [list(run) for _, run in groupby(columns, key=lambda c: c // TILE)]
