"""The store of the target's states: training from it is training without it, and it is never used for what it was not made of."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import export_experts, save_tiny_moe
from safetensors import SafetensorError
from safetensors.torch import load_file
from tolerances import assert_equal
from torch import Tensor

from kilotok.train import features, shares
from kilotok.train.cli import main as train
from kilotok.train.distill_data import RowData, pack_row
from kilotok.train.features import StoredRows, StoreRecord, describe_store, write_features
from kilotok.train.responses import Response
from kilotok.train.shares import Share


def rows_of(count: int) -> list[Tensor]:
    return [pack_row([Response(prompt=(10 + i, 11), response=(12, 13 + i, 14))], length=8, pad_id=0) for i in range(count)]


ROWS = rows_of(7)
SETTINGS: dict[str, Any] = {"target_sha256": "t", "layer_ids": (0, 1), "dtype": torch.float32, "precision": "32-true", "hidden_size": 3, "batch_size": 2}


def record_of(**changed: Any) -> StoreRecord:
    return describe_store(**{"rows": ROWS, **SETTINGS, **changed})


class Target:
    """Features [B, S, 6] and states [B, S, 3] that tell the row; `read` holds how many rows it was given each time."""

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.read: list[int] = []
        self.dies_after = dies_after

    def __call__(self, rows_B4S: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.read) == self.dies_after:
            raise KeyboardInterrupt
        self.read.append(len(rows_B4S))
        ids = rows_B4S[:, 0].float()
        return ids[..., None] * torch.arange(1.0, 7.0), ids[..., None] / torch.arange(3.0, 6.0)


def write(directory: Path, target: Target, *, said: list[str] | None = None, part: Share | None = None, **changed: Any) -> StoreRecord:
    record = record_of(**changed)
    write_features(directory, changed.get("rows", ROWS), record=record, read=target, batch_size=2, say=(said if said is not None else []).append, part=part)
    return record


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_BYTES", 600)   # a row has 8 * 9 * 4 = 288 bytes: two rows a shard


def test_every_row_comes_back_with_its_states_to_the_bit(tmp_path: Path) -> None:
    said: list[str] = []
    record = write(tmp_path / "s", target := Target(), said=said)
    assert (record.row_bytes, record.num_bytes, record.rows_a_shard, record.num_shards) == (288, 7 * 288, 2, 4) and target.read == [2, 2, 2, 1]
    assert said[0].endswith("7 rows of 8 tokens, 0.000 GB; 4 of 4 shards are missing")
    files = sorted(p.name for p in (tmp_path / "s").iterdir())
    assert files == [f"{i:06d}.safetensors" for i in range(4)] + ["features.json"]
    tensors = [t for name in files[:4] for t in load_file(tmp_path / "s" / name).values()]
    assert sum(t.numel() * t.element_size() for t in tensors) == record.num_bytes   # what was said is what it takes
    stored = StoredRows(tmp_path / "s", ROWS[3:], record=record, first=3)
    assert len(stored) == 4
    for i in (3, 0, 2, 1):
        row, got_features, got_hidden = stored[i]
        expected = Target()(ROWS[3 + i][None])
        assert_equal(row, ROWS[3 + i])
        assert_equal(got_features, expected[0][0], bits=True)
        assert_equal(got_hidden, expected[1][0], bits=True)


def test_a_killed_store_goes_on_behind_its_last_whole_shard(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "s", Target(dies_after=2))
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["000000.safetensors", "000001.safetensors", "features.json"]
    write(tmp_path / "s", target := Target())
    assert target.read == [2, 1]
    write(tmp_path / "whole", Target())
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "s" / path.name).read_bytes()
    write(tmp_path / "s", target := Target())
    assert target.read == []


def test_ranks_make_every_second_shard_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "STALLED_S", 0.0)
    with pytest.raises(TimeoutError, match=r"shards of the other ranks: \S+000001\.safetensors and 1 more have not come for 0 s\."):
        write(tmp_path / "s", first := Target(), part=Share(index=0, count=2))
    write(tmp_path / "s", second := Target(), part=Share(index=1, count=2))
    assert (first.read, second.read) == ([2, 2], [2, 1])
    with pytest.raises(TimeoutError, match="the first rank's record"):   # a second rank never writes into what is not known
        write(tmp_path / "new", Target(), part=Share(index=1, count=2))
    assert not (tmp_path / "new").exists()


def test_it_is_refused_before_anything_is_written_when_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 7 * 288 - 1))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"^data\.features: needs 0\.0 MB at "):
        write(tmp_path / "s", Target())
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 7 * 288))  # type: ignore[attr-defined]
    write(tmp_path / "s", Target())


@pytest.mark.parametrize(("changed", "message"), [
    ({"target_sha256": "u"}, "target_sha256: it has t, this run u"), ({"layer_ids": (1, 0)}, r"layer_ids: it has \[0, 1\], this run \[1, 0\]"),
    ({"dtype": torch.bfloat16}, "dtype: it has torch.float32, this run torch.bfloat16"),
    ({"precision": "bf16-mixed"}, "precision: it has 32-true, this run bf16"),
    ({"rows": rows_of(6)}, "rows_sha256: it has "),
], ids=["target", "taps", "dtype", "precision", "rows"])
def test_a_store_of_something_else_is_refused_and_untouched(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "s", Target())
    before = {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()}
    with pytest.raises(ValueError, match=rf"^data\.features: \S+ is a store of something else: .*{message}"):
        write(tmp_path / "s", Target(), **changed)
    assert {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()} == before


def test_a_directory_of_other_things_and_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"^data\.features: \S+other holds something, and no features\.json\."):
        write(tmp_path / "other", Target())
    record = write(tmp_path / "s", Target())
    (tmp_path / "s" / "000001.safetensors").write_bytes(b"torn")
    stored = StoredRows(tmp_path / "s", ROWS, record=record, first=0)
    assert len(stored[1]) == 3
    with pytest.raises(ValueError, match=r"000001\.safetensors: not readable as a shard of states .* Remove it and resume"):
        stored[2]
    (tmp_path / "s" / "features.json").write_text("{")
    with pytest.raises(ValueError, match=r"features\.json: not readable as the record of a store"):
        write(tmp_path / "s", Target())


@pytest.mark.parametrize("error", [SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), OSError(28, "No space left")])
def test_a_disk_that_fills_up_says_what_to_do_and_keeps_what_is_whole(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = features.save_file, []

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise error
        real(tensors, path)

    monkeypatch.setattr(features, "save_file", save_file)
    with pytest.raises(OSError, match=r"^data\.features: writing \S+000002\.safetensors failed \(.*No space left.*\)\. Free some space and continue"):
        write(tmp_path / "s", Target())
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["000000.safetensors", "000001.safetensors", "features.json"]


def test_what_a_kill_left_half_written_is_in_nobody_s_way(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / ".features.json.partial").write_text('{"target')
    (tmp_path / "s" / ".000000.safetensors.partial").write_bytes(b"half")
    write(tmp_path / "s", target := Target())
    assert target.read == [2, 2, 2, 1]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [*(f"{i:06d}.safetensors" for i in range(4)), "features.json"]


def test_the_loader_yields_states_with_their_rows(tmp_path: Path) -> None:
    """Batches by step as without a store, each row with its own states, also in the second source and after a resume."""
    record = write(tmp_path / "s", Target())
    stored = [StoredRows(tmp_path / "s", ROWS[:3], record=record, first=0), StoredRows(tmp_path / "s", ROWS[3:], record=record, first=3)]

    def batches(sources: list[Any], *, step: int) -> list[Any]:
        data = RowData(sources, weights=[0.5, 0.5], seed=1, batch_size=2, accumulate=1, max_steps=6)
        data.trainer = SimpleNamespace(strategy=None, global_step=step, world_size=1, global_rank=0)  # type: ignore[assignment]
        return list(data.train_dataloader())

    for step in (0, 4):
        plain = batches([ROWS[:3], ROWS[3:]], step=step)
        with_states = batches(stored, step=step)
        assert len(plain) == len(with_states) == 6 - step
        for rows, (same, got_features, got_hidden) in zip(plain, with_states, strict=True):
            assert_equal(same, rows)
            for got, expected in zip((got_features, got_hidden), Target()(rows), strict=True):
                assert_equal(got, expected, bits=True)


def chat(path: Path, prompts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return {"domain": path.stem, "path": str(path), "prompt": "prompt"}


def test_training_from_a_store_is_bitwise_training_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss and draft, in fp32 on the CPU, on answers made by shares; also from a store whose last shard is missing, which is made again."""
    target = export_experts(save_tiny_moe(tmp_path / "parent", initializer_range=0.05), tmp_path / "target")
    recipe = {
        "target": str(target), "run": str(tmp_path / "dflash-run"),
        "draft": {"num_hidden_layers": 1, "intermediate_size": 32, "target_layer_ids": [0, 1], "sliding_window": 16},
        "loss": {"anchors": 4, "ce_weight": 0.5, "kl_weight": 0.5}, "optim": {"muon_lr": 1e-2, "adamw_lr": 1e-2},
        "data": {"sequence_length": 48, "max_new_tokens": 6, "generation_batch": 1, "heldout_prompts": 1, "heldout_new_tokens": 2,
                 "responses": str(tmp_path / "responses"),
                 "train": [chat(tmp_path / "chat.jsonl", [f"Add {i}." for i in range(4)]), chat(tmp_path / "math.jsonl", ["2 + 2?"])],
                 "heldout": [chat(tmp_path / "held.jsonl", ["Explain."])]},
        "trainer": {"max_steps": 4, "batch_size": 1, "accumulate_grad_batches": 2, "accelerator": "cpu", "checkpoint_every_steps": 2, "log_every_steps": 1}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))

    def run(name: str, *more: str) -> tuple[dict[str, Tensor], str]:
        assert train(["dflash-distill", str(path), "--run", str(tmp_path / name), "--out", str(tmp_path / f"{name}-draft"), *more]) == 0
        return load_file(tmp_path / f"{name}-draft" / "model.safetensors"), (tmp_path / name / "metrics.csv").read_text()

    for shard, made in (("2/2", 2), ("1/2", 3), ("1/2", 0)):   # five prompts, one a batch, in sources of four and one
        assert train(["dflash-distill", str(path), "--data.shard", shard]) == 0
        assert f"share {shard} is answered, {made} batches of it now." in capsys.readouterr().out
    assert not (tmp_path / "dflash-run").exists() and not (target / "dflash").exists()
    answers = {p: (p.read_text(), p.stat().st_mtime_ns) for p in (tmp_path / "responses").rglob("*.json")}
    online = run("online")
    assert {p: (p.read_text(), p.stat().st_mtime_ns) for p in (tmp_path / "responses").rglob("*.json")} == answers and len(answers) == 5
    offline = run("offline", "--data.features", str(tmp_path / "store"))
    assert offline[1] == online[1]
    for name, weight in online[0].items():
        assert_equal(offline[0][name], weight, what=name, bits=True)
    shards = sorted((tmp_path / "store").glob("*.safetensors"))
    shards[-1].unlink()
    again = run("again", "--data.features", str(tmp_path / "store"))
    assert again[1] == online[1] and shards[-1].is_file()
    capsys.readouterr()
    assert train(["dflash-distill", str(path), "--run", str(tmp_path / "third"), "--out", str(tmp_path / "third-draft"), "--data.features",
                  str(tmp_path / "store"), "--draft.target_layer_ids", "[1, 0]"]) == 2
    assert "is a store of something else: layer_ids: it has [0, 1], this run [1, 0]" in capsys.readouterr().err
