"""Which executor runs and why: never in silence, and never another than was asked for."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import POCKET, ROOT, export_experts
from step_models import TINY, Counted, weights_of_directory
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.kernels.persistent import DraftShape, RoundInputs, StepInputs, StepState
from kilotok.kernels.persistent.step_code import SHARED_BYTES
from kilotok.runtime import executors as module
from kilotok.runtime import loading
from kilotok.runtime.executors import (
    SPARE_BYTES,
    Choice,
    choose_executor,
    kernel_picks,
    load_best_executor,
    pages_that_fit,
    runner_of,
    warm_up,
)
from kilotok.runtime.gpu import Gpu, obstacle_of
from kilotok.runtime.loading import load_served
from kilotok.runtime.persistent import PersistentExecutor, ResidentRunner, RoundRunner
from kilotok.runtime.reference import ReferenceExecutor

H200 = Gpu(name="NVIDIA H200", capability=(9, 0), shared_bytes=SHARED_BYTES, num_sms=132)
OTHERS = {
    "torch sees no CUDA device here": None,
    "NVIDIA A100 has compute capability 8.0": Gpu(name="NVIDIA A100", capability=(8, 0), shared_bytes=166912, num_sms=108),
    "NVIDIA B200 has compute capability 10.0": Gpu(name="NVIDIA B200", capability=(10, 0), shared_bytes=SHARED_BYTES, num_sms=148),
    f"NVIDIA H200 gives a program 101376 bytes of shared memory, and the step takes {SHARED_BYTES}": Gpu(
        name="NVIDIA H200", capability=(9, 0), shared_bytes=101376, num_sms=132)}
NEEDS = r"^executor: the persistent one needs an NVIDIA GPU of compute capability 9\.0 \(H100, H200\)"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out")


def test_a_supported_gpu_runs_the_persistent_executor(out: Path) -> None:
    for options in ({}, {"device": "cuda"}, {"executor": "persistent"}, {"dtype": "bfloat16"}):
        assert choose_executor(out, gpu=lambda: H200, **options) == Choice(kind="persistent", device="cuda", reason="NVIDIA H200 runs it")


@pytest.mark.parametrize("obstacle", OTHERS)
def test_another_gpu_or_none_runs_the_reference_and_says_why(obstacle: str, out: Path) -> None:
    gpu = OTHERS[obstacle]
    assert obstacle_of(gpu) == obstacle
    assert choose_executor(out, gpu=lambda: gpu) == Choice(kind="reference", device="cpu", reason=f"the persistent one does not run: {obstacle}")
    with pytest.raises(NotImplementedError, match=rf"{NEEDS}.*; {obstacle}\. Take --executor auto or reference\.$"):
        choose_executor(out, executor="persistent", gpu=lambda: gpu)
    if gpu is not None:
        assert choose_executor(out, device="cuda", gpu=lambda: gpu).device == "cuda"


@pytest.mark.parametrize(("options", "change", "obstacle"), [
    ({"device": "cpu"}, {}, "the device is cpu"), ({"dtype": "float32"}, {}, "it computes in bfloat16, not float32"),
    ({}, {"quantization_config": None}, r"the experts are not in MXFP4 \(no quantization_config\)"),
    ({}, {"head_dim": 16}, "Heads: built for head_dim 32, 64 or 128 and up to 16 query heads a key/value head; got 16 and 2"),
    ({}, {"moe_intermediate_size": 72}, "StepShape: expert_hidden must be a multiple of 32, one MX block; got 72")])
def test_what_the_kernel_cannot_do_is_named(options: dict[str, str], change: dict[str, Any], obstacle: str, out: Path, tmp_path: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    choice = choose_executor(tmp_path, gpu=lambda: H200, **options)
    assert choice.kind == "reference" and choice.device == "cpu"
    with pytest.raises(NotImplementedError, match=f"{NEEDS}.*; {obstacle}"):
        choose_executor(tmp_path, executor="persistent", gpu=lambda: H200, **options)
    assert choose_executor(tmp_path, executor="reference", gpu=lambda: H200, **options).reason == "it was asked for"


def test_options_that_are_none(out: Path) -> None:
    with pytest.raises(ValueError, match=r"^executor: must be one of auto, reference, persistent; got 'fast'\.$"):
        choose_executor(out, executor="fast")
    with pytest.raises(ValueError, match=r"^device: must be one of auto, cpu, cuda; got 'tpu'\.$"):
        choose_executor(out, device="tpu")
    with pytest.raises(ValueError, match=r"^device: cuda asked for, but torch sees no CUDA device\."):
        choose_executor(out, device="cuda", gpu=lambda: None)


# ---- loading


def twin_of(directory: Path, *, taps: tuple[int, ...], num_slots: int, draft_dir: Path | None = None) -> PersistentExecutor:
    weights = weights_of_directory(directory, taps=taps)
    return PersistentExecutor(weights, make_runner=lambda state: Counted(weights, state, log=[], kept=None), num_slots=num_slots, name="the twin")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a GPU, whose kernel is the twin."""
    real = choose_executor
    monkeypatch.setattr(loading, "choose_executor", lambda *args, **options: real(*args, gpu=lambda: H200, **options))
    monkeypatch.setattr(module, "load_persistent", twin_of)


def test_a_served_directory_says_which_executor_runs_and_why(out: Path, h200: None) -> None:
    served = load_served(out, name=None, use_draft=True, device="auto", dtype=None, max_running=3)
    assert isinstance(served.executor, PersistentExecutor) and served.executor.pool.num_slots == 3 and served.max_length == 2048
    said = served.description
    assert (said["executor"], said["executor_reason"], said["dtype"]) == ("the twin", "NVIDIA H200 runs it", "bfloat16")
    assert said["column_rule"].startswith("steps of up to 64 columns in tiles of 8") and served.fingerprint.endswith("-persistent-bfloat16")
    reference = load_served(out, name=None, use_draft=True, device="auto", dtype=None, executor="reference")
    assert isinstance(reference.executor, ReferenceExecutor) and reference.description["executor_reason"] == "it was asked for"
    ids = list(range(40, 60))
    logits = served.executor.open().read(ids).logits_TV, reference.executor.open().read(ids).logits_TV  # type: ignore[attr-defined]
    assert float((logits[0] - logits[1]).abs().max()) < 0.1 * float(logits[1].abs().max())


def test_the_shipped_draft_reads_the_persistent_executors_features(out: Path, h200: None, tmp_path: Path) -> None:
    """Its taps, in the order of its config; embedding and head in rows."""
    taps = tuple(json.loads((ROOT / "recipes/pocket/draft/config.json").read_text())["dflash_config"]["target_layer_ids"])
    executor = twin_of(out, taps=taps, num_slots=1)
    reference, _ = load_best_executor(out, Choice(kind="reference", device="cpu", reason="x"), dtype="float32", taps=taps, num_slots=1, may_fall_back=False)
    assert_equal(executor.head_VD.float(), reference.head_VD, what="head")
    assert_equal(executor.embedding_VD.float(), reference.embedding_VD, what="embedding")
    features = executor.open().read([50, 51, 52]).features_TF.float(), reference.open().read([50, 51, 52]).features_TF
    assert features[0].shape == features[1].shape and float((features[0] - features[1]).abs().max()) < 0.05 * float(features[1].abs().max())


def test_a_kernel_that_is_not_built_for_a_model_falls_back_aloud_or_is_an_error(out: Path, monkeypatch: pytest.MonkeyPatch,
                                                                                caplog: pytest.LogCaptureFixture) -> None:
    def refuse(directory: Path, **options: Any) -> PersistentExecutor:
        raise NotImplementedError("StepKernel: no registers left.")

    monkeypatch.setattr(module, "load_persistent", refuse)
    choice, options = Choice(kind="persistent", device="cuda", reason="NVIDIA H200 runs it"), {"dtype": "float32", "taps": (), "num_slots": 1}
    monkeypatch.setattr(module, "load_executor", lambda directory, **how: how)
    with caplog.at_level(logging.WARNING):
        executor, reason = load_best_executor(out, choice, may_fall_back=True, **options)  # type: ignore[arg-type]
    assert executor == {"device": "cuda", "dtype": torch.float32, "taps": ()}
    assert reason == "the persistent one does not run: StepKernel: no registers left" and reason in caplog.text
    with pytest.raises(NotImplementedError, match=r"^StepKernel: no registers left\.$"):
        load_best_executor(out, choice, may_fall_back=False, **options)  # type: ignore[arg-type]


def test_the_cache_takes_what_the_memory_holds() -> None:
    page = TINY.num_layers * 2 * 2 * 32 * 128 * 2
    assert pages_that_fit(TINY, num_slots=8, free_bytes=SPARE_BYTES + 1000 * page) == 24
    assert pages_that_fit(TINY, num_slots=8, free_bytes=SPARE_BYTES + 7 * page + 5) == 7
    with pytest.raises(RuntimeError, match=r"^executor: the cache of one sequence of 300 tokens takes 0\.0 GiB"):
        pages_that_fit(TINY, num_slots=8, free_bytes=SPARE_BYTES + 2 * page)
    draft = DraftShape(hidden_size=64, num_layers=3, heads=replace(TINY.heads, num_kv_heads=1), intermediate_size=64, num_taps=2, mask_token_id=0, rms_eps=1e-6,
                       rope_theta=1e4, max_length=300)
    both = page + 3 * 2 * 1 * 32 * 128 * 2
    assert [pages_that_fit(TINY, num_slots=8, free_bytes=SPARE_BYTES + 7 * both - less, draft=draft) for less in (0, 1)] == [7, 6]


def test_a_draft_that_rounds_are_not_built_for_is_left_to_torch_and_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[DraftModel | None] = []

    def load(directory: Path, *, taps: tuple[int, ...], num_slots: int, model: DraftModel | None) -> str:
        loaded.append(model)
        if model is not None and len(loaded) == 1:
            raise NotImplementedError("draft in the kernel: no sinks.")
        return "an executor"

    monkeypatch.setattr(module, "_load_persistent", load)
    options: dict[str, Any] = {"taps": (2, 4, 5), "num_slots": 1, "draft_dir": ROOT / "recipes/pocket/draft"}
    assert module.load_persistent(Path(), **options) == "an executor" and isinstance(loaded[0], DraftModel) and loaded[1:] == [None]
    assert "drafts are made by the draft head in torch, and verified a step at a time: draft in the kernel: no sinks." in caplog.text
    assert module.load_persistent(Path(), **options) == "an executor" and isinstance(loaded[2], DraftModel) and len(loaded) == 3 and len(caplog.records) == 1


def test_warming_up_makes_every_width_and_leaves_nothing_open(out: Path) -> None:
    executor = twin_of(out, taps=(), num_slots=2)
    warm_up(executor)
    assert set(executor._runners) == {8, 16, 32, 64} and executor.pool.num_free == executor.pool.num_pages


def test_a_width_that_no_kernel_is_built_for_is_given_up_aloud(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = weights_of_directory(out)

    def make(state: StepState, *, widest: int) -> Counted:
        if state.num_columns > widest:
            raise NotImplementedError(f"StepKernel: no registers for {state.num_columns} columns.")
        return Counted(weights, state, log=[], kept=None)

    executor = PersistentExecutor(weights, make_runner=lambda state: make(state, widest=16))
    warm_up(executor)
    assert executor.num_columns == 16 and executor.pool.num_free == executor.pool.num_pages
    assert "steps have at most 16 columns here: StepKernel: no registers for 32 columns." in caplog.text
    with pytest.raises(NotImplementedError, match=r"^StepKernel: no registers for 8 columns\.$"):
        warm_up(PersistentExecutor(weights, make_runner=lambda state: make(state, widest=0)))


# ---- the kernel as a runner


class FakeKernel:
    """Takes three looks for its steps; `stop` ends it before the next. faults: of the next checks."""

    def __init__(self, *, faults: Sequence[Exception | None] = ()) -> None:
        self.faults, self.calls = list(faults), list[Any]()
        self.stopped = False
        self.state = SimpleNamespace(num_columns=16)

    def run(self, inputs: StepInputs, *, num_steps: int = 1) -> None:
        self.calls.append(("run", inputs.slots_C.tolist().count(0), num_steps))

    def set_inputs(self, inputs: StepInputs) -> None:
        self.calls.append("set")

    def capture(self) -> Any:
        self.calls.append("capture")
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    def stop(self) -> None:
        self.stopped = True
        self.calls.append("stop")

    def check_fault(self) -> None:
        self.calls.append("check")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault

    def tokens_so_far(self) -> Tensor:
        return torch.full((2 if self.stopped else 5, 8), 7, dtype=torch.int32)


class FakeEvent:
    def __init__(self) -> None:
        self.looks = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 3


@pytest.mark.parametrize("stops", [False, True])
def test_the_host_may_end_several_steps_and_a_fault_is_an_error(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "Event", FakeEvent)
    kernel = FakeKernel(faults=(None, None, RuntimeError("waited in vain")))
    runner = runner_of(kernel)  # type: ignore[arg-type]
    assert isinstance(runner, ResidentRunner) and kernel.calls == [("run", 1, 1), "check"]     # one live column, slot 0
    inputs = StepInputs.dead(8)
    assert len(runner.run_steps(inputs, 5, stopped=lambda: stops)) == (2 if stops else 5)
    assert kernel.calls[2:] == [("run", 0, 5), *(["stop"] if stops else []), "check"]
    with pytest.raises(RuntimeError, match="waited in vain"):
        runner.step(inputs)
    runner.step(inputs)


class FakeRounds(FakeKernel):
    def run_rounds(self, inputs: RoundInputs, *, num_rounds: int) -> None:
        self.calls.append(("rounds", len(inputs.slots_S), num_rounds))

    def verified_so_far(self) -> Tensor:
        return self.tokens_so_far()[:, :1]


@pytest.mark.parametrize("stops", [False, True])
def test_the_host_may_end_several_rounds_and_a_fault_is_an_error(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(module, "RoundKernel", FakeRounds)
    assert not isinstance(runner_of(FakeKernel()), RoundRunner)  # type: ignore[arg-type]
    kernel = FakeRounds(faults=(None, None, RuntimeError("waited in vain")))
    runner = runner_of(kernel)  # type: ignore[arg-type]
    assert isinstance(runner, RoundRunner)
    inputs = RoundInputs.of([None])
    tokens, verified = runner.run_rounds(inputs, 5, stopped=lambda: stops)
    assert len(tokens) == len(verified) == (2 if stops else 5)
    assert kernel.calls[2:] == [("rounds", 1, 5), *(["stop"] if stops else []), "check"]
    with pytest.raises(RuntimeError, match="waited in vain"):
        runner.run_rounds(inputs, 1, stopped=lambda: False)


def test_where_the_resident_kernel_does_not_run_its_phases_are_launched_from_a_graph_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel(faults=(RuntimeError("StepKernel: a program waited in vain."), None))
    runner = runner_of(kernel)  # type: ignore[arg-type]
    assert not isinstance(runner, ResidentRunner) and kernel.calls == [("run", 1, 1), "check", "set", "capture"]
    runner.step(StepInputs.dead(16))
    assert kernel.calls[4:] == ["set", "replay", "check"]
    assert "phase by phase from a CUDA graph, as the resident kernel does not run here: StepKernel: a program waited in vain." in caplog.text
    with pytest.raises(NotImplementedError, match="no registers"):
        runner_of(FakeKernel(faults=(NotImplementedError("no registers"),)))  # type: ignore[arg-type]


def test_what_the_kernel_picks_itself() -> None:
    assert kernel_picks(Sampling()) and kernel_picks(Sampling(temperature=0.7)) and kernel_picks(Sampling(top_k=3))
    assert not kernel_picks(Sampling(temperature=0.7, top_k=3)) and not kernel_picks(Sampling(temperature=0.7, top_p=0.9))
