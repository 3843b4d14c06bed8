"""The `kilotok` command itself."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import export_experts, save_tiny_moe
from forked import start

from kilotok.runtime import cli
from kilotok.runtime.cli import main as kilotok
from kilotok.runtime.serve import bind
from kilotok.runtime.validate import ValidateOptions

WAIT_S = 60


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, exported."""
    root = tmp_path_factory.mktemp("cli")
    return export_experts(save_tiny_moe(root / "parent"), root / "tiny-mxfp4")


def left_with(args: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What argparse printed before it left."""
    with pytest.raises(SystemExit) as left:
        kilotok(args)
    assert left.value.code == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_train_is_reached_through_kilotok(tmp_path: Path) -> None:
    """The process becomes the other command, in an interpreter of its own."""
    done = start(kilotok, ["train", "qat", str(tmp_path / "none.yaml")], folder=tmp_path)
    assert done.wait() == 2
    assert f"recipe: no file at {tmp_path / 'none.yaml'}" in done.stderr.read_text()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert left_with(["--version"], 0, capsys) == "kilotok 0.1.0\n"
    text = left_with(["--help"], 0, capsys)
    assert "{export,convert,inspect,serve,validate,bench,train}" in text
    flat = " ".join(text.split())
    for line in ("export write a run's weights", "convert write a directory", "inspect print what a checkpoint", "serve an OpenAI-compatible server",
                 "validate measure a served", "train the `train` command"):
        assert line in flat


@pytest.mark.parametrize(("command", "options"), [
    ("serve", {"--help", "--host", "--port", "--name", "--no-draft", "--device", "--executor", "--dtype", "--max-running", "--tree-budget", "--threads",
               "--draft-length"}),
    ("validate", {"--help", "--prompts", "--parent", "--report", "--prompts-per-domain", "--max-tokens", "--quality-tokens", "--temperature",
                  "--price-per-hour", "--threads", "--device", "--executor", "--draft-length"}),
    ("export", {"--help", "--parent", "--layout", "--prompts", "--rank", "--ranks", "--jobs"}), ("convert", {"--help", "--layout", "--dtype", "--jobs"}),
    ("inspect", {"--help"})])
def test_the_options_of_every_command(command: str, options: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = left_with([command, "--help"], 0, capsys)
    assert {word.strip("[],") for word in text.split() if word.strip("[],").startswith("--")} == options


@pytest.mark.parametrize(("args", "message"), [
    ([], "required: command"), (["export", "run"], "required: out"), (["serve"], "required: out"), (["validate"], "required: out"),
    (["server", "out"], "invalid choice: 'server'"), (["serve", "out", "--port", "x"], "invalid int value: 'x'"),
    (["serve", "out", "--dtype", "float16"], "invalid choice: 'float16'"), (["serve", "out", "--device", "tpu"], "invalid choice: 'tpu'"),
    (["serve", "out", "--executor", "fast"], "invalid choice: 'fast'"),
    (["serve", "out", "--drafts"], "unrecognized arguments: --drafts")])
def test_arguments_that_do_not_fit(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in left_with(args, 2, capsys)


# ---- serve


class Recorder:
    """Stands for load_served: remembers what it was asked, then ends the command."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((*args, options))
        raise ValueError("loaded")


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cli, "load_served", recorder)
    return recorder


def test_options_of_serve_reach_the_loader(loading: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert kilotok(["serve", "somewhere", "--port", "0"]) == 2 and torch.get_num_threads() == threads
        assert kilotok(["serve", "x", "--port", "0", "--name", "n", "--no-draft", "--device", "cuda", "--dtype", "bfloat16", "--threads", "3",
                        "--tree-budget", "15", "--executor", "persistent", "--max-running", "3",
                        "--draft-length", "3"]) == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert loading.calls == [(Path("somewhere"), {"name": None, "use_draft": True, "device": "auto", "dtype": None, "tree_budget": None,
                                                   "executor": "auto", "max_running": 8, "draft_length": "auto"}),
                             (Path("x"), {"name": "n", "use_draft": False, "device": "cuda", "dtype": "bfloat16", "tree_budget": 15,
                                           "executor": "persistent", "max_running": 3, "draft_length": 3})]
    assert capsys.readouterr().err == "error: loaded\n" * 2


def test_a_port_in_use_is_said_before_anything_is_loaded(loading: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert kilotok(["serve", "nowhere", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: port: {port} on 127.0.0.1 is in use. Choose another, or 0 for any that is free.\n"
    assert loading.calls == []


@pytest.mark.parametrize(("options", "message"), [
    (["--port", "70000"], "port: must lie in 0..65535; got 70000."), (["--threads", "0"], "threads: must be at least 1; got 0."),
    (["--host", "203.0.113.7"], "address: cannot listen on 203.0.113.7:8000: ")])
def test_serve_options_that_are_refused_before_loading(options: list[str], message: str, loading: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert kilotok(["serve", "nowhere", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}") and loading.calls == []


def test_a_directory_that_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["serve", str(tmp_path / "nowhere"), "--port", "0"]
    assert kilotok(args) == 2
    assert capsys.readouterr() == ("", f"error: {tmp_path / 'nowhere'}: no such directory. Give a directory written by `kilotok export`.\n")
    monkeypatch.setenv("KILOTOK_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        kilotok(args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_persistent_executor_without_a_gpu_is_one_line(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve", str(out), "--port", "0"], ["serve", str(out), "--port", "0", "--device", "cpu"]):
        assert kilotok([*command, "--executor", "persistent"]) == 2
        written = capsys.readouterr()
        assert written.out == "" and written.err.startswith("error: executor: the persistent one needs an NVIDIA GPU of compute capability 9.0 (H100, H200)")
        assert written.err.endswith(". Take --executor auto or reference.\n") and written.err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_model_answers_and_ends_well_on_a_signal(out: Path, number: signal.Signals, tmp_path: Path) -> None:
    server = start(kilotok, ["serve", str(out), "--port", "0", "--name", "tiny", "--threads", "1", "--executor", "reference"], folder=tmp_path)
    try:
        lines = server.first_lines(3)
        assert lines[0] == "draft: none in dflash/; plain decoding"
        assert lines[1].startswith("tiny: reference (plain torch), cpu, float32; tiles of 8 columns, ")
        assert lines[1].endswith("; this executor because it was asked for")
        url = lines[2].removeprefix("kilotok serve: listening on ")
        asked = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", timeout=WAIT_S, json=asked)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5
        os.kill(server.pid, number)
        assert (server.wait(WAIT_S), server.stdout.read_text().splitlines()[3:], server.stderr.read_text()) == (0, [], "")
    finally:
        server.process.kill()
        server.process.join()


# ---- validate


def test_validate_without_prompts_names_the_file_it_wants(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kilotok(["validate", str(out)]) == 2
    assert capsys.readouterr() == ("", f"error: {out / 'dflash' / 'heldout.jsonl'}: no file with held-out prompts. Give one with --prompts FILE, "
                                       "or make a draft head with `train dflash-distill`, which writes it.\n")
    assert not (out / "validation").exists()


def test_options_and_result_of_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ValidateOptions] = []
    ok = iter((True, False))
    monkeypatch.setattr(cli, "validate", lambda options: asked.append(options) or {"ok": next(ok)})
    assert kilotok(["validate", "o"]) == 0
    options = ["--prompts", "p", "--parent", "q", "--report", "r", "--prompts-per-domain", "1", "--max-tokens", "2", "--quality-tokens", "3",
               "--temperature", "0.5", "--price-per-hour", "4", "--threads", "5", "--device", "cuda", "--executor", "reference"]
    assert kilotok(["validate", "o", *options]) == 1   # a failure was found
    assert asked == [ValidateOptions(out=Path("o")), ValidateOptions(
        out=Path("o"), prompts=Path("p"), parent=Path("q"), report=Path("r"), prompts_per_domain=1, max_tokens=2, quality_tokens=3, temperature=0.5,
        price_per_hour=4.0, threads=5, device="cuda", executor="reference")]


def test_an_interrupt_is_one_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(options: ValidateOptions) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "validate", interrupt)
    assert kilotok(["validate", "o"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
