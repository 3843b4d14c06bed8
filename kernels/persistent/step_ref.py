"""The twin of a persistent step: its phases in plain torch, out of the twins of the products.

Every live column is computed alone, so a phase's operations have one shape whatever else a step holds, and a column's bits depend on its own inputs.
The phases read and write the buffers of a StepState, as the device's do: a test runs a phase of either on the same memory and compares.

Legend: as model.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..moe.product import down_ref, gate_up_ref, weights_of
from ..moe.routing import route_ref
from ..sampling import gumbel_noise_ref
from .attention import Step, attention_ref
from .dense import dense_ref, normalize_ref
from .fragments import DenseWeight, unpack_dense
from .model import BF16, StepInputs, StepState, StepWeights
from .router import choose_ref

LAYER_PHASES = ("qkv", "attention", "out", "router", "experts")
PHASES = ("embed", *LAYER_PHASES, "head", "sample")


class StepRef:
    """Runs steps, or single phases, on a state.

    dtype: of sums; the state's wide buffers should be as wide. keep: keep every weight that was unpacked, in `dtype`: fast, and as large as the model.
    """

    def __init__(self, weights: StepWeights, state: StepState, *, dtype: torch.dtype = torch.float32, keep: bool = True) -> None:
        self.weights, self.state, self.shape, self.dtype, self.keep = weights, state, weights.shape, dtype, keep
        self._kept: dict[tuple[str, int], Tensor] = {}

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> None:
        """One step. Logits, next tokens, features and distinct experts are in the state."""
        self.phase("embed", inputs)
        for layer in range(self.shape.num_layers):
            for name in LAYER_PHASES:
                self.phase(name, inputs, layer=layer)
        self.phase("head", inputs)
        self.phase("sample", inputs)

    @torch.inference_mode()
    def run_steps(self, inputs: StepInputs, num_steps: int, *, stopped: Callable[[], bool] = lambda: False) -> Tensor:
        """Steps of which each column's next token is the next input, at the next position: int32 [steps, C], -1 in dead columns.

        stopped: asked after each step; if it says so that step is the last.
        """
        inputs = StepInputs(words_8C=inputs.words_8C.clone())
        live = inputs.slots_C >= 0
        tokens = []
        for _ in range(num_steps):
            self.step(inputs)
            tokens.append(torch.where(live, self.state.next_C, -1))
            inputs.ids_C[live] = self.state.next_C[live]
            inputs.positions_C[live] += 1
            if stopped():
                break
        return torch.stack(tokens)

    @torch.inference_mode()
    def phase(self, name: str, inputs: StepInputs, *, layer: int = 0) -> None:
        """One phase, of PHASES, on the live columns."""
        columns = (inputs.slots_C >= 0).nonzero().flatten().tolist()
        getattr(self, f"_{name}")(columns, inputs, layer)

    def _embed(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for c in columns:
            self.state.residual_CD[c] = self.weights.embedding_VD[int(inputs.ids_C[c])].to(self.state.residual_CD.dtype)

    def _qkv(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for c in columns:
            self.state.qkv_SCW[:, c] = self._sums("qkv", self.state.residual_CD[c], layer=layer, norm_D=self.weights.attention_norm_LD[layer])

    def _attention(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, w = self.state, self.weights
        for c in columns:
            step = Step(slots_C=inputs.slots_C[c:c + 1], positions_C=inputs.positions_C[c:c + 1], pages_SP=s.pages_SP)
            mixed = attention_ref(s.qkv_SCW[:, c:c + 1].sum(0), step, heads=self.shape.heads, cache=s.cache[layer], cos_LK=s.cos_NK, sin_LK=s.sin_NK,
                                  qk_norm=None if w.qk_norm_LHK is None else w.qk_norm_LHK[layer], dtype=self.dtype)
            s.mixed_CW[c] = mixed[0].to(BF16)

    def _out(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for c in columns:
            self.state.residual_CD[c] += self._dense("out", self.state.mixed_CW[c], layer=layer)

    def _router(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, shape, norm = self.state, self.shape, self.weights.experts_norm_LD[layer]
        ids = torch.full((s.num_columns, shape.experts_per_token), -1, dtype=torch.int32, device=norm.device)
        chosen = torch.zeros(s.num_columns, shape.experts_per_token, device=norm.device)
        for c in columns:
            s.normed_CD[c] = normalize_ref(s.residual_CD[c:c + 1], norm, eps=shape.rms_eps, dtype=self.dtype)[0]
            s.router_logits_SCE[:, c] = self._sums("router", s.residual_CD[c], layer=layer, norm_D=norm)
            ids[c:c + 1], chosen[c:c + 1] = choose_ref(s.router_logits_CE[c:c + 1].float(), inputs.slots_C[c:c + 1],
                                                       experts_per_token=shape.experts_per_token, normalize=shape.normalize_router_weights)
        for into, made in zip(s.routing.tensors(), route_ref(ids, chosen, num_experts=shape.num_experts).tensors(), strict=True):
            into.copy_(made)
        s.distinct_L[layer] = len(set(ids.flatten().tolist()) - {-1})

    def _experts(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        s, shape, routing = self.state, self.shape, self.state.routing
        weights = self.weights.layer_experts(layer)
        up = self._unpacked("gate_up", layer, lambda: weights_of(weights.gate_up, dtype=self.dtype))
        low = self._unpacked("down", layer, lambda: weights_of(weights.down, dtype=self.dtype))
        for c in columns:
            # the places of the column's pairs, by rank, which is also the order of its experts
            places = [(routing.pairs_MC == c * shape.experts_per_token + rank).nonzero()[0].tolist() for rank in range(shape.experts_per_token)]
            ids = torch.stack([routing.experts_M[tile] for tile, _ in places])
            mine = torch.stack([routing.weights_MC[tile, column] for tile, column in places])
            alone = route_ref(ids.unsqueeze(0), mine.unsqueeze(0), num_experts=shape.num_experts)
            inter = gate_up_ref(s.normed_CD[c:c + 1], weights, alone, dtype=self.dtype, dequantized=up)
            for rank, (tile, column) in enumerate(places):
                s.inter_MCF[tile, column] = inter[rank, 0]
            s.residual_CD[c] += down_ref(inter, weights, alone, dtype=self.dtype, dequantized=low)[0].to(s.residual_CD.dtype)
            for x, tap in enumerate(shape.taps):
                if tap == layer:
                    s.features_CXD[c, x] = s.residual_CD[c].to(BF16)

    def _head(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        for c in columns:
            self.state.logits_CV[c] = self._dense("head", self.state.residual_CD[c], norm_D=self.weights.norm_D)

    def _sample(self, columns: list[int], inputs: StepInputs, layer: int) -> None:
        seeds = inputs.seeds()
        for c in columns:
            self.state.next_C[c] = sample_ref(
                self.state.logits_CV[c].float(), temperature=float(inputs.temperatures_C[c]), top_p=float(inputs.top_ps_C[c]),
                top_k=int(inputs.top_ks_C[c]), seed=seeds[c], position=int(inputs.positions_C[c]) + 1)

    def _dense(self, matrix: str, x_D: Tensor, *, layer: int = 0, norm_D: Tensor | None = None) -> Tensor:
        """[R]: one column's product."""
        return self._sums(matrix, x_D, layer=layer, norm_D=norm_D).sum(0)

    def _sums(self, matrix: str, x_D: Tensor, *, layer: int = 0, norm_D: Tensor | None = None) -> Tensor:
        """[S, R]: its sums. Copied first: a product may look at where its input lies."""
        weight: DenseWeight = getattr(self.weights, matrix)
        unpacked = self._unpacked(matrix, layer, lambda: unpack_dense(weight.matrix(layer)).to(self.dtype))
        sums = dense_ref(x_D.clone().unsqueeze(0), weight, norm_D=norm_D, eps=self.shape.rms_eps, dtype=self.dtype, unpacked_RD=unpacked)
        return sums[:, 0]

    def _unpacked(self, name: str, layer: int, make: Callable[[], Tensor]) -> Tensor:
        if not self.keep:
            return make()
        if (name, layer) not in self._kept:
            self._kept[name, layer] = make()
        return self._kept[name, layer]


def step_ref(inputs: StepInputs, *, weights: StepWeights, state: StepState, dtype: torch.dtype = torch.float32) -> None:
    """One step of the twin; what it gives is in `state`. Keeps no weights."""
    StepRef(weights, state, dtype=dtype, keep=False).step(inputs)


def sample_ref(logits_V: Tensor, *, temperature: float, top_p: float, top_k: int, seed: int, position: int) -> int:
    """The token at `position`: the largest logit, or with a temperature the largest of the noisy ones that top_k, then top_p, leave; ties to the lowest id.

    The rule of `dflash/sampling.py`, whose tokens these are. top_k: 0 for all. Numerics: fp32.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    scaled = logits_V / temperature
    sorted_V, ids = scaled.sort(descending=True, stable=True)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    if top_p < 1:
        probabilities = sorted_V.masked_fill(~keep, -torch.inf).softmax(0)
        keep &= probabilities.cumsum(0) - probabilities < top_p
    noisy = torch.full_like(scaled, -torch.inf)
    kept = ids[keep]
    noisy[kept] = (scaled + gumbel_noise_ref(seed=seed, positions=[position], vocab_size=len(scaled), device=scaled.device)[0])[kept]
    return int(noisy.argmax())
