"""Runs of `train dflash-distill` with the options of other tools' drafts: what is written is read again, started from, and measured."""

import contextlib
import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file
from tolerances import assert_equal

from kilotok.dflash.checkpoint import read_config, read_draft, read_metadata
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.quant.checkpoint import load_exported_model, sha256_of_weights
from kilotok.quant.checkpoint.run import read_checkpoint
from kilotok.train import distill
from kilotok.train.cli import main as train
from kilotok.train.distill_config import SlotLossConfig
from kilotok.train.distill_data import pack_row
from kilotok.train.responses import Response
from kilotok.train.slot_pass import slot_pass

DRAFT_VOCABULARY = 40


@dataclass(frozen=True)
class Lab:
    """A target, the model that it was exported from, and a recipe with answers that its runs share."""

    root: Path
    recipe: Path

    def run(self, name: str, *more: str, exit_code: int = 0) -> dict[str, Any]:
        """The command; RUN/meta.json."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = train(["dflash-distill", str(self.recipe), "--run", str(self.root / name), "--out", str(self.draft(name)), *more])
        assert code == exit_code, out.getvalue()
        meta: dict[str, Any] = json.loads((self.root / name / "meta.json").read_text())
        return {**meta, "printed": out.getvalue()}

    def draft(self, name: str) -> Path:
        return self.root / f"{name}-draft"

    def losses(self, name: str) -> list[float]:
        return [float(r["loss"]) for r in csv.DictReader((self.root / name / "metrics.csv").open()) if r["loss"]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    root = tmp_path_factory.mktemp("options")

    def chat(name: str, prompts: list[str]) -> dict[str, Any]:
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        return {"domain": "chat", "path": str(root / f"{name}.jsonl"), "prompt": "prompt"}

    recipe = {
        "target": str(export_experts(save_tiny_moe(root / "parent", initializer_range=0.05), root / "target")), "run": str(root / "run"),
        "draft": {"num_hidden_layers": 2, "intermediate_size": 96, "target_layer_ids": [0, 1], "sliding_window": 32},
        "loss": {"anchors": 4}, "optim": {"muon_lr": 1e-2, "adamw_lr": 1e-2},
        "data": {"sequence_length": 96, "max_new_tokens": 12, "heldout_prompts": 1, "heldout_new_tokens": 10, "responses": str(root / "responses"),
                 "train": [chat("train", [f"Add {i}." for i in range(10)])], "heldout": [chat("held", ["Explain it.", "Say it again."])]},
        "trainer": {"max_steps": 3, "batch_size": 1, "accelerator": "cpu", "checkpoint_every_steps": 2, "log_every_steps": 1}}
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return Lab(root, path)


def test_a_draft_with_everything_is_written_read_and_started_from(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelOpt#2149, sglang#27924: sinks, the trained mask vector, partial rotary, causality and a reduced vocabulary survive writing and a warm start."""
    meta = lab.run("full", "--draft.draft_vocab_size", str(DRAFT_VOCABULARY), "--draft.mask_embedding", "true", "--draft.attention_sinks", "true",
                   "--draft.partial_rotary_factor", "0.5", "--draft.causal", "sliding", "--draft.full_attention_layers", "[1]",
                   "--draft.output_multiplier", "0.9", "--loss.kl_weight", "0.5", "--loss.ce_weight", "0.5")
    draft = read_draft(lab.draft("full"), dtype=torch.float32)
    c = draft.config
    assert (c.draft_vocab_size, c.mask_embedding, c.attention_sinks, c.partial_rotary_factor, c.causal, c.full_attention_layers, c.output_multiplier) == \
        (DRAFT_VOCABULARY, True, True, 0.5, "sliding", (1,), 0.9)
    trained = read_checkpoint(lab.root / "full" / "checkpoints" / "step-00000003.ckpt")
    for name, w in draft.state_dict().items():   # parts of the state, whatever file they are stored in
        if name == "own_head":   # written for other engines; in training it is the target's
            continue
        assert_equal(w, trained[f"draft.{name}"] if name == "draft_ids" else trained[f"draft.{name}"].to(torch.bfloat16).float(), what=name, bits=True)
    for n in range(2):
        assert bool(trained[f"draft.layers.{n}.self_attn.attention_sink_bias"].any())   # it began at zero: it was trained
    embedding = load_file(lab.root / "target" / "model.safetensors")["model.embed_tokens.weight"].float()
    assert not torch.equal(draft.mask_embedding, embedding[c.mask_token_id])   # type: ignore[arg-type]
    answers = [t for p in (lab.root / "responses").rglob("0*.json") for a in json.loads(p.read_text())["responses"] for t in a]
    ids = draft.draft_ids.tolist()   # type: ignore[union-attr, operator]
    assert 2 in ids and len(set(ids)) == DRAFT_VOCABULARY   # the end token always
    assert set(answers) <= set(ids) or len(set(answers)) > DRAFT_VOCABULARY
    assert_equal(draft.own_head, embedding[ids], what="head rows", bits=True)   # type: ignore[arg-type]
    assert 1 <= meta["after"]["all"]["acceptance_length"] <= 8

    began: dict[str, torch.Tensor] = {}
    real = distill.fit

    def spy(trainer: Any, module: Any, **how: Any) -> None:
        began.update({n: t.detach().clone() for n, t in module.draft.state_dict().items()})
        real(trainer, module, **how)

    monkeypatch.setattr(distill, "fit", spy)
    warm = lab.run("warm", "--draft.init_from", str(lab.draft("full")), "--trainer.max_steps", "1")
    assert began.keys() == draft.state_dict().keys()
    for name, w in draft.state_dict().items():
        assert_equal(began[name], w, what=name, bits=True)
    assert warm["before"] == meta["after"] and read_config(lab.draft("warm")) == c and 1 <= warm["after"]["all"]["acceptance_length"] <= 8


def test_a_warm_start_keeps_a_head_and_an_embedding_of_the_drafts_own(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelOpt#2149: what a released draft brings is neither dropped nor trained."""
    lab.run("plain", "--trainer.max_steps", "1")
    brings = read_draft(lab.draft("plain"), dtype=torch.float32)
    embedding = load_file(lab.root / "target" / "model.safetensors")["model.embed_tokens.weight"]
    brings.own_head, brings.own_embedding = embedding.flip(1), embedding * 2
    (lab.root / "brings").mkdir()
    metadata = json.loads((lab.draft("plain") / "kilotok_draft.json").read_text())
    distill.write_draft(lab.root / "brings", brings, metadata=metadata)
    lab.run("brought", "--draft.init_from", str(lab.root / "brings"), "--trainer.max_steps", "1")
    written = load_file(lab.draft("brought") / "model.safetensors")
    assert_equal(written["lm_head.weight"], embedding.flip(1), bits=True)
    assert_equal(written["embed_tokens.weight"], embedding * 2, bits=True)


@pytest.mark.parametrize("draft_ids", [None, range(0, 4096, 3)], ids=["all tokens", "reduced vocabulary"])
def test_the_teacher_keeps_the_target_s_head_beside_one_of_the_draft_s_own(draft_ids: range | None, lab: Lab) -> None:
    """A head of twice the target's weights is the target's with twice the logits, to the bit; a teacher with the draft's head would be another."""
    target: Any = load_exported_model(lab.root / "target", dtype=torch.float32)
    row = pack_row([Response(prompt=(5, 6, 7), response=tuple(range(9, 40)))], length=40, pad_id=0).unsqueeze(0)
    losses = []
    for multiplier, factor in ((2.0, None), (1.0, 2.0)):
        draft = DraftModel(DraftConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
            target_layer_ids=(0, 1), num_target_layers=2, mask_token_id=3, output_multiplier=multiplier,
            draft_vocab_size=None if draft_ids is None else len(draft_ids)))
        draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=target.model.norm.weight)
        if draft_ids is not None:
            draft.draft_ids = torch.tensor(draft_ids)
        if factor is not None:
            draft.own_head = factor * draft.head_rows(target.lm_head.weight.detach())
        losses.append(slot_pass(draft, target, row, loss=SlotLossConfig(ce_weight=0, kl_weight=1, anchors=8), generator=torch.Generator().manual_seed(0)).loss)
    assert float(losses[0].detach()) > 0 and torch.equal(losses[0], losses[1])


def test_texts_and_trees_are_measured_and_the_texts_reused_on_resume(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--data.heldout_texts", "2", "--data.heldout_tree_budget", "9", "--data.responses", str(lab.root / "texts")]

    calls = []

    def stopped(*a: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise OSError("stopped")
        return slot_pass(*a, **how)

    with monkeypatch.context() as patch:
        patch.setattr(distill, "slot_pass", stopped)
        lab.run("texts-run", *options, exit_code=2)
    stored = {p: (p.read_text(), p.stat().st_mtime_ns) for p in (lab.root / "texts").rglob("*.json")}
    assert len([p for p in stored if p.parent.name.startswith("heldout-chat-")]) == 1
    meta = lab.run("texts-run", *options, "--resume")
    assert {p: (p.read_text(), p.stat().st_mtime_ns) for p in (lab.root / "texts").rglob("*.json")} == stored
    for part in ("before", "after"):
        walk = meta[part]["all"]["walk"]
        assert walk["texts"] == 2 and 2 <= walk["tokens"] <= 20 and 1 <= walk["acceptance_length"] <= 8
    assert meta["after"]["all"]["tree"]["budget"] == 9 and "tree" not in meta["before"]["all"]
    assert meta["after"]["all"]["tree"]["acceptance_length_repeats_cut"] >= 1
    assert "walk (no loops)" in meta["printed"] and "tree (no loops)" in meta["printed"]


def test_features_of_another_model_train_another_draft_for_the_same_target(lab: Lab) -> None:
    """The bf16 parent's states, online and from a store, give one draft; the target's own another. Figures and record are the target's."""
    own = lab.run("own")
    parent = lab.run("of-parent", "--features_from", str(lab.root / "parent"))
    stored = lab.run("of-parent-stored", "--features_from", str(lab.root / "parent"), "--data.features", str(lab.root / "store"))
    assert own["target"] == parent["target"] == stored["target"] and own["before"] == parent["before"]
    recorded = {"model": "parent", "sha256": sha256_of_weights(lab.root / "parent")}
    assert own["features_from"] is None and parent["features_from"] == recorded == (read_metadata(lab.draft("of-parent")) or {})["features_from"]
    assert lab.losses("of-parent") == lab.losses("of-parent-stored") != lab.losses("own")
    a, b, c = (load_file(lab.draft(n) / "model.safetensors") for n in ("of-parent", "of-parent-stored", "own"))
    for name, w in a.items():
        assert_equal(b[name], w, what=name, bits=True)
    assert any(not torch.equal(w, c[name]) for name, w in a.items())
    with contextlib.redirect_stderr(io.StringIO()) as refused:   # the store is not the target's
        assert train(["dflash-distill", str(lab.recipe), "--run", str(lab.root / "x"), "--out", str(lab.root / "x-draft"), "--data.features",
                      str(lab.root / "store")]) == 2
    assert "is a store of something else: target_sha256" in refused.getvalue()


def test_anchors_by_token_and_by_document_draw_differently(lab: Lab) -> None:
    losses = []
    for name, more in (("by-default", []), ("by-document", ["--loss.anchors_by", "document"]), ("by-token", ["--loss.anchors_by", "token"])):
        lab.run(name, "--data.sequence_length", "192", *more)   # rows of several documents
        losses.append(lab.losses(name))
    assert losses[0] == losses[1] != losses[2] and len(losses[2]) == 3


@pytest.mark.parametrize("temperatures", ["[3.0]", "[0.0, 3.0]", "[5.0, 1.0]"])
def test_hot_answers_pass_the_check_before_training(temperatures: str, lab: Lab, tmp_path: Path) -> None:
    meta = lab.run(f"hot-{temperatures}", "--data.temperatures", temperatures, "--data.responses", str(tmp_path), "--trainer.max_steps", "1")
    assert meta["parity"]["is_greedy"] == ("0.0" in temperatures) and meta["status"] == "complete"
