"""`train dflash-distill` end to end on a tiny exported model: what it writes, that it trains, and resuming after a kill."""

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from forked import start
from safetensors.torch import load_file
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor, nn

from kilotok.dflash.anchors import anchor_generator
from kilotok.dflash.checkpoint import read_config, read_draft, read_metadata, require_fitting_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.metrics import acceptance_by_position, acceptance_length, without_repeats
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import load_tokenizer
from kilotok.quant.checkpoint import load_exported_model, sha256_of_weights
from kilotok.quant.checkpoint.run import read_checkpoint
from kilotok.train import distill
from kilotok.train.acceptance import acceptance_table
from kilotok.train.cli import main as train
from kilotok.train.distill_config import DistillRecipe, SlotLossConfig
from kilotok.train.distill_data import SUPERVISED, PromptData, packed_rows
from kilotok.train.packing import pick_row
from kilotok.train.prompts import to_jsonl
from kilotok.train.recipe import load_recipe
from kilotok.train.responses import Answering, generate_responses
from kilotok.train.slot_pass import slot_pass

pytestmark = pytest.mark.xdist_group("ranks")   # one of them starts two processes, and all read one run
STEPS = 12
# The largest difference seen was 1.2 eps (maximum) and 0.5 eps (RMS).
RANKS_FP32 = Bound(maximum=8 * FP32_EPS, rms=8 * FP32_EPS, reason="the same fp32 terms of two rows, added by process instead of in one backward")


def export_tiny(root: Path) -> Path:
    """A tiny random Qwen3-MoE, exported. Its greedy texts repeat themselves, so a draft learns some of them in a few steps."""
    return export_experts(save_tiny_moe(root / "parent", initializer_range=0.05), root / "target")


def chat_source(path: Path, *, domain: str, prompts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"prompt": p, "response": "Yes."}) + "\n" for p in prompts))
    return {"domain": domain, "path": str(path), "prompt": "prompt"}


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run: the recipe, what it wrote, what it printed."""

    root: Path
    recipe: Path
    target: Path
    run: Path
    draft: Path
    printed: str


def read_meta(run: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((run / "meta.json").read_text())
    return meta


def rows_of(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("distill")
    target = export_tiny(root)
    recipe = {
        "target": str(target), "run": str(root / "run"),
        "draft": {"num_hidden_layers": 2, "intermediate_size": 96, "target_layer_ids": [0, 1], "sliding_window": 32},
        "loss": {"anchors": 4}, "optim": {"muon_lr": 1e-2, "adamw_lr": 1e-2},
        "data": {"sequence_length": 96, "max_new_tokens": 12, "heldout_prompts": 2, "heldout_new_tokens": 10, "generation_batch": 2, "temperatures": [0.0, 0.2],
                 "train": [{**chat_source(root / "chat.jsonl", domain="chat", prompts=[f"Write a function that adds {i}." for i in range(12)]), "weight": 0.75},
                           {**chat_source(root / "math.jsonl", domain="math", prompts=[f"What is {i} + {i}?" for i in range(5)]), "weight": 0.25}],
                 "heldout": [{**chat_source(root / "held.jsonl", domain="chat", prompts=[f"Explain {i} please." for i in range(5)]), "response": "response"},
                             chat_source(root / "held_math.jsonl", domain="math", prompts=["What is 7 + 8?"])]},
        "trainer": {"max_steps": STEPS, "batch_size": 1, "accumulate_grad_batches": 2, "accelerator": "cpu", "checkpoint_every_steps": 2, "log_every_steps": 1,
                    "val_every_steps": 5}}
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train(["dflash-distill", str(path)]) == 0
    return Whole(root, path, target, root / "run", target / "dflash", out.getvalue())


def started_again(whole: Whole, tmp_path: Path, *more: str) -> list[str]:
    """The same recipe with a run and an output of its own."""
    return ["dflash-distill", str(whole.recipe), "--run", str(tmp_path / "run"), "--out", str(tmp_path / "draft"), *more]


def assert_same_results(whole: Whole, tmp_path: Path) -> None:
    """To the bit: draft, metrics, measured figures and held-out prompts."""
    a, b = load_file(whole.draft / "model.safetensors"), load_file(tmp_path / "draft" / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert_equal(b[name], a[name], what=name, bits=True)
    a, b = (read_checkpoint(run / "checkpoints" / f"step-{STEPS:08d}.ckpt") for run in (whole.run, tmp_path / "run"))
    assert a.keys() == b.keys()
    for name in a:
        assert_equal(b[name], a[name], what=name, bits=True)
    assert (tmp_path / "run" / "metrics.csv").read_text() == (whole.run / "metrics.csv").read_text()
    ours, theirs = read_meta(tmp_path / "run"), read_meta(whole.run)
    assert ours["status"] == "complete"
    for key in ("target", "prompts_sha256", "responses", "before", "after", "heldout_prompts", "max_steps"):
        assert ours[key] == theirs[key], key
    for name in ("config.json", "heldout.jsonl"):
        assert (tmp_path / "draft" / name).read_text() == (whole.draft / name).read_text()
    assert {p.name: p.read_text() for p in (tmp_path / "run" / "responses").rglob("*.json")} == \
        {p.name: p.read_text() for p in (whole.run / "responses").rglob("*.json")}


def test_run_and_draft_directories_hold_what_they_should(whole: Whole) -> None:
    assert sorted(p.name for p in whole.run.iterdir()) == ["checkpoints", "meta.json", "metrics.csv", "recipe.yaml", "responses"]
    assert [p.name for p in (whole.run / "checkpoints").iterdir()] == [f"step-{STEPS:08d}.ckpt"]
    assert sorted(str(p.relative_to(whole.run / "responses")) for p in (whole.run / "responses").rglob("*.json")) == \
        [f"00-chat/{i:06d}.json" for i in range(12)] + [f"01-math/{i:06d}.json" for i in range(6)]
    assert sorted(p.name for p in whole.draft.iterdir()) == ["config.json", "heldout.jsonl", "kilotok_draft.json", "model.safetensors"]
    assert [p.name for p in whole.target.iterdir() if "partial" in p.name] == []
    assert load_recipe(DistillRecipe, path=whole.run / "recipe.yaml", overrides=[]) == load_recipe(DistillRecipe, path=whole.recipe, overrides=[])


def test_meta_says_what_was_made_from_what(whole: Whole) -> None:
    meta = read_meta(whole.run)
    assert {"kind": "dflash-distill", "status": "complete", "max_steps": STEPS, "started_from": None, "heldout_prompts": {"chat": 2, "math": 1},
            "draft": str(whole.draft)}.items() <= meta.items()
    assert meta["target"] == {"name": "target", "sha256": sha256_of_weights(whole.target), "scale_mode": "even"}
    assert len(meta["prompts_sha256"]) == 64 and meta["versions"]["torch"] == torch.__version__ and "resumed" not in meta
    recipe, data, rows, left_out = material(whole)
    assert meta["responses"] == [
        {"domain": s.domain, "source": s.path, "prompts": len(p), "responses": 2 * len(p), "left_out": left, "rows": len(r),
         "response_tokens": sum(int(x[SUPERVISED].sum()) for x in r)}
        for s, p, r, left in zip(recipe.data.train, data.train, rows, left_out, strict=True)]
    assert [r["prompts"] for r in meta["responses"]] == [12, 5]


def material(whole: Whole) -> tuple[DistillRecipe, PromptData, list[list[Tensor]], list[int]]:
    """Recipe, prompts, packed rows by source and how many answers they leave out, from the answers on disk."""
    recipe = load_recipe(DistillRecipe, path=whole.recipe, overrides=[])
    data = PromptData(recipe.data, tokenizer=load_tokenizer(whole.target), vocab_size=4096, max_length=2048)
    rows, left_out = [], []
    for number, (source, prompts) in enumerate(zip(recipe.data.train, data.train, strict=True)):
        how = Answering(directory=whole.run / "responses" / f"{number:02d}-{source.domain}", target_sha256=sha256_of_weights(whole.target),
                        dtype="torch.float32", vocab_size=4096, temperatures=(0.0, 0.2), max_new_tokens=12, batch_size=2, eos_ids=frozenset({2}), pad_id=0,
                        seed=0)
        responses = generate_responses(nn.Identity(), prompts, how=how, say=print)
        packed, left = packed_rows(responses, length=96, pad_id=0)
        rows.append(packed)
        left_out.append(left)
    return recipe, data, rows, left_out


def test_metrics_have_a_row_a_step_and_held_out_rows(whole: Whole) -> None:
    rows = rows_of(whole.run)
    assert list(rows[0]) == ["step", "loss", "accuracy", "first_slot_accuracy", "lr", "heldout_chat", "heldout_math", "heldout_all"]
    trained, heldout = [r for r in rows if r["loss"]], [r for r in rows if not r["loss"]]
    assert [int(r["step"]) for r in trained] == list(range(1, STEPS + 1)) and [int(r["step"]) for r in heldout] == [5, 10]
    for r in trained:
        assert float(r["loss"]) > 0 and 0 <= float(r["accuracy"]) <= 1 and 0 <= float(r["first_slot_accuracy"]) <= 1 and float(r["lr"]) <= 1e-2 * (1 + 1e-6)
        assert not (r["heldout_chat"] or r["heldout_math"] or r["heldout_all"])
    for r in heldout:
        assert all(1 <= float(r[f"heldout_{d}"]) <= 8 for d in ("chat", "math", "all")) and not (r["accuracy"] or r["lr"])


def test_training_lowers_the_loss(whole: Whole) -> None:
    """On all rows, at the same anchors, the written draft against the one training started from."""
    recipe, _, rows, _ = material(whole)
    target = load_exported_model(whole.target, dtype=torch.float32)
    losses = []
    for draft in (first_draft(target), read_draft(whole.draft, dtype=torch.float32)):
        with torch.no_grad():
            sums = slot_pass(draft, target, torch.stack([r for some in rows for r in some]), loss=recipe.loss,
                             generator=anchor_generator(seed=1, rank=0, index=0, device=torch.device("cpu")))
        losses.append(float(sums.loss / sums.weight))
    assert losses[1] < 0.95 * losses[0], losses
    after, before = read_meta(whole.run)["after"]["all"], read_meta(whole.run)["before"]["all"]
    assert after["acceptance_length"] > before["acceptance_length"]


def first_draft(target: Any) -> DraftModel:
    """What a run without init_from starts with."""
    draft = DraftModel(DraftConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
        target_layer_ids=(0, 1), num_target_layers=2, mask_token_id=3, block_size=8, sliding_window=32, rope_theta=1e4, max_position_embeddings=512))
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=target.model.norm.weight)
    return draft


def test_the_written_draft_is_the_checkpoint_in_bf16(whole: Whole) -> None:
    written, trained = load_file(whole.draft / "model.safetensors"), read_checkpoint(whole.run / "checkpoints" / f"step-{STEPS:08d}.ckpt")
    assert {f"draft.{n}" for n in written} == set(trained) and len(written) == 2 * 11 + 3   # and nothing of the target
    for name, w in written.items():
        assert trained[f"draft.{name}"].dtype == torch.float32
        assert_equal(w, trained[f"draft.{name}"].to(torch.bfloat16), what=name, bits=True)
    assert read_config(whole.draft) == first_draft(load_exported_model(whole.target, dtype=torch.float32)).config
    meta, metadata = read_meta(whole.run), read_metadata(whole.draft)
    assert metadata == {"format": "dflash", "target_layer_ids": [0, 1], "mask_token_id": 3, "block_size": 8, "step": STEPS,
                        **{k: meta[k] for k in ("target", "started_from", "features_from", "responses", "parity", "before", "after", "max_steps", "versions",
                                                    "device", "commit")}}
    config = json.loads((whole.target / "config.json").read_text())
    assert "distilled from these weights" in require_fitting_draft(whole.draft, target=whole.target, target_config=config)
    data = material(whole)[1]
    assert (whole.draft / "heldout.jsonl").read_text() == to_jsonl([*data.heldout_file["chat"], *data.heldout_file["math"]])
    assert [json.loads(line)["reference"] for line in (whole.draft / "heldout.jsonl").read_text().splitlines()] == ["Yes."] * 5 + [None]


def test_figures_are_those_of_the_loop_on_the_written_draft(whole: Whole) -> None:
    target, data = load_exported_model(whole.target, dtype=torch.float32), material(whole)[1]
    draft = read_draft(whole.draft, dtype=torch.float32)
    texts: dict[str, list[list[Round]]] = {}
    right: dict[str, list[list[bool]]] = {d: [[] for _ in range(7)] for d in ("chat", "math", "all")}   # [slot - 1], block by block

    def drafter() -> DFlashDrafter:
        return DFlashDrafter(draft, embedding_VD=target.model.embed_tokens.weight, head_VD=target.lm_head.weight)  # type: ignore[union-attr, arg-type]

    with Taps(target, layer_ids=(0, 1)) as taps:
        for domain, prompts in data.heldout.items():
            for p in prompts:
                rounds = list(generate(HFTarget(target, taps=taps, max_length=512), prompt=p.ids, drafter=drafter(), sampling=Sampling(),
                                       max_tokens=10, eos_ids={2}))
                texts.setdefault(domain, []).append(rounds)
                text = [*p.ids, *(t for r in rounds for t in r.tokens)]
                features = HFTarget(target, taps=taps, max_length=512).read(text).features_TF
                for anchor in range(len(p.ids), len(text) - 1):
                    block = drafter()
                    block.observe(features[:anchor])
                    for slot, (got, said) in enumerate(zip(block.logits(text[anchor]).argmax(-1).tolist(), text[anchor + 1:], strict=False)):
                        for d in (domain, "all"):
                            right[d][slot].append(got == said)
    texts["all"] = [*texts["chat"], *texts["math"]]
    after = read_meta(whole.run)["after"]
    assert list(after) == ["chat", "math", "all"]
    for domain, some in texts.items():
        rounds = [r for text in some for r in text]
        assert after[domain].pop("accuracy_by_slot") == pytest.approx([sum(r) / len(r) for r in right[domain]], abs=FP32_EPS)
        assert after[domain] == {
            "acceptance_length": acceptance_length(rounds), "acceptance_by_position": acceptance_by_position(rounds, num_drafts=7),
            "acceptance_length_repeats_cut": acceptance_length(r for text in some for r in without_repeats(text)),
            "rounds": sum(not r.is_prefill for r in rounds), "tokens": sum(len(r.tokens) for r in rounds)}
    assert acceptance_table(read_meta(whole.run)["after"], before=read_meta(whole.run)["before"]) in whole.printed
    assert acceptance_table(read_meta(whole.run)["before"]) in whole.printed


def start_and_kill(whole: Whole, tmp_path: Path, *, when: Callable[[], bool]) -> None:
    """The command in a process of its own, killed as soon as `when`."""
    process = start(train, started_again(whole, tmp_path), folder=whole.root / f"{tmp_path.name}-printed")
    deadline = time.time() + 120
    while not when() and process.is_running() and time.time() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read_text()
    assert read_meta(tmp_path / "run")["status"] == "running"
    assert [p for p in tmp_path.iterdir() if p.name != "run"] == []   # of the draft there is nothing yet


def test_killed_while_the_target_answers(whole: Whole, tmp_path: Path) -> None:
    def answers() -> list[Path]:
        return sorted((tmp_path / "run" / "responses").glob("*/0*.json"))

    start_and_kill(whole, tmp_path, when=lambda: len(answers()) >= 3)
    times = {p: p.stat().st_mtime_ns for p in answers()}
    assert 3 <= len(times) < 18 and not (tmp_path / "run" / "checkpoints").exists()
    assert train(started_again(whole, tmp_path, "--resume")) == 0
    assert {p: p.stat().st_mtime_ns for p in times} == times   # not made again
    assert_same_results(whole, tmp_path)
    assert len(read_meta(tmp_path / "run")["resumed"]) == 1


def test_killed_while_training(whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    start_and_kill(whole, tmp_path, when=lambda: bool(list(checkpoints.glob("step-*.ckpt"))))
    (checkpoint,) = checkpoints.glob("step-*.ckpt")
    assert checkpoint.name < f"step-{STEPS:08d}.ckpt"
    with (tmp_path / "run" / "metrics.csv").open("a") as f:
        f.write(f"{STEPS},9.9,0.5,0.5,0.1,,,\n4,1")   # steps after the checkpoint, and a torn row
    assert train(started_again(whole, tmp_path, "--resume")) == 0
    assert f"resuming from {checkpoint.name}" in capsys.readouterr().out
    assert_same_results(whole, tmp_path)


def test_a_run_that_stopped_before_the_draft_was_written_writes_it(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(distill, "to_jsonl", full)   # the draft's last file
        assert train(started_again(whole, tmp_path, "--data.responses", str(whole.run / "responses"))) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["run"]   # neither a draft nor a part of one
    assert train(started_again(whole, tmp_path, "--data.responses", str(whole.run / "responses"), "--resume")) == 0
    shutil.copytree(whole.run / "responses", tmp_path / "run" / "responses")
    assert_same_results(whole, tmp_path)


def test_a_warm_start_begins_at_the_draft_s_weights(whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    began: dict[str, Tensor] = {}
    real = distill.fit

    def spy(trainer: Any, module: Any, **how: Any) -> None:
        began.update({n: p.detach().clone() for n, p in module.draft.named_parameters()})
        assert all(not p.requires_grad for p in module.target.parameters())
        real(trainer, module, **how)

    monkeypatch.setattr(distill, "fit", spy)
    short = ["--trainer.max_steps", "2", "--data.responses", str(whole.run / "responses")]
    assert train(started_again(whole, tmp_path, "--draft.init_from", str(whole.draft), *short)) == 0
    written = load_file(whole.draft / "model.safetensors")
    assert began.keys() == written.keys()
    for name, w in written.items():
        assert_equal(began[name], w.float(), what=name, bits=True)
    target = read_meta(whole.run)["target"]
    assert f"draft head: starts from warm start from {whole.draft}, distilled from weights {target['sha256'][:12]}" in capsys.readouterr().out
    meta = read_meta(tmp_path / "run")
    assert meta["started_from"] == {"draft": "dflash", "sha256": sha256_of_weights(whole.draft), "distilled_from": target}
    assert meta["before"] == read_meta(whole.run)["after"]
    metadata = read_metadata(tmp_path / "draft")
    assert metadata is not None and metadata["started_from"] == meta["started_from"]
    assert read_config(tmp_path / "draft") == read_config(whole.draft)   # the shape is the old draft's
    assert any(not torch.equal(w, load_file(tmp_path / "draft" / "model.safetensors")[n]) for n, w in written.items())


def test_mixed_precision_trains_fp32_weights(whole: Whole, tmp_path: Path) -> None:
    """With one held-out token a text, so that nothing can be accepted: figures that do not exist are null, not NaN, which is no JSON."""
    assert train(started_again(whole, tmp_path, "--trainer.precision", "bf16-mixed", "--trainer.max_steps", "2", "--trainer.val_every_steps", "1",
                               "--loss.ce_weight", "0", "--loss.kl_weight", "1", "--data.heldout_new_tokens", "1")) == 0
    trained = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002.ckpt")
    assert all(w.dtype == torch.float32 and bool(torch.isfinite(w).all()) for w in trained.values())
    assert any(not torch.equal(w, w.to(torch.bfloat16).float()) for w in trained.values())
    assert [0 < float(r["loss"]) < 12 for r in rows_of(tmp_path / "run") if r["loss"]] == [True, True]   # ln 4096 = 8.3
    nothing = {"acceptance_length": None, "acceptance_length_repeats_cut": None, "acceptance_by_position": [None] * 7, "accuracy_by_slot": [None] * 7}
    for path in (tmp_path / "run" / "meta.json", tmp_path / "draft" / "kilotok_draft.json"):
        read = json.loads(path.read_text(), parse_constant=pytest.fail)
        for figures in (read["before"], read["after"]):
            assert figures == {d: {**nothing, "rounds": 0, "tokens": tokens} for d, tokens in (("chat", 2), ("math", 1), ("all", 3))}


def test_two_processes_draw_anchors_of_their_own_and_share_one_denominator(whole: Whole, tmp_path: Path) -> None:
    """A step on two CPU processes: momentum after it is (1 - beta) times the gradient of the joint loss, from each rank's own row and anchors."""
    command = [sys.executable, "-m", "kilotok.train.cli", *started_again(whole, tmp_path), "--trainer.devices", "2", "--trainer.max_steps", "1",
               "--trainer.accumulate_grad_batches", "1", "--optim.max_grad_norm", "null", "--loss.anchors", "2",
               "--data.responses", str(whole.run / "responses")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("draft head: starts from"), done.stdout.count("weights written")) == (0, 1, 1), done.stderr
    rows = material(whole)[2]
    target = load_exported_model(whole.target, dtype=torch.float32).requires_grad_(False)
    draft = first_draft(target)

    def expected(anchor_ranks: tuple[int, int]) -> tuple[float, dict[str, Tensor]]:
        draft.zero_grad()
        sums = []
        for rank, anchor_rank in enumerate(anchor_ranks):
            source, row = pick_row(rank, seed=0, weights=[0.75, 0.25], num_rows=[len(r) for r in rows])
            sums.append(slot_pass(draft, target, rows[source][row].unsqueeze(0), loss=SlotLossConfig(anchors=2),
                                  generator=anchor_generator(seed=0, rank=anchor_rank, index=0, device=torch.device("cpu"))))
        weight = sums[0].weight + sums[1].weight
        assert float(sums[0].weight) != float(sums[1].weight)   # else any denominator would do
        (sums[0].loss + sums[1].loss).backward()
        return float((sums[0].loss + sums[1].loss).detach() / weight), {n: p.grad / weight for n, p in draft.named_parameters() if p.grad is not None}

    loss, gradients = expected((0, 1))
    assert float(rows_of(tmp_path / "run")[0]["loss"]) == pytest.approx(loss, rel=8 * FP32_EPS)
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-00000001.ckpt", weights_only=True)["optimizer_states"][0]
    _, same_anchors = expected((0, 0))
    told_apart = []
    for group in saved["param_groups"]:
        buffer, share = ("momentum_buffer", 1 - group["momentum"]) if group["use_muon"] else ("exp_avg", 1 - group["betas"][0])
        for number, name in zip(group["params"], group["param_names"], strict=True):
            got = saved["state"][number][buffer]
            assert_within(got, share * gradients[name], bound=RANKS_FP32, what=name)
            if float((got - share * same_anchors[name]).abs().max()) > 1e-3 * float(got.abs().max()):
                told_apart.append(name)
    assert len(told_apart) > 20, told_apart   # ranks that drew the same anchors would be seen
