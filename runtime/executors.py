"""Which executor runs a directory, and why: the persistent one where it can, else the reference. What was asked for and cannot be is an error.

Nothing falls back in silence: the reason is in the description that a server prints, answers to /health, and that reports hold.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..dflash.checkpoint import read_draft
from ..dflash.model import DraftModel
from ..dflash.sampling import Sampling
from ..kernels.persistent import Column, DraftShape, DraftState, RoundInputs, StepInputs, StepShape, StepState
from ..kernels.persistent.attention import COLUMNS
from ..kernels.persistent.plan import CHUNK
from ..kernels.persistent.round_inputs import MAX_LIMIT
from ..kernels.persistent.rounds import RoundKernel
from ..kernels.persistent.step import StepKernel
from ..quant.checkpoint.metadata import read_json
from .archs import graph_of
from .draft_weights import draft_weights, require_rounds
from .gpu import Gpu, find_gpu, obstacle_of
from .graph import ModelGraph
from .kv_pages import pages_for
from .persistent import Chunk, PersistentExecutor, StepRunner, kernel_picks
from .reference import ReferenceExecutor
from .step_weights import read_step_weights, step_shape
from .weights import load_executor

ExecutorKind = Literal["auto", "reference", "persistent"]
EXECUTORS: tuple[ExecutorKind, ...] = get_args(ExecutorKind)
DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SPARE_BYTES = 4 << 30       # of a GPU's memory that the cache leaves to buffers, the draft head and torch
POLL_S = 1e-4               # between two looks at a kernel that runs several steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """kind and device are what runs; reason says why, in words that follow 'because'."""

    kind: Literal["reference", "persistent"]
    device: Literal["cpu", "cuda"]
    reason: str


def choose_executor(directory: Path, *, executor: str = "auto", device: str = "auto", dtype: str | None = None,
                    gpu: Callable[[], Gpu | None] = find_gpu) -> Choice:
    """From the options and config.json; nothing is loaded.

    device: auto is cuda where the persistent executor runs, else cpu. dtype: as asked for; None: the executor's own.
    Errors: NotImplementedError for a persistent executor that cannot run here, or a family that no executor runs; ValueError for unknown options, and for
        cuda where there is none.
    """
    for name, value, known in (("executor", executor, EXECUTORS), ("device", device, DEVICES)):
        if value not in known:
            raise ValueError(f"{name}: must be one of {', '.join(known)}; got {value!r}.")
    found = gpu()
    if device == "cuda" and found is None:
        raise ValueError("device: cuda asked for, but torch sees no CUDA device. Use cpu, or install a CUDA build of torch.")
    config = read_json(directory / "config.json")
    graph = graph_of(config, where=str(directory))
    if executor == "reference":
        return Choice(kind="reference", device="cuda" if device == "cuda" else "cpu", reason="it was asked for")
    obstacle = _obstacle(graph, config=config, device=device, dtype=dtype, gpu=found)
    if obstacle is None:
        assert found is not None, "without a GPU there is an obstacle"
        return Choice(kind="persistent", device="cuda", reason=f"{found.name} runs it")
    if executor == "persistent":
        raise NotImplementedError("executor: the persistent one needs an NVIDIA GPU of compute capability 9.0 (H100, H200) with a CUDA build of torch, "
                                  f"and MXFP4 experts of sizes it is built for; {obstacle}. Take --executor auto or reference.")
    return Choice(kind="reference", device="cuda" if device == "cuda" else "cpu", reason=f"the persistent one does not run: {obstacle}")


def _obstacle(graph: ModelGraph, *, config: dict[str, Any], device: str, dtype: str | None, gpu: Gpu | None) -> str | None:
    """Why the persistent executor cannot run this, the first reason that is found."""
    if device == "cpu":
        return "the device is cpu"
    of_gpu = obstacle_of(gpu)
    if of_gpu is not None:
        return of_gpu
    if dtype not in (None, "bfloat16"):
        return f"it computes in bfloat16, not {dtype}"
    if config.get("quantization_config") is None:
        return "the experts are not in MXFP4 (no quantization_config)"
    try:
        step_shape(graph)
    except NotImplementedError as error:
        return str(error).rstrip(".")
    return None


class KernelRunner:
    """The resident kernel as a runner of the executor."""

    def __init__(self, kernel: StepKernel) -> None:
        self.kernel, self.state = kernel, kernel.state

    def step(self, inputs: StepInputs) -> None:
        self.kernel.run(inputs)
        self.kernel.check_fault()

    def run_steps(self, inputs: StepInputs, num_steps: int, *, stopped: Callable[[], bool]) -> Tensor:
        """As ResidentRunner; the host looks at `stopped` while the kernel runs, and may end it before its next step."""
        self.kernel.run(inputs, num_steps=num_steps)
        self._wait(stopped)
        return self.kernel.tokens_so_far()

    def _wait(self, stopped: Callable[[], bool]) -> None:
        done, has_stopped = torch.cuda.Event(), False
        done.record()
        while not done.query():
            if not has_stopped and stopped():
                self.kernel.stop()
                has_stopped = True
            time.sleep(POLL_S)
        self.kernel.check_fault()


class RoundKernelRunner(KernelRunner):
    """The resident kernel with a draft head."""

    def __init__(self, kernel: RoundKernel) -> None:
        super().__init__(kernel)
        self.rounds = kernel

    def run_rounds(self, inputs: RoundInputs, num_rounds: int, *, stopped: Callable[[], bool]) -> tuple[Tensor, Tensor]:
        """As RoundRunner; likewise."""
        self.rounds.run_rounds(inputs, num_rounds=num_rounds)
        self._wait(stopped)
        return self.rounds.tokens_so_far(), self.rounds.verified_so_far()


class GraphRunner:
    """The same phases as launches of their own, replayed from a CUDA graph: where programs of a resident kernel cannot meet. The bits are the same."""

    def __init__(self, kernel: StepKernel, inputs: StepInputs) -> None:
        """inputs: of a step that may be run to record it."""
        self.kernel, self.state = kernel, kernel.state
        kernel.set_inputs(inputs)
        self._graph = kernel.capture()

    def step(self, inputs: StepInputs) -> None:
        self.kernel.set_inputs(inputs)
        self._graph.replay()
        self.kernel.check_fault()


def runner_of(kernel: StepKernel) -> KernelRunner | GraphRunner:
    """Runs a step of one column, slot 0 at position 0, which compiles the kernel, and takes the resident one if its programs met at the barriers.

    Errors: NotImplementedError for a model whose kernel does not fit the GPU.
    """
    inputs = StepInputs.of([Column(token_id=0, slot=0, position=0), *[None] * (kernel.state.num_columns - 1)])
    resident = RoundKernelRunner(kernel) if isinstance(kernel, RoundKernel) else KernelRunner(kernel)
    try:
        resident.step(inputs)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            raise
        logger.warning("executor: a step is launched phase by phase from a CUDA graph, as the resident kernel does not run here: %s", error)
        return GraphRunner(kernel, inputs)
    return resident


def load_best_executor(directory: Path, choice: Choice, *, dtype: str | None, taps: tuple[int, ...], num_slots: int, may_fall_back: bool,
                       draft_dir: Path | None = None) -> tuple[ReferenceExecutor | PersistentExecutor, str]:
    """The executor of a choice, and why it is this one.

    draft_dir: of the draft head that the taps are for, which the kernel drafts with if it is built for it.
    may_fall_back: a kernel that turns out not to be built for the model is replaced by the reference, with its reason.
    Errors: as `load_executor`, and NotImplementedError of the kernel where it may not fall back.
    """
    reason = choice.reason
    if choice.kind == "persistent":
        try:
            return load_persistent(directory, taps=taps, num_slots=num_slots, draft_dir=draft_dir), reason
        except NotImplementedError as error:
            if not may_fall_back:
                raise
            reason = f"the persistent one does not run: {str(error).rstrip('.')}"
            logger.warning("executor: reference, because %s", reason)
    kind = DTYPES[dtype or ("bfloat16" if choice.device == "cuda" else "float32")]
    return load_executor(directory, device=choice.device, dtype=kind, taps=taps), reason


def load_persistent(directory: Path, *, taps: tuple[int, ...], num_slots: int, draft_dir: Path | None = None) -> PersistentExecutor:
    """Weights packed on the current GPU, as many pages as fit, kernels of every width compiled and tried.

    With a draft that rounds are not built for, or whose kernel does not fit, drafts are left to the draft head in torch, and it is said.
    Errors: NotImplementedError for experts that are not in MXFP4, or a model that no kernel is built for; RuntimeError for a GPU without memory for the
        cache of one sequence.
    """
    if draft_dir is not None:
        try:
            return _load_persistent(directory, taps=taps, num_slots=num_slots, model=read_draft(draft_dir, dtype=torch.bfloat16))
        except NotImplementedError as error:
            logger.warning("executor: drafts are made by the draft head in torch, and verified a step at a time: %s", error)
    return _load_persistent(directory, taps=taps, num_slots=num_slots, model=None)


def _load_persistent(directory: Path, *, taps: tuple[int, ...], num_slots: int, model: DraftModel | None) -> PersistentExecutor:
    gpu = find_gpu()
    assert gpu is not None, "the choice has seen a GPU"
    config = read_json(directory / "config.json")
    graph = graph_of(config, where=str(directory))
    shape = step_shape(graph, taps=taps)
    draft_shape = None if model is None else require_rounds(model, max_length=shape.max_length)
    weights = read_step_weights(directory, graph=graph, config=config, shape=shape, device="cuda", programs=gpu.num_sms)
    draft = None if model is None else draft_weights(model, embedding_VD=weights.embedding_VD, max_length=shape.max_length, device="cuda")
    num_pages = pages_that_fit(shape, num_slots=num_slots, free_bytes=torch.cuda.mem_get_info()[0], draft=draft_shape)

    def make_runner(state: StepState, drafts: DraftState | None = None) -> StepRunner:
        if draft is None or drafts is None:
            return runner_of(StepKernel(weights, state))
        return runner_of(RoundKernel(weights, state, draft, drafts))

    executor = PersistentExecutor(weights, make_runner=make_runner, num_slots=num_slots, num_pages=num_pages, picks=kernel_picks, draft=draft)
    warm_up(executor)
    if executor.has_rounds:
        require_same_text(executor)
    executor.name = f"persistent ({'resident kernel' if executor.can_reside else 'CUDA graph of launches'}, {gpu.name})"
    return executor


def require_same_text(executor: PersistentExecutor) -> None:
    """Rounds and steps continue one text; NotImplementedError if they differ, as drafts must not change what is said."""
    prompt = [1 + i % 7 for i in range(16)]
    found = []
    for rounds in (False, True):
        sequence = executor.open()
        try:
            step = sequence.read(prompt)
            first = Chunk(sequence=sequence, ids=(int(step.logits_TV[-1].argmax()),), position=len(prompt), sampling=Sampling(), last_only=False)
            if rounds:
                (committed,) = executor.run_rounds([first], 4, limits=[MAX_LIMIT], stopped=lambda: False)
                found.append([token for tokens, _ in committed for token in tokens])
            else:
                found += executor.run_steps([first], 4 * (MAX_LIMIT + 1), stopped=lambda: False)
        finally:
            sequence.close()
    plain, drafted = found
    if not drafted or drafted != plain[:len(drafted)]:
        raise NotImplementedError(f"rounds on this GPU give another text than steps ({drafted} and {plain}); please report it with the model's config.json")


def pages_that_fit(shape: StepShape, *, num_slots: int, free_bytes: int, draft: DraftShape | None = None) -> int:
    """Pages of the cache: as many as all slots could fill, or as the memory holds. draft: whose cache has pages beside them.

    Errors: RuntimeError if it does not hold one sequence.
    """
    whole = pages_for(shape.max_length)
    layers = [(shape.num_layers, shape.heads), *([] if draft is None else [(draft.num_layers, draft.heads)])]
    page_bytes = sum(2 * CHUNK * 2 * number * heads.num_kv_heads * heads.head_dim for number, heads in layers)
    num_pages = min(num_slots * whole, (free_bytes - SPARE_BYTES) // page_bytes)
    if num_pages < whole:
        raise RuntimeError(f"executor: the cache of one sequence of {shape.max_length} tokens takes {whole * page_bytes / 2**30:.1f} GiB, and the GPU has "
                           f"{max(0, free_bytes - SPARE_BYTES) / 2**30:.1f} GiB beside the weights and {SPARE_BYTES >> 30} GiB of buffers. Take a GPU with "
                           "more memory, or --executor reference.")
    return num_pages


def warm_up(executor: PersistentExecutor) -> None:
    """Make the runners of every width, so that no request waits for a compiler; widths that no kernel is built for are given up, and it is said.

    Errors: NotImplementedError if not even the narrowest is built.
    """
    sequence = executor.open()
    try:
        for columns in [c for c in COLUMNS if c <= executor.num_columns]:
            start = time.perf_counter()
            try:
                sequence.reserve(1)     # slot 0, where nothing else is open: what a runner may write to at its first step
                executor.runner(columns)
            except NotImplementedError as error:
                if columns == min(COLUMNS):
                    raise
                executor.num_columns = max(c for c in COLUMNS if c < columns)
                logger.warning("executor: steps have at most %d columns here: %s", executor.num_columns, error)
                return
            logger.info("executor: a step of %d columns is ready after %.1f s", columns, time.perf_counter() - start)
    finally:
        sequence.close()
