"""`kilotok bench engine`: a decode step on this machine's GPU, phase by phase, against the bytes that it must read.

    step        one launch of the resident kernel, its inputs copied in; the median, with p20 and p80
    in a row    several steps a launch, each fed by the one before; per step
    graph       the same phases as launches of their own in a CUDA graph: what residence itself brings is the difference
    floor       bytes of the step over the read stream of the same run: dense weights, the experts that were chosen, keys and values, logits
    phases      from the barrier before a phase to the one behind it, summed over layers, in a kernel that writes time stamps

Weights are random unless a checkpoint directory is given; which experts random routers choose is close to an even draw, so it is printed how many.

Legend: T live columns.
"""

import importlib.metadata
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..dflash.checkpoint import read_config
from ..kernels.persistent import Column, DraftWeights, StepInputs, StepShape, StepState, StepWeights
from ..kernels.persistent.attention import COLUMNS
from ..kernels.persistent.plan import CHUNK, RUN_COLUMNS
from ..kernels.persistent.read_stream import stream_bytes_per_s, timed_us
from ..kernels.persistent.rounds import RoundKernel
from ..kernels.persistent.step import StepKernel
from ..kernels.persistent.step_code import LAYER_STAMPS
from ..quant.checkpoint.metadata import read_json
from .archs import graph_of
from .bench_rounds import MeasuredRound, draft_directory, measure_rounds, rounds_context, rounds_table
from .draft_weights import draft_shape, read_draft_weights
from .gpu import Gpu, find_gpu, obstacle_of
from .graph import ModelGraph
from .shapes import draft_of, shape_of
from .step_weights import read_step_weights, step_shape

REPEATS = 30
STEPS_IN_A_ROW = 32
PHASE_REPEATS = 5
ONCE = ("head", "sample", "finish")     # phases that no layer has


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One run."""

    model: str                          # a name of shapes.py, or a checkpoint directory
    columns: tuple[int, ...] = (1, 8)   # live ones of a step, T; each gets a table row
    per_sequence: int = 1               # columns of one sequence: 1 decodes plainly, up to 8 verify a draft
    context: int = 512                  # tokens of every sequence, the step's own included
    layers: int | None = None           # only so many, for a quick look
    seed: int = 0
    draft: bool = False                 # rounds with a draft head instead of steps
    sequences: tuple[int, ...] = (1,)   # of rounds
    assume_acceptance: tuple[float, ...] = ()   # tokens a round, for tokens/s that are labelled so

    def __post_init__(self) -> None:
        if not self.columns or any(not 1 <= t <= max(COLUMNS) for t in self.columns):
            raise ValueError(f"columns: must lie in 1..{max(COLUMNS)}; got {list(self.columns)}.")
        if not 1 <= self.per_sequence <= RUN_COLUMNS:
            raise ValueError(f"per_sequence: must lie in 1..{RUN_COLUMNS}; got {self.per_sequence}.")
        if self.context < self.per_sequence:
            raise ValueError(f"context: must hold the {self.per_sequence} columns of a sequence; got {self.context}.")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers: must be at least 1; got {self.layers}. Leave it out for all.")
        most = max(COLUMNS) // RUN_COLUMNS
        if not self.sequences or any(not 1 <= s <= most for s in self.sequences):
            raise ValueError(f"sequences: must lie in 1..{most}, {RUN_COLUMNS} columns each; got {list(self.sequences)}.")
        if any(not 1 <= length <= RUN_COLUMNS for length in self.assume_acceptance):
            raise ValueError(f"assume_acceptance: a round commits 1 to {RUN_COLUMNS} tokens; got {list(self.assume_acceptance)}.")
        if self.assume_acceptance and not self.draft:
            raise ValueError("assume_acceptance: is of rounds; ask for them with --draft.")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What measures: a stand-in takes its place in tests."""

    device: str
    programs: int
    environment: str
    kernel: Callable[..., Any]                                                  # as StepKernel
    round_kernel: Callable[..., Any]                                            # as RoundKernel
    timed_us: Callable[[Callable[[], object], int], list[float]]                # of so many calls, in ascending order
    stream_bytes_per_s: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row. Times in us, of a step."""

    columns: int
    sequences: int
    step_us: list[float]
    row_us: float | None            # of several steps a launch; None where a sequence has several columns
    graph_us: list[float]
    phases_us: dict[str, float]
    distinct: list[int]             # experts read, by layer
    num_bytes: int
    parts: dict[str, int] = field(default_factory=dict)


def bench_engine(options: BenchOptions, *, say: Callable[[str], None] = print, machine: Callable[[], Machine] | None = None
                 ) -> list[Measured] | list[MeasuredRound]:
    """Measure and print as it goes: steps, or with `draft` rounds.

    Errors: NotImplementedError without an sm_90 GPU or for a model that no kernel is built for; ValueError for a model or sizes that are none.
    """
    graph, directory = _graph(options.model)
    reach = rounds_context(options.context) if options.draft else options.context + STEPS_IN_A_ROW
    if reach > graph.max_length:
        raise ValueError(f"context: {options.context} and {reach - options.context} positions more do not fit the model's context of {graph.max_length}.")
    if options.layers is not None and options.layers > graph.num_layers:
        raise ValueError(f"layers: the model has {graph.num_layers}; got {options.layers}.")
    made = (machine or this_machine)()
    if options.draft:
        return _bench_rounds(options, graph=graph, directory=directory, say=say, machine=made)
    shape = step_shape(graph, num_layers=options.layers, max_length=-(-reach // CHUNK) * CHUNK)
    stream = _introduce(options, shape, graph, directory, say=say, machine=made,
                        what=f"{options.per_sequence} column{'s' * (options.per_sequence > 1)} a sequence, {LAYER_STAMPS} barriers a layer")
    weights = _weights(options, shape, graph, directory, machine=made)
    rows = [measure(weights, columns, options=options, machine=made) for columns in options.columns]
    for line in table(rows, stream=stream):
        say(line)
    return rows


def _introduce(options: BenchOptions, shape: StepShape, graph: ModelGraph, directory: Path | None, *, say: Callable[[str], None], machine: Machine,
               what: str) -> float:
    """Says what is measured where; returns the read stream in bytes/s."""
    stream = machine.stream_bytes_per_s()
    say(f"{options.model}, {shape.num_layers} of {graph.num_layers} layers, {'random weights' if directory is None else 'weights of the directory'}, context "
        f"{options.context}, {what}\n{machine.environment}\nread stream of this run: {stream / 1e12:.3f} TB/s\n")
    return stream


def _weights(options: BenchOptions, shape: StepShape, graph: ModelGraph, directory: Path | None, *, machine: Machine) -> StepWeights:
    if directory is None:
        return StepWeights.random(shape, seed=options.seed, device=machine.device, programs=machine.programs)
    return read_step_weights(directory, graph=graph, config=read_json(directory / "config.json"), shape=shape, device=machine.device, programs=machine.programs)


def _bench_rounds(options: BenchOptions, *, graph: ModelGraph, directory: Path | None, say: Callable[[str], None], machine: Machine) -> list[MeasuredRound]:
    """Rounds with the directory's draft, or with one of random weights of the sizes that shapes.py has."""
    length, num_layers = rounds_context(options.context), options.layers or graph.num_layers
    config = draft_of(options.model) if directory is None else read_config(draft_directory(directory))
    taps = config.target_layer_ids
    if len(taps) > num_layers:
        raise ValueError(f"layers: the draft taps {len(taps)} layers; got {num_layers}.")
    if max(taps) >= num_layers:     # of a few layers others are tapped
        taps = tuple(range(num_layers - len(taps), num_layers))
    shape = step_shape(graph, num_layers=num_layers, max_length=length, taps=taps)
    stream = _introduce(options, shape, graph, directory, say=say, machine=machine, what="rounds with a draft head")
    weights = _weights(options, shape, graph, directory, machine=machine)
    if directory is None:
        draft = DraftWeights.random(draft_shape(config, max_length=length), seed=options.seed, device=machine.device)
    else:
        draft = read_draft_weights(draft_directory(directory), embedding_VD=weights.embedding_VD, max_length=length, device=machine.device)
    rows: list[MeasuredRound] = []
    for sequences in options.sequences:
        of_these = measure_rounds(weights, draft, sequences, context=options.context, seed=options.seed, machine=machine, step_bytes=step_bytes)
        for line in rounds_table(of_these, stream=stream, assumed=options.assume_acceptance):
            say(line)
        rows += of_these
    return rows


def _graph(model: str) -> tuple[ModelGraph, Path | None]:
    if Path(model).is_dir():
        return graph_of(read_json(Path(model) / "config.json"), where=model), Path(model)
    return shape_of(model), None


def measure(weights: StepWeights, columns: int, *, options: BenchOptions, machine: Machine) -> Measured:
    """A step of so many live columns, on a cache of random keys and values."""
    shape, each = weights.shape, min(options.per_sequence, columns)
    sequences = -(-columns // each)
    width = min(c for c in COLUMNS if c >= columns)
    chunks = -(-shape.max_length // CHUNK)
    state = StepState.of(shape, num_columns=width, num_slots=sequences, num_pages=sequences * chunks, device=machine.device)
    state.pages_SP.copy_(torch.arange(sequences * chunks, dtype=torch.int32).view(sequences, chunks))
    state.cache.normal_(generator=torch.Generator(device=machine.device).manual_seed(options.seed))
    ids = torch.randint(shape.vocab_size, (columns,), generator=torch.Generator().manual_seed(options.seed)).tolist()
    live = [Column(token_id=token, slot=c // each, position=options.context - min(each, columns - c // each * each) + c % each) for c, token in enumerate(ids)]
    inputs = StepInputs.of([*live, *[None] * (width - columns)])
    kernel = machine.kernel(weights, state)
    step_us = machine.timed_us(lambda: kernel.run(inputs), REPEATS)
    kernel.check_fault()
    distinct = state.distinct_L.tolist()
    row_us = None
    if each == 1:
        row_us = statistics.median(machine.timed_us(lambda: kernel.run(inputs, num_steps=STEPS_IN_A_ROW), PHASE_REPEATS)) / STEPS_IN_A_ROW
        kernel.check_fault()
    kernel.set_inputs(inputs)
    graph = kernel.capture()
    graph_us = machine.timed_us(graph.replay, REPEATS)
    kernel.check_fault()
    stamped = machine.kernel(weights, state, profile=True)
    found = []
    for _ in range(PHASE_REPEATS + 1):      # the first one compiles
        stamped.run(inputs)
        stamped.check_fault()
        found.append(stamped.phase_us())
    parts = step_bytes(weights, distinct=distinct, columns=columns, sequences=sequences, context=options.context)
    return Measured(columns=columns, sequences=sequences, step_us=step_us, row_us=row_us, graph_us=graph_us, distinct=distinct, num_bytes=sum(parts.values()),
                    parts=parts, phases_us={name: statistics.median(one[name] for one in found[1:]) for name in found[0]})


def step_bytes(weights: StepWeights, *, distinct: Sequence[int], columns: int, sequences: int, context: int) -> dict[str, int]:
    """What a step must move: weights with the pad of their layouts, experts that were chosen once each, every sequence's keys and values, logits written."""
    shape: StepShape = weights.shape
    cached = 2 * shape.heads.num_kv_heads * shape.heads.head_dim * 2
    return {"dense weights": weights.dense_bytes, "experts": sum(distinct) * weights.bytes_per_expert,
            "keys and values": sequences * context * cached * shape.num_layers, "logits": 4 * columns * shape.vocab_size}


def table(rows: Sequence[Measured], *, stream: float) -> list[str]:
    """Two Markdown tables: steps, then phases."""
    lines = ["| columns (sequences) | us a step (p20, p80) | in a row | CUDA graph (p20, p80) | MB | floor, us | of the stream | experts a layer | tokens/s |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        floor = row.num_bytes / stream * 1e6
        best = min(x for x in (statistics.median(row.step_us), row.row_us) if x is not None)
        lines.append(
            f"| {row.columns} ({row.sequences}) | {_spread(row.step_us)} | {'-' if row.row_us is None else f'{row.row_us:.1f}'} | {_spread(row.graph_us)} | "
            f"{row.num_bytes / 1e6:.1f} | {floor:.1f} | {100 * floor / best:.1f} % | {statistics.mean(row.distinct):.1f} | {row.columns / best * 1e6:.1f} |")
    layers = len(rows[0].distinct)

    def us(row: Measured, name: str) -> str:
        time = row.phases_us[name]
        return f"{time:.1f}" if name in ONCE else f"{time:.1f} ({time / layers:.2f})"

    lines += _per_row(f"us of {layers} layers (of one)", rows, [(name, lambda row, name=name: us(row, name)) for name in rows[0].phases_us])  # type: ignore[misc]
    lines += [_line("sum", [f"{sum(row.phases_us.values()):.1f}" for row in rows])]
    return lines + _per_row("MB", rows, [(part, lambda row, part=part: f"{row.parts[part] / 1e6:.2f}") for part in rows[0].parts])  # type: ignore[misc]


def _per_row(title: str, rows: Sequence[Measured], cells: Sequence[tuple[str, Callable[[Measured], str]]]) -> list[str]:
    """A table with a column for each of the rows measured."""
    return ["", _line(title, [f"T = {row.columns}" for row in rows]), "|---" * (len(rows) + 1) + "|",
            *(_line(name, [cell(row) for row in rows]) for name, cell in cells)]


def _line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({times[len(times) // 5]:.1f}, {times[-1 - len(times) // 5]:.1f})"


def this_machine() -> Machine:
    """Errors: NotImplementedError, saying what is needed, where the kernel cannot run."""
    gpu = find_gpu()
    obstacle = obstacle_of(gpu)
    if obstacle is not None:
        raise NotImplementedError(f"bench engine: needs an NVIDIA GPU of compute capability 9.0 (H100, H200) and a CUDA build of torch; {obstacle}.")
    assert gpu is not None, "no GPU is an obstacle"
    return Machine(device="cuda", programs=gpu.num_sms, environment=_environment(gpu), kernel=StepKernel, round_kernel=RoundKernel,
                   timed_us=lambda call, repeats: timed_us(call, repeats=repeats),
                   stream_bytes_per_s=lambda: stream_bytes_per_s(programs=gpu.num_sms, repeats=REPEATS))


def _environment(gpu: Gpu) -> str:
    return (f"{gpu.name}, {gpu.num_sms} SMs; torch {torch.__version__}, triton {importlib.metadata.version('triton')}, CUDA {torch.version.cuda}, python "
            f"{platform.python_version()}")
