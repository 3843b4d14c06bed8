"""Rounds on a GPU: a draft, the step that verifies it and its acceptance in one resident kernel for several rounds, or the same phases as launches.

`draft_ref.py` is the twin of both, buffer by buffer; the two give the same bits. A RoundKernel also runs steps without drafts, of any columns, as a StepKernel
does; they leave the draft's context complete, so prompts are read by them.

The kernel needs pages for what it may write: before `run_rounds` a sequence whose anchor is at p has pages for positions below p + 8 * num_rounds, as far as
they lie inside the context. Tokens reach the host while it runs, a row of the ring a round: those that the round committed, of sequence s from column 8 s on,
-1 elsewhere, and how many proposals it verified. A sequence whose next anchor is behind the context is dead from then on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dense import descriptor
from .draft_code import ROUND_PHASES, DraftCode, round_code, round_options
from .draft_device import round_kernel
from .draft_memory import RoundMemory
from .draft_model import DRAFT_MATRICES, DraftState, DraftWeights
from .model import StepState, StepWeights
from .round_inputs import RoundInputs
from .step import StepKernel
from .step_code import Pointers, StepCode, layouts_of
from .step_memory import StepMemory

_CONTEXT_PHASES = ("fc", "keys", "append")
_NOT_STAMPED = {"draft_embed", "draft_merge", "merge"}     # they lie before the first boundary, or are part of attention


class RoundKernel(StepKernel):
    """A target's step and a draft head's rounds for one number of columns, ready to launch.

    A round has a sequence for every eight columns. max_steps: rows of the token ring. Costs and scales that decide how many proposals are verified are
    `draft_state.cost_8` and `scale_8`. Other arguments and errors: as StepKernel; NotImplementedError for weights of a shape that is not `rolled`, ValueError
    for a draft that is not this target's.
    """

    def __init__(self, weights: StepWeights, state: StepState, draft_weights: DraftWeights, draft_state: DraftState, **options: Any) -> None:
        self.draft_weights, self.draft_state, self.draft_shape = draft_weights, draft_state, draft_weights.shape
        if draft_state.shape != draft_weights.shape or draft_state.num_columns != state.num_columns or draft_state.residual_CD.dtype != torch.float32:
            raise ValueError(f"RoundKernel: draft state and weights must be of one draft, as wide as the step, in fp32; got {draft_state.num_columns} columns "
                             f"in {draft_state.residual_CD.dtype} beside {state.num_columns}.")
        super().__init__(weights, state, **options)
        state.tags.words += [draft_state.attention.mixed_words, draft_state.attention.stats_words]
        self._draft_descriptors = tuple(descriptor(getattr(draft_weights, name)) for name in DRAFT_MATRICES)

    def _make_code(self, **options: Any) -> StepCode:
        code, self.draft_code = round_code(self.shape, self.draft_shape, layouts=layouts_of(self.weights), **options)
        return code

    def _make_memory(self, device: torch.device) -> tuple[StepMemory, Pointers]:
        self.rounds = RoundMemory.of(self.shape, self.code, self.draft_code, max_rounds=self.max_steps, device=device)
        self.draft_pointers = self.rounds.draft_pointers(self.draft_weights, self.draft_state)
        return self.rounds.step, self.rounds.pointers(self.weights, self.state)

    def _round_arguments(self, draft: DraftCode, *, num_rounds: int = 1, layer: int = 0, drafts: bool = True,
                         assumed: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        table_width, cache_pages = self.state.pages_SP.shape[1], self.state.cache.shape[1]
        numbers = (self.shape.num_layers, self.draft_shape.num_layers, num_rounds, table_width, cache_pages, self.polls, layer, len(self.shape.taps),
                   int(drafts), -1 if assumed is None else assumed, self._tags(draft.PHASE, num_rounds))
        return ((*self._descriptors, *self._draft_descriptors, self.pointers, self.draft_pointers, *numbers, self.code, draft),
                round_options(self.code, draft))

    def compile(self, phase: str = "all") -> Any:
        """As `StepKernel.compile`; "all" is the kernel of rounds."""
        if phase != "all" and phase not in ROUND_PHASES:
            return super().compile(phase)
        arguments, options = self._round_arguments(self.draft_code if phase == "all" else self.draft_code.of_phase(phase))
        return round_kernel.warmup(*arguments, grid=(self.programs,), **options)

    # --- resident ---

    def set_rounds(self, inputs: RoundInputs, *, num_rounds: int = 1) -> None:
        """Take the sequences of the next round. Inputs on the host are checked; on the device they are taken as they are.

        Errors: ValueError for another number of sequences, one outside the context or the page table, or more rounds than the ring has rows.
        """
        where, words, sequences = "RoundKernel", inputs.words_9S, self.code.C // 8
        if words.shape != (9, sequences) or words.dtype != torch.int32:
            raise ValueError(f"{where}: inputs must be int32 [9, {sequences}], a sequence for every eight columns; got {words.dtype} {list(words.shape)}.")
        if not 1 <= num_rounds <= self.max_steps:
            raise ValueError(f"{where}: num_rounds must be 1 to {self.max_steps}, the rows of the token ring; got {num_rounds}.")
        if words.device.type == "cpu":
            for i, (slot, position) in enumerate(zip(inputs.slots_S.tolist(), inputs.positions_S.tolist(), strict=True)):
                if slot >= self.state.num_slots or (slot >= 0 and not 0 <= position < self.shape.max_length):
                    raise ValueError(f"{where}: sequence {i} is at position {position} of slot {slot}; slots are 0..{self.state.num_slots - 1} (below 0: dead) "
                                     f"and positions 0..{self.shape.max_length - 1}, the context.")
        self.rounds.set_rounds(inputs)

    def run_rounds(self, inputs: RoundInputs, *, num_rounds: int = 1, assumed: int | None = None) -> None:
        """Up to `num_rounds` rounds in one launch, fewer if `stop` is called; nothing is read back.

        assumed: for measurements, how many proposals are taken as accepted, at most those verified; the text is then nobody's. Errors: as `set_rounds`.
        """
        self.set_rounds(inputs, num_rounds=num_rounds)
        self.memory.ring_count[0] = 0
        self.memory.host_stop[0] = 0
        self.relaunch_rounds(num_rounds=num_rounds, assumed=assumed)

    def relaunch_rounds(self, *, num_rounds: int = 1, assumed: int | None = None) -> None:
        """`run_rounds` from the anchors where the last one ended, without clearing the words that host and device share."""
        self._check_fit()
        self._start(round_kernel, self.code, *self._round_arguments(self.draft_code, num_rounds=num_rounds, assumed=assumed))

    def relaunch(self, *, num_steps: int = 1) -> None:
        """As `StepKernel.relaunch`: steps without drafts."""
        self._check_fit()
        self._start(round_kernel, self.code, *self._round_arguments(self.draft_code, num_rounds=num_steps, drafts=False))

    def verified_so_far(self) -> Tensor:
        """Proposals that were verified, int32 [rounds, S], -1 of dead sequences and of steps without drafts; does not wait."""
        return self.rounds.ring_verify_NS[: int(self.memory.ring_count[0])].clone()

    def check_fault(self) -> None:
        """As `StepKernel.check_fault`."""
        try:
            super().check_fault()
        except RuntimeError:
            self.draft_state.attention.arrivals.zero_()
            raise

    # --- launches ---

    def phase(self, name: str, *, layer: int = 0, drafts: bool = True, assumed: int | None = None) -> None:
        """One phase of PHASES or ROUND_PHASES in a launch of its own; drafts, assumed: of `accept`."""
        if name in ROUND_PHASES:
            self._start(round_kernel, self.code, *self._round_arguments(self.draft_code.of_phase(name), layer=layer, drafts=drafts, assumed=assumed))
        else:
            super().phase(name, layer=layer)

    def plan(self) -> list[tuple[str, int]]:
        """The phases of a step without drafts, each with its layer."""
        return [*StepKernel.plan(self)[:-1], ("accept", 0), *((name, 0) for name in _CONTEXT_PHASES)]

    def round_plan(self) -> list[tuple[str, int]]:
        """The phases of a round in order, each with its layer."""
        names = [f"draft_{name}" for name in ("qkv", "attention", "merge", "out", "gate_up", "down")
                 if name != "merge" or self.code.TAGGED or not self.code.LAST_MERGES]
        layers = [(name, layer) for layer in range(self.draft_shape.num_layers) for name in names]
        return [("draft_embed", 0), *layers, *((name, 0) for name in ("draft_head", "draft_sample", "choose")), *self.plan()]

    def launches(self) -> None:
        """One step without drafts, a launch a phase, on the columns of `set_inputs`."""
        self._run(self.plan(), drafts=False)

    def round_launches(self) -> None:
        """One round, a launch a phase, on the sequences of `set_rounds` or of the round before. Can be captured in a CUDA graph."""
        self._run(self.round_plan(), drafts=True)

    def capture_rounds(self) -> torch.cuda.CUDAGraph:
        """A CUDA graph of `round_launches`, run once before; a replay is the next round."""
        return self._capture(self.round_launches)

    def _run(self, plan: Sequence[tuple[str, int]], *, drafts: bool) -> None:
        for name, layer in plan:
            self.phase(name, layer=layer, drafts=drafts)

    def phase_us(self) -> dict[str, float]:
        """With `profile`: us of each phase of the last round, from the barrier before it to the one behind it, summed over layers; waits for the device.

        A block's input lies before the first barrier and is not in it; the append, behind the last, ends where the first program does.
        """
        names = [name for name, _ in self.round_plan() if name not in _NOT_STAMPED]
        stamps = self.memory.stamps.tolist()
        found = dict.fromkeys(dict.fromkeys(names), 0.0)
        for name, begin, end in zip(names, stamps, stamps[1:], strict=False):
            found[name] += (end - begin) / 1e3
        return found
