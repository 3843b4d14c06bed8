"""A kernel of rounds over weights and states on the CPU (step_on_cpu.py), from poisoned memory, beside its twin."""

from dataclasses import replace
from typing import Any

import torch
from round_checks import RoundCase
from step_on_cpu import Kernel
from torch import Tensor

from kilotok.kernels.persistent import Heads, StepInputs, StepShape, StepState, StepWeights
from kilotok.kernels.persistent.draft_code import ROUND_PHASES, round_code
from kilotok.kernels.persistent.draft_memory import RoundMemory
from kilotok.kernels.persistent.draft_model import DraftShape, DraftState, DraftWeights
from kilotok.kernels.persistent.draft_ref import RoundRef
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.kernels.persistent.round_inputs import TILE, RoundInputs
from kilotok.kernels.persistent.rounds import RoundKernel
from kilotok.kernels.persistent.step_code import layouts_of
from kilotok.kernels.persistent.tagged import LAUNCH_TAG
from kilotok.kernels.sampling import gumbel_noise_ref

TARGET = StepShape(hidden_size=96, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6), num_experts=8, experts_per_token=2,
                   expert_hidden=64, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e4, vocab_size=100, max_length=300, taps=(0, 1), rolled=True)
DRAFT = DraftShape(hidden_size=96, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-5), intermediate_size=160, num_taps=2,
                   mask_token_id=7, rms_eps=1e-5, rope_theta=1e5, max_length=300)
MODELS: dict[str, tuple[StepShape, DraftShape]] = {
    "plain": (TARGET, DRAFT),
    "one layer": (replace(TARGET, num_layers=1, taps=(0,)), replace(DRAFT, num_layers=1, num_taps=1)),
    "window, short block, other heads": (TARGET, replace(DRAFT, heads=Heads(num_heads=3, num_kv_heads=1, head_dim=64, rms_eps=1e-6, window=130), block_size=5)),
    "causal, sums of qkv and keys": (replace(TARGET, hidden_size=1024, num_layers=1, taps=(0,)),
                                     replace(DRAFT, hidden_size=1024, num_layers=1, num_taps=1, causal=True)),
}
_GIVEN = {"cos_NK", "sin_NK", "cost_8", "scale_8"}
SLOTS = 4


def _noise(token: Tensor, position: Tensor, seed_low: Tensor, seed_high: Tensor) -> Tensor:
    """`_gumbel` of sample_device.py, whose 32-bit arithmetic the stand-ins do not have."""
    seed = (int(seed_low) & 0xFFFFFFFF) | (int(seed_high) & 0xFFFFFFFF) << 32
    return gumbel_noise_ref(seed=seed, positions=[int(position)], vocab_size=1024)[0][token.long().clamp(max=1023)]


class RoundsOnCpu:
    """The kernel's memory is NaN but for contexts (`read`); every proposal is expected to be accepted, so that limits decide how many are verified."""

    def __init__(self, name: str = "plain", *, num_columns: int = 8, programs: int = 3, seed: int = 1, **form: Any) -> None:
        target, draft = MODELS[name]
        self.weights = StepWeights.random(target, seed=seed, device="cpu", programs=programs)
        self.draft_weights = DraftWeights.random(draft, seed=seed, device="cpu")
        self.state, self.twin_state = (_state_of(target, num_columns) for _ in range(2))
        self.draft_state, self.draft_twin_state = (DraftState.of(draft, state) for state in (self.state, self.twin_state))
        for states in ((self.state, self.draft_state), (self.twin_state, self.draft_twin_state)):
            for state in states:
                for field, tensor in vars(state).items():
                    if isinstance(tensor, Tensor) and tensor.is_floating_point() and field not in _GIVEN:
                        tensor.fill_(torch.nan)
            states[1].scale_8.fill_(1e30)
        self.twin = RoundRef(self.weights, self.twin_state, self.draft_weights, self.draft_twin_state)
        self.code, self.draft_code = round_code(target, draft, layouts=layouts_of(self.weights), num_columns=num_columns, programs=programs, **form)
        self.rounds = RoundMemory.of(target, self.code, self.draft_code, max_rounds=16, device="cpu")
        self.memory = self.rounds.step
        self.pointers = self.rounds.pointers(self.weights, self.state)
        self.draft_pointers = self.rounds.draft_pointers(self.draft_weights, self.draft_state)
        noise = {"_gumbel": _noise}
        self.kernel = Kernel(programs, consumers=self.code.PARTITIONS, cheap={"persistent.sample_device": noise, "persistent.draft_choose": noise})

    def read(self, slot: int, length: int) -> None:
        """A context of random keys and values, of target and draft alike, in the twin's memory too."""
        g = torch.Generator().manual_seed(slot)
        for mine, twins in ((self.state, self.twin_state), (self.draft_state, self.draft_twin_state)):
            for position in range(length):
                page = int(self.state.pages_SP[slot, position // CHUNK])
                place = mine.cache[:, page, :, :, position % CHUNK]
                place.copy_(torch.randn(place.shape, generator=g))
                twins.cache[:, page, :, :, position % CHUNK] = place

    def launch(self, *, rounds: int = 1, phase: str = "rounds", layer: int = 0, drafts: bool = True, assumed: int = -1) -> None:
        """The resident kernel of rounds, or one phase of either."""
        w, d, code = self.weights, self.draft_weights, self.code
        experts = ((w.experts.gate_up, code.up), (w.experts.down, code.down))
        descriptors = (*(m.words.view(-1, 256) for m in (w.qkv, w.out, w.router, w.head)),
                       *(t for e, c in experts for t in (e.codes.view(-1, 256), e.scales.view(-1, c.SCALE_BOX))))
        table_width, pages, taps = self.state.pages_SP.shape[1], self.state.cache.shape[1], len(w.shape.taps)
        tag = self.state.tags.take(rounds * w.shape.num_layers) if phase == "rounds" else LAUNCH_TAG
        if phase == "rounds" or phase in ROUND_PHASES:
            descriptors = (*descriptors, *(m.words.view(-1, 256) for m in (d.qkv, d.out, d.gate_up, d.down, d.fc, d.keys)))
            self.kernel.launch(descriptors, self.pointers, w.shape.num_layers, d.shape.num_layers, rounds, table_width, pages, 1000, layer, taps, int(drafts),
                               assumed, tag, code=code, draft=(self.draft_pointers, self.draft_code.of_phase(phase)))
        else:
            self.kernel.launch(descriptors, self.pointers, w.shape.num_layers, 1, table_width, pages, 1000, layer, taps, tag,
                               code=code.of_phase(phase))

    # --- as a RoundKernel ---

    plan: Any = RoundKernel.plan
    round_plan: Any = RoundKernel.round_plan
    round_launches: Any = RoundKernel.round_launches
    _run: Any = RoundKernel._run

    def phase(self, name: str, *, layer: int = 0, drafts: bool = True) -> None:
        self.launch(phase=name, layer=layer, drafts=drafts)

    def set_rounds(self, inputs: RoundInputs, *, num_rounds: int = 1) -> None:
        self.rounds.set_rounds(inputs)

    def run_rounds(self, inputs: RoundInputs, *, num_rounds: int = 1) -> None:
        self.set_rounds(inputs)
        self.memory.ring_count[0] = self.memory.host_stop[0] = 0
        self.relaunch_rounds(num_rounds=num_rounds)

    def relaunch_rounds(self, *, num_rounds: int = 1) -> None:
        self.launch(rounds=num_rounds)

    def run(self, inputs: StepInputs, *, num_steps: int = 1) -> None:
        self.rounds.set_columns(inputs)
        self.memory.ring_count[0] = self.memory.host_stop[0] = 0
        self.launch(rounds=num_steps, drafts=False)

    def tokens_so_far(self) -> Tensor:
        return self.memory.ring_tokens_NC[:int(self.memory.ring_count)].clone()

    def verified_so_far(self) -> Tensor:
        return self.rounds.ring_verify_NS[:int(self.memory.ring_count)].clone()

    def check_fault(self) -> None:
        assert not int(self.state.fault)

    def case(self, *, context: int) -> RoundCase:
        """For round_checks.py; every sequence has a context."""
        for slot in range(self.code.C // TILE):
            self.read(slot, context)
        self.shape, self.draft_shape = self.weights.shape, self.draft_weights.shape
        return RoundCase(weights=self.weights, draft_weights=self.draft_weights, state=self.state, draft_state=self.draft_state, twin=self.twin, kernel=self,
                         caches=(self.state.cache.clone(), self.draft_state.cache.clone()), context=context)


def _state_of(shape: StepShape, num_columns: int) -> StepState:
    width = -(-shape.max_length // CHUNK)
    state = StepState.of(shape, num_columns=num_columns, num_slots=SLOTS, num_pages=SLOTS * width, device="cpu")
    state.pages_SP.copy_(torch.randperm(SLOTS * width, generator=torch.Generator().manual_seed(5), dtype=torch.int32).view(SLOTS, width))
    return state
