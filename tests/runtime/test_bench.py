"""`kilotok bench engine`: sizes by name, what a step moves by hand, the whole run on a stand-in for the machine, and one clear error without a GPU."""

import dataclasses
import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import POCKET, export_experts
from step_models import tiny_weights

from kilotok.kernels.persistent import DraftState, DraftWeights, RoundInputs, RoundRef, StepInputs, StepRef, StepState, StepWeights
from kilotok.kernels.persistent.rounds import RoundKernel
from kilotok.kernels.persistent.step import StepKernel
from kilotok.quant.checkpoint.metadata import read_json
from kilotok.runtime import bench as module
from kilotok.runtime.archs import graph_of
from kilotok.runtime.bench import BenchOptions, Machine, Measured, bench_engine, measure, step_bytes, table
from kilotok.runtime.bench_rounds import MeasuredRound, draft_bytes, rounds_table
from kilotok.runtime.cli import main as kilotok
from kilotok.runtime.draft_weights import draft_shape
from kilotok.runtime.shapes import DRAFTS, SHAPES, shape_of
from kilotok.runtime.step_weights import step_shape

PHASES = ("qkv", "attention", "out", "router", "gate_up", "down", "add", "head", "sample", "finish")


class TwinKernel:
    """As StepKernel, on the twin; remembers what it was given."""

    made: list["TwinKernel"] = []

    def __init__(self, weights: StepWeights, state: StepState, *, profile: bool = False) -> None:
        self.twin, self.state, self.profile, self.inputs, self.checks = StepRef(weights, state), state, profile, list[tuple[StepInputs, int]](), 0
        self.made.append(self)

    def run(self, inputs: StepInputs, *, num_steps: int = 1) -> None:
        self.inputs.append((inputs, num_steps))
        self.twin.step(inputs)

    def set_inputs(self, inputs: StepInputs) -> None:
        pass

    def capture(self) -> Any:
        return type("Graph", (), {"replay": lambda _: None})()

    def check_fault(self) -> None:
        self.checks += 1

    def phase_us(self) -> dict[str, float]:
        assert self.profile
        return {name: 10.0 * (i + 1) for i, name in enumerate(PHASES)}


class TwinRounds(TwinKernel):
    """As RoundKernel, on the twin."""

    def __init__(self, weights: StepWeights, state: StepState, draft: DraftWeights, drafts: DraftState, *, profile: bool = False) -> None:
        super().__init__(weights, state, profile=profile)
        self.rounds, self.asked = RoundRef(weights, state, draft, drafts), list[tuple[RoundInputs, int]]()

    def set_rounds(self, inputs: RoundInputs) -> None:
        pass

    def run_rounds(self, inputs: RoundInputs, *, num_rounds: int = 1) -> None:
        self.asked.append((inputs, num_rounds))
        self.rounds.run_rounds(inputs.clone(), 1)

    def capture_rounds(self) -> Any:
        return self.capture()

    def phase_us(self) -> dict[str, float]:
        assert self.profile
        return {"draft_qkv": 20.0, "head": 30.0}


def timed_us(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    return [100.0 + i for i in range(repeats)]


def stand_in() -> Machine:
    TwinKernel.made.clear()
    return Machine(device="cpu", programs=132, environment="a stand-in", kernel=TwinKernel, round_kernel=TwinRounds, timed_us=timed_us,
                   stream_bytes_per_s=lambda: 4e12)


def test_the_stand_in_is_called_as_the_kernel_is() -> None:
    for name in ("run", "set_inputs", "capture", "check_fault", "phase_us"):
        ours, theirs = (inspect.signature(getattr(kernel, name)).parameters for kernel in (TwinKernel, StepKernel))
        assert set(ours) <= set(theirs) and all(ours[p].kind == theirs[p].kind for p in ours), name
    for name in ("run_rounds", "set_rounds", "capture_rounds"):
        ours, theirs = (inspect.signature(getattr(kernel, name)).parameters for kernel in (TwinRounds, RoundKernel))
        assert set(ours) <= set(theirs) and all(ours[p].kind == theirs[p].kind for p in ours), name
    assert {"stop", "tokens_so_far"} <= set(dir(StepKernel)) and {"weights", "state", "profile"} <= set(inspect.signature(StepKernel).parameters)


def test_the_named_shapes_are_the_models() -> None:
    assert SHAPES["pocket"] == graph_of(read_json(POCKET / "config.json"), where="pocket")
    weights = {name: sum(w for w in (g.num_layers * g.num_experts * 3 * g.hidden_size * g.expert_hidden, g.vocab_size * g.hidden_size * (2 - g.tied_head),
                                     g.num_layers * g.hidden_size * g.head_dim * (2 * g.num_heads + 2 * g.num_kv_heads)))
               for name, g in SHAPES.items()}
    assert weights["qwen3-30b-a3b"] == pytest.approx(30.5e9, rel=0.01) and weights["smollm2-moe"] == pytest.approx(214e6, rel=0.01)
    for name, graph in SHAPES.items():
        assert step_shape(graph).heads.qkv_width == (graph.num_heads + 2 * graph.num_kv_heads) * graph.head_dim, name
    with pytest.raises(ValueError, match=r"^shape: must be one of qwen3-30b-a3b, smollm2-moe, pocket, or a directory .*; got 'qwen3-30b'\. Did you mean "):
        shape_of("qwen3-30b")


def test_the_bytes_of_a_step_by_hand() -> None:
    weights = tiny_weights()
    parts = step_bytes(weights, distinct=[3, 2], columns=5, sequences=2, context=200)
    per_expert = weights.experts.gate_up.layout.num_bytes + weights.experts.down.layout.num_bytes
    assert parts == {"dense weights": 4 * sum(w.words.numel() for w in (weights.qkv, weights.out, weights.router, weights.head)), "experts": 5 * per_expert,
                     "keys and values": 2 * 200 * 2 * (2 * 2 * 32) * 2, "logits": 4 * 5 * 300}


@pytest.mark.parametrize(("columns", "each", "slots", "positions"), [
    (1, 1, [0], [199]), (3, 1, [0, 1, 2], [199] * 3), (8, 8, [0] * 8, list(range(192, 200))), (11, 8, [0] * 8 + [1] * 3, [*range(192, 200), 197, 198, 199]),
    (2, 8, [0, 0], [198, 199])])
def test_the_columns_of_a_step_are_the_last_of_their_sequences(columns: int, each: int, slots: list[int], positions: list[int]) -> None:
    row = measure(tiny_weights(), columns, options=BenchOptions(model="x", context=200, per_sequence=each), machine=stand_in())
    inputs, _ = TwinKernel.made[0].inputs[0]
    live = (inputs.slots_C >= 0).nonzero().flatten().tolist()
    assert live == list(range(columns)) and len(inputs.slots_C) == (8 if columns <= 8 else 16)
    assert inputs.slots_C[:columns].tolist() == slots and inputs.positions_C[:columns].tolist() == positions
    assert (row.sequences, row.row_us is None) == (len(set(slots)), len(set(slots)) < columns) and all(k.checks for k in TwinKernel.made)
    assert 1 <= min(row.distinct) <= max(row.distinct) <= 4 and row.num_bytes == sum(row.parts.values())


def test_a_whole_run_prints_steps_phases_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dataclasses.replace(SHAPES["pocket"], hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=300, num_layers=3, expert_hidden=32)
    monkeypatch.setitem(SHAPES, "small", graph)
    said: list[str] = []
    rows = bench_engine(BenchOptions(model="small", columns=(1, 4), context=130, layers=2), say=said.append, machine=stand_in)
    text = "\n".join(said)
    assert text.startswith("small, 2 of 3 layers, random weights, context 130, 1 column a sequence, 7 barriers a layer\na stand-in\nread stream of this run: 4")
    floor = rows[1].num_bytes / 4e6
    best = min(statistics.median(rows[1].step_us), rows[1].row_us or 0)
    assert f"| 4 (4) | 114.5 (106.0, 123.0) | 3.2 | 114.5 (106.0, 123.0) | {rows[1].num_bytes / 1e6:.1f} | {floor:.1f} | {100 * floor / best:.1f} % |" in text
    assert "| attention | 20.0 (10.00) | 20.0 (10.00) |" in text and "| head | 80.0 | 80.0 |" in text and "| sum | 550.0 | 550.0 |" in text
    assert f"| experts | {rows[0].parts['experts'] / 1e6:.2f} | {rows[1].parts['experts'] / 1e6:.2f} |" in text


def test_weights_of_a_directory(tmp_path: Path) -> None:
    said: list[str] = []
    out = export_experts(POCKET, tmp_path / "out")
    bench_engine(BenchOptions(model=str(out), columns=(1,), context=8, layers=1), say=said.append, machine=stand_in)
    assert "1 of 6 layers, weights of the directory" in said[0] and TwinKernel.made[0].twin.weights.shape.num_layers == 1


def test_a_table_of_verifying_steps_has_no_steps_in_a_row() -> None:
    row = Measured(columns=8, sequences=1, step_us=[100.0] * 5, row_us=None, graph_us=[120.0] * 5, phases_us={"qkv": 1.0, "head": 2.0}, distinct=[4, 2],
                   num_bytes=200_000_000, parts={"experts": 200_000_000})
    assert table([row], stream=4e12)[2] == "| 8 (1) | 100.0 (100.0, 100.0) | - | 120.0 (120.0, 120.0) | 200.0 | 50.0 | 50.0 % | 3.0 | 80000.0 |"


def test_rounds_are_measured_by_how_much_they_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dataclasses.replace(SHAPES["pocket"], hidden_size=64, num_heads=4, num_kv_heads=2, vocab_size=300, num_layers=4, expert_hidden=32)
    draft = dataclasses.replace(DRAFTS["pocket"], hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=300, intermediate_size=64,
                                num_hidden_layers=1, target_layer_ids=(1, 3), num_target_layers=4)
    monkeypatch.setitem(SHAPES, "small", graph)
    monkeypatch.setitem(DRAFTS, "small", draft)
    said: list[str] = []
    rows = bench_engine(BenchOptions(model="small", draft=True, sequences=(2,), context=40, layers=2, assume_acceptance=(3.5,)), say=said.append,
                        machine=stand_in)
    rounds = [row for row in rows if isinstance(row, MeasuredRound)]
    assert [row.verified for row in rounds] == [None, *range(8)]
    kernel = TwinKernel.made[0]
    assert isinstance(kernel, TwinRounds) and kernel.rounds.weights.shape.taps == (0, 1), "of a few layers, the last are tapped"
    assert {(inputs.limits_S.tolist()[0], number) for inputs, number in kernel.asked} == {(v, n) for v in range(8) for n in (1, 16)}
    assert all(inputs.slots_S.tolist() == [0, 1] and inputs.positions_S.tolist() == [39, 39] for inputs, _ in kernel.asked)
    text = "\n".join(said)
    assert "small, 2 of 4 layers, random weights, context 40, rounds with a draft head\na stand-in" in text
    assert "tokens/s if a round committed 3.5 (assumed)" in text and "| 2 | no draft | 114.5 (106.0, 123.0) |" in text and "(1, measured)" in text
    best = rounds[8].best_us
    lines = {line.split(" | ")[1]: line for line in said if line.startswith("| 2 | ")}
    assert lines["7"].endswith(f"| {2 * 3.5 / best * 1e6:.1f} |") and lines["2"].endswith("| - |"), "no round of 2 commits 3.5"
    assert "| draft_qkv | 20.0 |" in text and "| sum | 50.0 |" in text


def test_the_bytes_of_a_draft_by_hand() -> None:
    shape = draft_shape(DRAFTS["pocket"], max_length=512)
    weights, draft = tiny_weights(), DraftWeights.random(shape, seed=1, device="cpu")
    parts = draft_bytes(draft, weights, sequences=2, context=500)
    assert parts["draft's keys and values"] == 2 * 128 * 2 * 4 * 32 * 2 * 3 and parts["head"] == 4 * weights.head.words.numel()
    assert parts["draft weights"] >= 2 * (3 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 448) + 3 * 256 * 256 + 3 * 256 * 256)


def test_a_row_of_rounds_names_what_is_assumed() -> None:
    def row(verified: int | None, us: float) -> MeasuredRound:
        return MeasuredRound(sequences=1, verified=verified, us=[us] * 5, row_us=us, graph_us=None, phases_us={}, distinct=[4, 2], num_bytes=200_000_000)

    lines = rounds_table([row(None, 100.0), row(7, 200.0)], stream=4e12, assumed=[4.0])
    assert lines[2] == "| 1 | no draft | 100.0 (100.0, 100.0) | 100.0 | - | 200.0 | 50.0 | 50.0 % | 3.0 | 1.00 | 10000.0 (1, measured) |"
    assert lines[3] == "| 1 | 7 | 200.0 (200.0, 200.0) | 200.0 | - | 200.0 | 50.0 | 25.0 % | 3.0 | 2.00 | 20000.0 |"


def test_rounds_of_a_directory_need_a_draft_and_layers_to_tap(tmp_path: Path) -> None:
    out = export_experts(POCKET, tmp_path / "out")
    with pytest.raises(ValueError, match=r"^--draft: .* has no dflash/"):
        bench_engine(BenchOptions(model=str(out), draft=True), say=lambda _: None, machine=stand_in)
    with pytest.raises(ValueError, match=r"^layers: the draft taps 3 layers; got 2\.$"):
        bench_engine(BenchOptions(model="pocket", draft=True, layers=2), say=lambda _: None, machine=stand_in)


@pytest.mark.parametrize(("options", "error"), [
    ({"sequences": (9,)}, r"^sequences: must lie in 1\.\.8"), ({"draft": True, "assume_acceptance": (9.0,)}, "^assume_acceptance: a round commits 1 to 8"),
    ({"assume_acceptance": (4.0,)}, "^assume_acceptance: is of rounds"),
    ({"columns": (0,)}, r"^columns: must lie in 1\.\.64; got \[0\]\."), ({"columns": ()}, "^columns: "), ({"columns": (65,)}, "^columns: "),
    ({"per_sequence": 9}, r"^per_sequence: must lie in 1\.\.8; got 9"), ({"context": 3, "per_sequence": 4}, "^context: must hold the 4 columns"),
    ({"layers": 0}, "^layers: must be at least 1")])
def test_options_that_do_not_fit(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        BenchOptions(model="pocket", **options)


def test_sizes_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"^context: 2040 and 32 positions more do not fit the model's context of 2048\.$"):
        bench_engine(BenchOptions(model="pocket", context=2040), machine=stand_in)
    with pytest.raises(ValueError, match=r"^layers: the model has 6; got 7\.$"):
        bench_engine(BenchOptions(model="pocket", layers=7), machine=stand_in)


def test_without_a_gpu_it_is_one_line_that_says_what_is_needed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_gpu", lambda: None)
    assert kilotok(["bench", "engine", "qwen3-30b-a3b"]) == 2
    assert capsys.readouterr() == ("", "error: bench engine: needs an NVIDIA GPU of compute capability 9.0 (H100, H200) and a CUDA build of torch; "
                                       "torch sees no CUDA device here.\n")
    assert kilotok(["bench", "engine", "qwen3"]) == 2
    assert "error: shape: must be one of qwen3-30b-a3b" in capsys.readouterr().err


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchOptions] = []
    monkeypatch.setattr("kilotok.runtime.cli.bench_engine", asked.append)
    assert kilotok(["bench", "engine", "pocket"]) == 0
    assert kilotok(["bench", "engine", "d", "--columns", "1", "2", "64", "--per-sequence", "4", "--context", "9", "--layers", "3", "--seed", "5"]) == 0
    assert kilotok(["bench", "engine", "pocket", "--draft", "--sequences", "1", "4", "--assume-acceptance", "4.29", "5.56"]) == 0
    assert asked.pop() == BenchOptions(model="pocket", draft=True, sequences=(1, 4), assume_acceptance=(4.29, 5.56))
    assert asked == [BenchOptions(model="pocket"), BenchOptions(model="d", columns=(1, 2, 64), per_sequence=4, context=9, layers=3, seed=5)]
