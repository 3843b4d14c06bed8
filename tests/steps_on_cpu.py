"""A step kernel over weights and states on the CPU (step_on_cpu.py), from poisoned memory, beside its twin."""

from dataclasses import replace
from typing import Any

import torch
from step_on_cpu import Kernel
from torch import Tensor

from kilotok.kernels.persistent import Heads, StepInputs, StepRef, StepShape, StepState, StepWeights
from kilotok.kernels.persistent.step import layer_phases
from kilotok.kernels.persistent.step_code import StepCode, layouts_of
from kilotok.kernels.persistent.step_memory import StepMemory
from kilotok.kernels.persistent.tagged import LAUNCH_TAG

PROGRAMS = 3
SMALL = StepShape(hidden_size=96, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6), num_experts=8, experts_per_token=2,
                  expert_hidden=64, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e4, vocab_size=100, max_length=512, taps=(0,))
MODELS = {
    "qk norm": SMALL,
    "two sums of qkv": replace(SMALL, hidden_size=288, num_layers=1),
    "rolled": replace(SMALL, rolled=True),
    "rolled, sums of qkv and router": replace(SMALL, rolled=True, hidden_size=1024, num_layers=1),
    "no qk norm, tail heads": replace(SMALL, heads=Heads(num_heads=3, num_kv_heads=1, head_dim=32), hidden_size=160, num_experts=5, experts_per_token=3,
                                      expert_hidden=96, normalize_router_weights=False, taps=()),
}


class OnCpu:
    """The step kernel over weights and a state on the CPU, from poisoned memory."""

    def __init__(self, shape: StepShape, *, num_columns: int = 8, programs: int = PROGRAMS, seed: int = 1, **form: Any) -> None:
        self.weights, self.programs = StepWeights.random(shape, seed=seed, device="cpu", programs=programs), programs
        self.state, self.twin_state = (state_of(shape, num_columns) for _ in range(2))
        for name, tensor in vars(self.state).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and name not in ("cos_NK", "sin_NK"):
                tensor.fill_(torch.nan)
        self.twin = StepRef(self.weights, self.twin_state)
        self.code = StepCode.of(shape, layouts=layouts_of(self.weights), num_columns=num_columns, programs=programs, **form)
        self.memory = StepMemory.of(shape, self.code, max_steps=8, device="cpu")
        self.pointers = self.memory.pointers(self.weights, self.state)
        self.kernel = Kernel(programs, consumers=self.code.PARTITIONS)

    def launch(self, *, num_steps: int = 1, phase: str = "all", layer: int = 0) -> None:
        w, code = self.weights, self.code
        experts = ((w.experts.gate_up, code.up), (w.experts.down, code.down))
        descriptors = (*(m.words.view(-1, 256) for m in (w.qkv, w.out, w.router, w.head)),
                       *(t for e, c in experts for t in (e.codes.view(-1, 256), e.scales.view(-1, c.SCALE_BOX))))
        tag = self.state.tags.take(num_steps * w.shape.num_layers) if phase == "all" else LAUNCH_TAG
        self.kernel.launch(descriptors, self.pointers, w.shape.num_layers, num_steps, self.state.pages_SP.shape[1], self.state.cache.shape[1], 1000, layer,
                           len(w.shape.taps), tag, code=code.of_phase(phase))

    def launches(self) -> None:
        self.launch(phase="embed")
        for layer in range(self.weights.shape.num_layers):
            for name in layer_phases(self.code):
                self.launch(phase=name, layer=layer)
        for name in ("head", "sample", "finish"):
            self.launch(phase=name)


def state_of(shape: StepShape, num_columns: int) -> StepState:
    state = StepState.of(shape, num_columns=num_columns, num_slots=num_columns, num_pages=4 * num_columns, device="cpu")
    state.pages_SP.copy_(torch.randperm(4 * num_columns, generator=torch.Generator().manual_seed(5), dtype=torch.int32).view(num_columns, -1))
    return state


def inputs_of(columns: dict[int, tuple[int, int, int]], *, num_columns: int = 8) -> StepInputs:
    """columns: by place, (token id, slot, position)."""
    inputs = StepInputs.dead(num_columns)
    for column, (token, slot, position) in columns.items():
        inputs.set(column, token_id=token, slot=slot, position=position)
    return inputs


def assert_like_the_twin(run: OnCpu, live: Tensor) -> None:
    """Live columns within fp32 rounding, a bf16 neighbour now and then; dead ones as they were."""
    for name in ("residual_CD", "qkv_CW", "mixed_CW", "normed_CD", "router_logits_CE", "logits_CV", "features_CXD"):
        got, expected = getattr(run.state, name), getattr(run.twin_state, name)[live].float()
        if expected.numel():
            error = float((got[live].float() - expected).norm() / expected.norm())
            assert error <= 2e-3, f"{name}: relative error {error:.1e}"
            assert bool(got[~live].isnan().all()), f"{name}: a dead column was written"
    assert run.state.next_C[live].tolist() == run.twin_state.next_C[live].tolist()
    assert run.state.distinct_L.tolist() == run.twin_state.distinct_L.tolist()
