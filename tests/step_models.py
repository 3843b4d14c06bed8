"""Checkpoints on the twin of the persistent step, and steps of one sequence, that the tests share."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilotok.kernels.persistent import Heads, StepInputs, StepRef, StepShape, StepState, StepWeights
from kilotok.kernels.persistent.plan import CHUNK
from kilotok.quant.checkpoint.metadata import read_json
from kilotok.runtime.archs import graph_of
from kilotok.runtime.persistent import PersistentExecutor
from kilotok.runtime.step_weights import read_step_weights, step_shape


def weights_of_directory(directory: Path, *, taps: tuple[int, ...] = (), max_length: int | None = None) -> StepWeights:
    config = read_json(directory / "config.json")
    graph = graph_of(config, where=str(directory))
    shape = step_shape(graph, taps=taps, max_length=max_length)
    return read_step_weights(directory, graph=graph, config=config, shape=shape, device="cpu", programs=132)


def state_for(shape: StepShape, *, num_columns: int = 8, num_slots: int = 1, wide: torch.dtype = torch.float32) -> StepState:
    """A slot's pages lie one after the other."""
    width = -(-shape.max_length // CHUNK)
    state = StepState.of(shape, num_columns=num_columns, num_slots=num_slots, num_pages=num_slots * width, device="cpu", wide=wide)
    state.pages_SP.copy_(torch.arange(num_slots * width, dtype=torch.int32).view(num_slots, width))
    return state


def teacher_forced(twin: StepRef, ids: Sequence[int], *, slot: int = 0) -> tuple[Tensor, Tensor]:
    """(logits [T, V], features [T, X, D]) of a text read in full steps."""
    logits, features = [], []
    columns = min(8, twin.state.num_columns)
    for start in range(0, len(ids), columns):
        part = ids[start:start + columns]
        inputs = StepInputs.dead(twin.state.num_columns)
        for c, token in enumerate(part):
            inputs.set(c, token_id=token, slot=slot, position=start + c)
        twin.step(inputs)
        logits.append(twin.state.logits_CV[:len(part)].clone())
        features.append(twin.state.features_CXD[:len(part)].clone())
    return torch.cat(logits), torch.cat(features)


# A model small enough for hundreds of steps a second or two, of random weights; texts of it do not repeat themselves when sampled.
TINY = StepShape(hidden_size=64, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6), num_experts=4, experts_per_token=2,
                 expert_hidden=32, normalize_router_weights=True, rms_eps=1e-6, rope_theta=1e4, vocab_size=300, max_length=300, taps=(0, 1))


class Counted(StepRef):
    """A twin that writes down the live columns of every step, and can be told to fail."""

    def __init__(self, weights: StepWeights, state: StepState, *, log: list[list[int]], kept: StepRef | None) -> None:
        super().__init__(weights, state)
        self.log, self.fail_next = log, False
        if kept is not None:
            self._kept = kept._kept

    def step(self, inputs: StepInputs) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("step: a barrier was given up")
        self.log.append([slot for slot in inputs.slots_C.tolist() if slot >= 0])
        super().step(inputs)


class Stepwise:
    """A twin without several steps in a row."""

    def __init__(self, twin: Counted) -> None:
        self.twin, self.state = twin, twin.state

    def step(self, inputs: StepInputs) -> None:
        self.twin.step(inputs)


@cache
def tiny_weights() -> StepWeights:
    return StepWeights.random(TINY, seed=11, device="cpu")


def twin_executor(weights: StepWeights | None = None, *, resident: bool = False, **options: Any) -> tuple[PersistentExecutor, list[list[int]]]:
    """An executor on the twin, and the slots of the columns of every step it runs."""
    found, log, twins = weights or tiny_weights(), list[list[int]](), list[Counted]()

    def make(state: StepState) -> Counted | Stepwise:
        twins.append(Counted(found, state, log=log, kept=twins[0] if twins else None))
        return twins[-1] if resident else Stepwise(twins[-1])

    return PersistentExecutor(found, make_runner=make, **options), log
