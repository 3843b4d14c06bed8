"""A whole decode step on a GPU: one resident kernel for several steps, or the same phases as launches that a CUDA graph can hold.

`step_ref` is the twin of both, buffer by buffer; the two give the same bits. What lies in the state's buffers afterwards is what the phases left there.

The resident kernel runs up to `num_steps` steps: the token that a column gives is its next input. Tokens reach the host while it runs, a row of a ring in
pinned memory a step, and a word of the host ends it before its next step. A program that waits in vain for the others sets a fault, and the
kernel ends; `check_fault` raises.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ..moe.product import descriptors as expert_descriptors
from ..moe.product import num_programs
from .attention import FORM, FORM_OF_TWO, AttentionForm
from .barrier import SECONDS_OF_POLLS
from .dense import descriptor
from .model import StepInputs, StepState, StepWeights
from .plan import check_columns
from .step_code import LAYER_STAMPS, PHASES, RESIDENT, SHARED_BYTES, SHARED_BYTES_OF_TWO, Pointers, StepCode, launch_options, layouts_of
from .step_device import step_kernel
from .step_memory import StepMemory
from .step_ref import sample_ref
from .tagged import LAUNCH_TAG

LAYER_PHASES = ("qkv", "attention", "out", "router", "gate_up", "down", "add")
_MAX_STEPS = 64


def layer_phases(code: StepCode) -> list[str]:
    """The launches of a layer."""
    return [name for name in PHASES[1:-3] if name != "merge" or code.TAGGED or not code.LAST_MERGES]


class StepKernel:
    """A model's step for one number of columns, with its descriptors and memory, ready to launch.

    max_steps: rows of the token ring. polls: rounds that a program waits at a barrier, about 0.7 us each. profile: time every phase of the resident kernel.
    expert_parts, rolled, one_list: forms of the code of the experts, of the same bits (`StepCode.of`). form: of attention; None for what fits.
    per_sm: programs an SM, 1 of two consumers or 2 of one; the latter take a shape with `rolled`, and give its bits in either form.
    Errors: NotImplementedError on anything but sm_90, or for a model that does not fit its registers or shared memory; ValueError for another per_sm.
    """

    def __init__(self, weights: StepWeights, state: StepState, *, max_steps: int = _MAX_STEPS, polls: int = SECONDS_OF_POLLS, profile: bool = False,
                 expert_parts: int = 4, rolled: bool = True, one_list: bool = False, form: AttentionForm | None = None,
                 per_sm: int = 1) -> None:
        where, device, shape = "StepKernel", weights.embedding_VD.device, weights.shape
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
            raise NotImplementedError(f"{where}: the kernel is built for sm_90 (Hopper); got {device}. The twin (step_ref) runs anywhere.")
        if state.shape != shape or state.residual_CD.device != device or state.residual_CD.dtype != torch.float32:
            raise ValueError(f"{where}: state and weights must be of one model and device, the state in fp32; got a state on {state.residual_CD.device} in "
                             f"{state.residual_CD.dtype}.")
        if per_sm not in (1, 2):
            raise ValueError(f"{where}: per_sm must be 1 or 2 programs an SM; got {per_sm}.")
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        if limit < SHARED_BYTES:
            raise NotImplementedError(f"{where}: a program takes up to {SHARED_BYTES} bytes of shared memory; this GPU gives {limit}. "
                                      "The reference executor runs anywhere.")
        self.weights, self.state, self.shape, self.max_steps, self.polls = weights, state, shape, max_steps, polls
        self.programs = num_programs(device) * per_sm
        self.code = self._make_code(num_columns=state.num_columns, programs=self.programs, profile=profile, parts=expert_parts, rolled=rolled,
                                    one_list=one_list, form=form or (FORM if per_sm == 1 else FORM_OF_TWO), partitions=2 // per_sm)
        self._fits = per_sm == 1        # two programs an SM: asked when the kernel is built
        self._descriptors = (*(descriptor(weight) for weight in (weights.qkv, weights.out, weights.router, weights.head)),
                             *self._expert_descriptors(weights))
        self.memory, self.pointers = self._make_memory(device)

    def _make_code(self, **options: Any) -> StepCode:
        return StepCode.of(self.shape, layouts=layouts_of(self.weights), **options)

    def _make_memory(self, device: torch.device) -> tuple[StepMemory, Pointers]:
        memory = StepMemory.of(self.shape, self.code, max_steps=self.max_steps, device=device)
        return memory, memory.pointers(self.weights, self.state)

    def _expert_descriptors(self, weights: StepWeights) -> tuple[object, ...]:
        up, down = self.code.expert_stages()
        return *expert_descriptors(weights.experts.gate_up, up), *expert_descriptors(weights.experts.down, down)

    def _arguments(self, code: StepCode, *, num_steps: int = 1, layer: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        table_width, cache_pages = self.state.pages_SP.shape[1], self.state.cache.shape[1]
        return ((*self._descriptors, self.pointers, self.shape.num_layers, num_steps, table_width, cache_pages, self.polls, layer, len(self.shape.taps),
                 self._tags(code.PHASE, num_steps), code), launch_options(code))

    def _tags(self, phase: str, num_steps: int) -> int:
        """The first tag of a launch. A graph would have the same one in every replay, so a resident kernel is never in one."""
        if phase not in RESIDENT:
            return LAUNCH_TAG
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("StepKernel: a resident kernel cannot be captured in a CUDA graph, as every launch has tags of its own. Capture the launches "
                               "of phases (`capture`).")
        return self.state.tags.take(num_steps * self.shape.num_layers)

    def _launch(self, code: StepCode, **numbers: int) -> None:
        self._start(step_kernel, code, *self._arguments(code, **numbers))

    def _start(self, kernel: Any, code: StepCode, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            kernel[(self.programs,)](*arguments, **options)
        except OutOfResources as error:     # known once it is compiled
            raise NotImplementedError(f"StepKernel: a step of {code.C} columns of this model takes more than an SM has ({error}) "
                                      "The reference executor runs anywhere.") from error

    def compile(self, phase: str = "all") -> Any:
        """Build the resident kernel, or the launch of one phase, without running it: seconds the first time, then from Triton's cache."""
        arguments, options = self._arguments(self.code.of_phase(phase))
        return step_kernel.warmup(*arguments, grid=(self.programs,), **options)

    def _check_fit(self) -> None:
        """NotImplementedError unless two programs fit on an SM: the driver would refuse the launch without saying what is too large."""
        if self._fits:
            return
        shared = self.compile().metadata.shared
        if shared > SHARED_BYTES_OF_TWO:
            raise NotImplementedError(f"StepKernel: each of two programs an SM has {SHARED_BYTES_OF_TWO} bytes of shared memory; this model takes {shared}. "
                                      "Use per_sm=1.")
        self._fits = True

    # --- resident ---

    def set_inputs(self, inputs: StepInputs, *, num_steps: int = 1) -> None:
        """Take the columns of the next step. Inputs on the host are checked; on the device they are taken as they are.

        Errors: ValueError for columns that are not runs inside the context, for the last of `num_steps` too; NotImplementedError for top_k and top_p in several
            steps, as their tokens are the host's to pick (`sample_rest`).
        """
        words = inputs.words_8C
        if words.shape != self.memory.words_8C.shape or words.dtype != torch.int32:
            raise ValueError(f"StepKernel: inputs must be int32 {list(self.memory.words_8C.shape)}; got {words.dtype} {list(words.shape)}.")
        if not 1 <= num_steps <= self.max_steps:
            raise ValueError(f"StepKernel: num_steps must be 1 to {self.max_steps}, the rows of the token ring; got {num_steps}.")
        if words.device.type == "cpu":
            slots, positions = inputs.slots_C.tolist(), inputs.positions_C.tolist()
            check_columns(slots, positions, max_length=self.shape.max_length, num_sequences=self.state.num_slots)
            check_columns(slots, [p + num_steps - 1 for p in positions], max_length=self.shape.max_length, num_sequences=self.state.num_slots)
            live = [slot for slot in slots if slot >= 0]
            if num_steps > 1 and len(set(live)) < len(live):
                raise ValueError("StepKernel: with several steps in a launch a sequence has one column; got several of one sequence. Run one step.")
            if num_steps > 1 and self._rest(inputs):
                raise NotImplementedError("StepKernel: several steps in a launch take greedy columns, or a temperature alone; top_k and top_p need one step a "
                                          "launch, behind which sample_rest picks their tokens.")
        self.memory.words_8C.copy_(words, non_blocking=True)

    def run(self, inputs: StepInputs, *, num_steps: int = 1) -> None:
        """Up to `num_steps` steps in one launch, fewer if `stop` is called; nothing is read back. Errors: as `set_inputs`."""
        self.set_inputs(inputs, num_steps=num_steps)
        self.memory.ring_count[0] = 0
        self.memory.host_stop[0] = 0
        self.relaunch(num_steps=num_steps)

    def relaunch(self, *, num_steps: int = 1) -> None:
        """`run` with what `set_inputs` took, and without clearing the words that host and device share."""
        self._check_fit()
        self._launch(self.code, num_steps=num_steps)

    def stop(self) -> None:
        """End a running kernel before its next step."""
        self.memory.host_stop[0] = 1

    def tokens_so_far(self) -> Tensor:
        """Tokens that have arrived, int32 [steps, C], -1 in dead columns; does not wait."""
        return self.memory.ring_tokens_NC[: int(self.memory.ring_count[0])].clone()

    def check_fault(self) -> None:
        """Wait for the device; raise if a program gave up waiting, and make the memory ready again."""
        if int(self.state.fault):
            for tensor in (self.state.fault, self.state.barrier, self.state.attention.arrivals):
                tensor.zero_()
            raise RuntimeError("StepKernel: a program waited for the others, at a barrier or for their words, in vain and gave up; the step's results are not "
                               "valid. Programs that cannot all be resident do this: is another kernel holding SMs?")

    # --- launches ---

    def phase(self, name: str, *, layer: int = 0) -> None:
        """One phase of PHASES in a launch of its own, on the columns of `set_inputs`."""
        if name not in PHASES:
            raise ValueError(f"StepKernel: phase must be one of {', '.join(PHASES)}; got {name!r}.")
        self._launch(self.code.of_phase(name), layer=layer)

    def plan(self) -> list[tuple[str, int]]:
        """The phases of a step in order, each with its layer."""
        phases = [(name, layer) for layer in range(self.shape.num_layers) for name in layer_phases(self.code)]
        return [("embed", 0), *phases, ("head", 0), ("sample", 0), ("finish", 0)]

    def launches(self) -> None:
        """One step, a launch a phase. Can be captured in a CUDA graph, whose inputs are what `set_inputs` copied."""
        for name, layer in self.plan():
            self.phase(name, layer=layer)

    def capture(self) -> torch.cuda.CUDAGraph:
        """A CUDA graph of `launches`, run once before."""
        return self._capture(self.launches)

    def _capture(self, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        return graph

    # --- what the device leaves to the host ---

    def _rest(self, inputs: StepInputs) -> list[int]:
        """Columns whose token takes another look at all logits."""
        return [c for c, (slot, t, top_k, top_p) in enumerate(zip(inputs.slots_C.tolist(), inputs.temperatures_C.tolist(), inputs.top_ks_C.tolist(),
                                                                  inputs.top_ps_C.tolist(), strict=True)) if slot >= 0 and t > 0 and (top_k > 0 or top_p < 1)]

    def sample_rest(self, inputs: StepInputs) -> None:
        """Behind a step: the tokens of columns with top_k or top_p, from their logits, into `next_C`. Waits for the device if there are any."""
        seeds = inputs.seeds()
        for c in self._rest(inputs):
            self.state.next_C[c] = sample_ref(
                self.state.logits_CV[c], temperature=float(inputs.temperatures_C[c]), top_p=float(inputs.top_ps_C[c]), top_k=int(inputs.top_ks_C[c]),
                seed=seeds[c], position=int(inputs.positions_C[c]) + 1)

    def phase_us(self) -> dict[str, float]:
        """With `profile`: us of each phase of the last step, from the barrier before it to the one behind it, summed over layers; waits for the device."""
        stamps = self.memory.stamps.tolist()
        spans = [(b - a) / 1e3 for a, b in pairwise(stamps)]
        return {name: sum(spans[i::LAYER_STAMPS][: self.shape.num_layers]) for i, name in enumerate(LAYER_PHASES)} | dict(
            zip(("head", "sample", "finish"), spans[-3:], strict=True))
