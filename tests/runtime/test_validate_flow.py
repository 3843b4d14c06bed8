"""The whole validation against a server without a model: what it asks, what it finds, and that the server never stays behind."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from kilotok.quant.checkpoint import sha256_of_weights
from kilotok.runtime.validate import ValidateOptions, html, run, validate
from kilotok.runtime.validate.client import start_server

STUB = Path(__file__).with_name("validate_stub.py")
ROWS: list[dict[str, Any]] = [
    *({"id": f"code-{i}", "domain": "code", "prompt": f"def f{i}():"} for i in range(3)),
    {"id": "agent-0", "domain": "agent", "messages": [{"role": "user", "content": "When is high tide?"}],
     "tools": [{"type": "function", "function": {"name": "tide"}}]},
    {"id": "agent-1", "domain": "agent", "messages": [{"role": "user", "content": "short"}]},
]


def save_weights(directory: Path, value: float, pocket: Path) -> Path:
    """A directory that passes for a checkpoint: config, two packed projections of an expert, one other weight."""
    directory.mkdir(parents=True)
    tensors = {"model.norm.weight": torch.full((8,), value)}
    for name in ("gate_proj", "up_proj"):
        tensors |= {f"model.layers.0.mlp.experts.0.{name}.weight_packed": torch.ones(4, 16, dtype=torch.uint8),
                    f"model.layers.0.mlp.experts.0.{name}.weight_scale": torch.full((4, 1), 127, dtype=torch.uint8)}
    save_file(tensors, directory / "model.safetensors")
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = json.loads((pocket / "config.json").read_text()) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def out(tmp_path: Path, pocket: Path) -> Path:
    """An export with a draft head, as far as validate itself looks at one."""
    directory = save_weights(tmp_path / "pocket-mxfp4", 1.0, pocket)
    parent = save_weights(tmp_path / "parent", 2.0, pocket)
    AutoTokenizer.from_pretrained(pocket).save_pretrained(directory)
    metadata = {"scale_mode": "even", "parent": {"path": str(parent), "sha256": sha256_of_weights(parent)}, "x": float("nan")}
    (directory / "kilotok.json").write_text(json.dumps(metadata))
    (directory / "dflash").mkdir()
    (directory / "dflash" / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(5)}, directory / "dflash" / "model.safetensors")
    (directory / "dflash" / "heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return directory


def stub(log: Path, *options: str) -> list[str]:
    return [sys.executable, str(STUB), "--log", str(log), *options]


def options_for(directory: Path, **changes: Any) -> ValidateOptions:
    return ValidateOptions(**{"out": directory, "max_tokens": 8, "prompts_per_domain": 2, **changes})


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes two seconds; test_validate_report.py does it."""
    monkeypatch.setattr(html, "_plots", lambda report: [])


def asked(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def require_stopped(log: Path) -> None:
    pid = int(log.read_text().splitlines()[0].removeprefix("pid "))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_lossless_server(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    report = validate(options_for(out, price_per_hour=3.6), command=stub(log))
    assert report["ok"] and report["failures"] == []
    assert report["lossless"] == {
        "greedy": {"mode": "draft", "reference": "plain", "equal": 4, "total": 4, "differences": []},
        "sampled": {"mode": "sampled draft", "reference": "sampled plain", "equal": 4, "total": 4, "differences": []},
        "greedy, tree": {"mode": "tree", "reference": "plain", "equal": 4, "total": 4, "differences": []},
        "greedy, wide tree": {"mode": "wide tree", "reference": "plain", "equal": 4, "total": 4, "differences": []},
        "sampled, tree": {"mode": "sampled tree", "reference": "sampled plain", "equal": 4, "total": 4, "differences": []},
        "greedy, adaptive": {"mode": "adaptive draft", "reference": "plain", "equal": 4, "total": 4, "differences": []},
        "sampled, adaptive": {"mode": "sampled adaptive draft", "reference": "sampled plain", "equal": 4, "total": 4, "differences": []}}
    # of a tree's 7 tokens, rounds of 4 and 3; of 5, 4 and 1
    assert {m: (d["all"]["verified"]["mean"], d["all"]["raw"]["length"]) for m, d in report["trees"]["greedy"].items()} == {
        "draft": (4.0, 26 / 11), "tree": (4.0, 26 / 8), "wide tree": (16.0, 26 / 8)}
    # of 8 tokens 7 are decoded in rounds of 3, 3 and 1; agent-1 is two shorter, so 5 in rounds of 3 and 2
    raw = {d: f["raw"] for d, f in report["acceptance"]["greedy"].items()}
    assert raw == {"code": {"length": 14 / 6, "tokens": 14, "rounds": 6}, "agent": {"length": 12 / 5, "tokens": 12, "rounds": 5},
                   "all": {"length": 26 / 11, "tokens": 26, "rounds": 11}}
    assert [(p["drafted"], p["accepted"]) for p in report["acceptance"]["greedy"]["all"]["positions"]] == [(11, 8), (11, 7), (11, 0)]
    assert report["speed"]["plain"]["all"]["decode"]["tokens"] == 26 and report["speed"]["plain"]["all"]["decode"]["tokens_per_s"] > 0
    assert report["speed_up"]["greedy"]["all"]["against"] in ("plain", "plain one column")
    assert report["quality"] == {"not_measured": "no held-out row has a reference"}
    assert set(report["cost"]["per_million_tokens"]) >= {"draft"}
    assert report["sizes"] == {"weight_files_bytes": (out / "model.safetensors").stat().st_size, "packed_experts_bytes": 2 * (4 * 16 + 4),
                               "draft_files_bytes": (out / "dflash" / "model.safetensors").stat().st_size}
    assert report["provenance"]["server"] == {"status": "ok", "executor": "stub <b>"} and report["provenance"]["export"]["x"] == "nan"
    written = json.loads((out / "validation" / "report.json").read_text())
    assert written["requests"][0] == {**written["requests"][0], "prompt_id": "code-0", "mode": "draft", "prompt_tokens": 5, "finish_reason": "length",
                                      "rounds": [[0, 0, 1], [3, 2, 3], [3, 2, 3], [3, 0, 1]]}
    printed = capsys.readouterr().out
    assert "| lossless" in printed and "greedy 4/4, sampled 4/4" in printed and f"report: {out / 'validation' / 'report.html'}" in printed
    require_stopped(log)


def test_every_prompt_is_asked_in_every_mode_back_to_back(out: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    validate(options_for(out), command=stub(log))
    requests = asked(log)
    common = {"model": "stub", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8, "return_token_ids": True}
    greedy = [{**common, "temperature": 0, "decode": d} for d in ("draft", "plain", "plain_one_column")]

    def ten(prompt: dict[str, Any], domain: str, seed: int, turn: int) -> list[dict[str, Any]]:
        sampled = [{**common, "temperature": 0.8, "top_p": 0.95, "seed": seed, "decode": d} for d in ("draft", "plain")]
        full = [{**m, "draft_length": 63} if m["decode"] == "draft" else m for m in (*greedy, *sampled)]
        trees = [{**full[0], "decode": "tree"}, {**full[0], "decode": "tree", "tree_budget": 15}, {**full[3], "decode": "tree"}]
        adaptive = [{**m, "draft_length": "auto", "domain": domain} for m in (greedy[0], sampled[0])]
        modes = [{**m, **prompt} for m in (*full, *trees, *adaptive)]
        return [*modes[turn:], *modes[:turn]]

    code = [{"path": "/v1/completions", "prompt": f"def f{i}():"} for i in (0, 1)]     # two of three rows, spread
    chat = [{"path": "/v1/chat/completions", **{k: r[k] for k in ("messages", "tools") if k in r}} for r in ROWS[3:]]
    domains = ("code", "code", "agent", "agent")
    expected = [*ten(code[0], "code", 0, 0), *(r for i, p in enumerate((*code, *chat)) for r in ten(p, domains[i], i, i))]   # warm-up first
    assert requests == expected


def test_a_fixed_length_is_that_of_all_drafts(out: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = validate(options_for(out, draft_length=3), command=stub(log))
    lengths = [(r["decode"], r.get("draft_length"), r.get("domain")) for r in asked(log)]
    assert set(lengths) == {("draft", 3, None), ("tree", 3, None), ("plain", None, None), ("plain_one_column", None, None)}
    assert report["adaptive"]["greedy"] == {"not_measured": "a fixed draft length was asked for"} and set(report["lossless"]) == {
        "greedy", "sampled", "greedy, tree", "greedy, wide tree", "sampled, tree"}


@pytest.mark.parametrize(("mode", "kind"), [("draft", "greedy"), ("plain", "sampled"), ("tree", "greedy, wide tree")])
def test_a_lying_server_is_found_out(out: Path, tmp_path: Path, mode: str, kind: str) -> None:
    """One token of one text differs between draft and plain; the stub changes it in both samplings."""
    report = validate(options_for(out), command=stub(tmp_path / "log", "--lie", f"f1@4@{mode}"))
    assert not report["ok"] and len(report["failures"]) == {"draft": 4, "plain": 7, "tree": 3}[mode]
    difference = report["lossless"][kind]["differences"]
    assert [(d["prompt"], d["position"]) for d in difference] == [("code-1", 4)]
    assert 999 in (difference[0]["token"], difference[0]["reference_token"])
    assert any(re.match(rf"not lossless, {kind}: 1 of 4 texts differ with a draft; first code-1 at position 4: token id \d+, token id \d+ in ", f)
               for f in report["failures"])
    page = (out / "validation" / "report.html").read_text()
    assert ">NO<" in page and "code-1 at position 4" in page


def test_another_text_of_one_column_is_information(out: Path, tmp_path: Path) -> None:
    report = validate(options_for(out), command=stub(tmp_path / "log", "--lie", "f1@4@plain_one_column"))
    assert report["ok"] and (report["one_column"]["equal"], report["one_column"]["total"]) == (3, 4)


def test_without_a_draft_head(out: Path, tmp_path: Path) -> None:
    (out / "dflash" / "config.json").unlink()
    log = tmp_path / "log"
    report = validate(options_for(out), command=stub(log))
    reason = {"not_measured": "no draft head in pocket-mxfp4/dflash"}
    assert report["ok"] and report["acceptance"] == report["lossless"] == report["speed_up"] == {"greedy": reason, "sampled": reason}
    assert report["sizes"]["draft_files_bytes"] == reason
    assert {r["decode"] for r in asked(log)} == {"plain", "plain_one_column"}
    text = (out / "validation" / "report.md").read_text()
    assert re.search(r"\| lossless +\| not measured +\| no draft head in pocket-mxfp4/dflash", text)


def test_an_older_report_is_replaced_and_nothing_else(out: Path, tmp_path: Path) -> None:
    directory = tmp_path / "reports"
    directory.mkdir()
    (directory / "report.html").write_text("old")
    (directory / "notes.txt").write_text("mine")
    validate(options_for(out, report=directory), command=stub(tmp_path / "log"))
    assert sorted(p.name for p in directory.iterdir()) == ["notes.txt", "report.html", "report.json", "report.md"]
    assert (directory / "report.html").read_text() != "old" and (directory / "notes.txt").read_text() == "mine"
    assert not (out / "validation").exists()


# --- servers that fail ---


@pytest.mark.parametrize(("options", "message"), [
    (["--die-at", "14"], r"it ended with status 7 while answering code-0 \(sampled draft\)\. Its last words: out of memory, says the stub"),
    (["--fail-start"], r"did not start \(status 1\)\. Its last words: error: no room for the stub"),
    (["--ignore-decode"], r"code-0 asked for decode 'draft' and got 'plain'"),
    (["--bad-rounds"], r"code-0 \(draft\): rounds must add up to the tokens; got 7 in rounds and 8 ids"),
])
def test_a_server_that_fails_is_quoted_and_stopped(out: Path, tmp_path: Path, options: list[str], message: str) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match=f"^server: .*{message}"):
        validate(options_for(out), command=stub(log, *options))
    assert not (out / "validation").exists()
    if log.exists():
        require_stopped(log)


def test_a_refused_prompt_is_named(out: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^prompt code-1: the server refuses it \(the prompt does not fit\.\) Change or remove this row"):
        validate(options_for(out), command=stub(tmp_path / "log", "--refuse", "f1"))
    require_stopped(tmp_path / "log")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_server_is_stopped_whatever_happens(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), start_server(stub(tmp_path / "log")) as server:
        assert server.url.startswith("http://127.0.0.1:")
        raise error
    require_stopped(tmp_path / "log")


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"must say 'listening on \.\.\.' within 0 s; it did not\. Its last words: none"), \
            start_server([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2):
        pass


def test_sigterm_stops_the_server_too(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, start_server(stub(tmp_path / "log")):
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    require_stopped(tmp_path / "log")


# --- wrong inputs, before the server starts ---


def never_started(tmp_path: Path) -> list[str]:
    return stub(tmp_path / "never-started")


def test_inputs_are_checked_before_the_server_starts(out: Path, tmp_path: Path, pocket: Path) -> None:
    cases: Sequence[tuple[dict[str, Any], type[Exception], str]] = [
        ({"out": tmp_path / "none"}, FileNotFoundError, "model: no directory at .*none"),
        ({"prompts": tmp_path / "none.jsonl"}, FileNotFoundError, "none.jsonl: no file with held-out prompts"),
        ({"parent": tmp_path / "none"}, FileNotFoundError, "none: no model.safetensors"),
        ({"parent": save_weights(tmp_path / "stranger", 3.0, pocket)}, ValueError, "stranger: is not the parent of .*its weights hash to [0-9a-f]{12}, "
                                                                                   "pocket-mxfp4 was made from [0-9a-f]{12}"),
        ({"report": out / "config.json"}, NotADirectoryError, "config.json: must be a directory that can be written"),
        ({"report": out / "config.json" / "deep"}, NotADirectoryError, "deep: must be a directory"),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            validate(options_for(out, **changes), command=never_started(tmp_path))
    assert not (tmp_path / "never-started").exists()


def test_a_damaged_kilotok_json_is_named(out: Path, tmp_path: Path) -> None:
    (out / "kilotok.json").write_text("{")
    with pytest.raises(ValueError, match=r"kilotok\.json: not readable as JSON"):
        validate(options_for(out), command=never_started(tmp_path))


# --- quality ---


def with_references(out: Path) -> None:
    rows = [{**r, "reference": "high tide is at noon"} for r in ROWS]
    (out / "dflash" / "heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def executors(monkeypatch: pytest.MonkeyPatch, *, scale_of: dict[str, float]) -> list[Path]:
    """Executors whose logits are a fixed table times a number by directory name."""
    table = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    loaded: list[Path] = []

    def load(directory: Path, *, device: str, dtype: torch.dtype) -> Any:
        assert (device, dtype) == ("cpu", torch.float32)
        loaded.append(directory)
        scale = scale_of[directory.name]
        return SimpleNamespace(max_length=40, open=lambda: SimpleNamespace(read=lambda ids: SimpleNamespace(logits_TV=table[torch.tensor(ids) % 64] * scale)))

    monkeypatch.setattr(run, "load_executor", load)
    return loaded


def test_quality_of_target_and_parent(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_references(out)
    loaded = executors(monkeypatch, scale_of={"pocket-mxfp4": 0.5, "parent": 1.0})
    quality = validate(options_for(out, quality_tokens=30), command=stub(tmp_path / "log"))["quality"]
    assert loaded == [out, tmp_path / "parent"] and quality["parent"] == str(tmp_path / "parent")
    assert {d: q["tokens"] for d, q in quality["domains"].items()} == {"code": quality["domains"]["code"]["tokens"], "agent": 30,
                                                                       "all": 30 + quality["domains"]["code"]["tokens"]}
    for q in quality["domains"].values():
        assert q["kl"] > 0 and q["perplexity"] != q["parent_perplexity"]


def test_quality_without_a_parent(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_references(out)
    (tmp_path / "parent").rename(tmp_path / "moved")
    executors(monkeypatch, scale_of={"pocket-mxfp4": 0.5})
    quality = validate(options_for(out), command=stub(tmp_path / "log"))["quality"]
    assert quality["parent"] == {"not_measured": f"the parent is no longer at {tmp_path / 'parent'}; --parent DIR was not given"}
    assert "kl" not in quality["domains"]["all"] and quality["domains"]["all"]["perplexity"] > 1


def test_logits_that_are_not_finite_are_a_failure_and_no_figure(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_references(out)
    executors(monkeypatch, scale_of={"pocket-mxfp4": float("nan"), "parent": 1.0})
    report = validate(options_for(out), command=stub(tmp_path / "log"))
    assert not report["ok"] and report["quality"] == {"not_measured": "logits of the target or of its parent are NaN or infinite"}
    assert report["failures"] == ["quality: logits of the target or of its parent are NaN or infinite"]
