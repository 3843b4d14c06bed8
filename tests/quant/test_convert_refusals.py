"""What `kilotok convert` refuses: directories that contradict themselves, files that are damaged; and drafts that go along."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import export_experts, save_tiny_moe
from safetensors.torch import load_file, save_file

from kilotok.dflash.checkpoint import require_fitting_draft, target_record, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.quant.checkpoint import convert_directory, inspect_directory
from kilotok.runtime.cli import main as kilotok

DRAFT = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                    target_layer_ids=(1, 0), num_target_layers=2, mask_token_id=4090)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    out = export_experts(save_tiny_moe(folder / "parent"), folder / "out", scale_mode="even")
    (out / "dflash").mkdir()
    draft = DraftModel(DRAFT)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter)
    write_draft(out / "dflash", draft, metadata={"target": target_record(out)})
    return out


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "source"))


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def set_group(config: dict[str, Any], **values: Any) -> None:
    group = config["quantization_config"]["config_groups"]["group_0"]
    group |= {k: v for k, v in values.items() if k == "format"}
    group["weights"] |= {k: v for k, v in values.items() if k != "format"}


CONTRADICTIONS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(num_hidden_layers=c["num_hidden_layers"] + 1), r"config.json has \d+ layers; the files have \d+"),
    (lambda c: c.update({"num_experts" if "num_experts" in c else "num_local_experts": 3}), r"experts 3; .* has \d+ experts in the files"),
    (lambda c: set_group(c, group_size=16), "group_size is 16; a block of MXFP4 has 32 weights"),
    (lambda c: set_group(c, format="nvfp4-pack-quantized"), "groups have the format nvfp4-pack-quantized"),
]


@pytest.mark.parametrize(("change", "words"), CONTRADICTIONS)
def test_a_config_that_contradicts_the_files_is_refused(source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_config(source, change)
    for call in (lambda: convert_directory(source, tmp_path / "out", layout="mimo"), lambda: inspect_directory(source)):
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "out").exists()


def test_scales_that_are_no_bytes_are_refused(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in tensors if n.endswith("weight_scale"))
    save_file(tensors | {name: tensors[name].float()}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is F32; MXFP4 codes and scales are bytes"):
        convert_directory(source, tmp_path / "out", layout="mimo")


def test_damaged_json_is_named(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    for text, words in (('{"metadata": {}}', "model.safetensors.index.json: has no weight_map"), ("{", "model.safetensors.index.json: not readable as JSON")):
        (source / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            convert_directory(source, tmp_path / "out", layout="mimo")
    (source / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        convert_directory(source, tmp_path / "out", layout="mimo")


def test_options_that_mean_nothing_and_a_damaged_draft_are_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^jobs: must be at least 1; got 0\."):
        convert_directory(source, tmp_path / "out", layout="mimo", jobs=0)
    with pytest.raises(ValueError, match=r"^dtype: is of the values that layout dense writes; mimo keeps"):
        convert_directory(source, tmp_path / "out", layout="mimo", dtype=torch.float32)
    weights = source / "dflash" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"dflash.model.safetensors: .*truncated or damaged"):
        convert_directory(source, tmp_path / "out", layout="mimo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_draft_fits_what_its_target_was_converted_to_and_nothing_else(source: Path, tmp_path: Path) -> None:
    def fit(directory: Path) -> str:
        return require_fitting_draft(directory / "dflash", target=directory, target_config=json.loads((directory / "config.json").read_text()))

    convert_directory(source, tmp_path / "mimo", layout="mimo")
    assert "same values in another layout" in fit(tmp_path / "mimo")
    assert "values of     weights" in inspect_directory(tmp_path / "mimo")
    convert_directory(tmp_path / "mimo", tmp_path / "back", layout="compressed-tensors")
    assert "distilled from these weights" in fit(tmp_path / "back")
    edit = load_file(tmp_path / "mimo" / "model.safetensors")
    name = next(n for n in edit if n.endswith("norm.weight"))
    save_file(edit | {name: edit[name] + 1}, tmp_path / "mimo" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="was distilled from out"):
        fit(tmp_path / "mimo")


def test_the_draft_counts_as_room_that_is_needed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(p.stat().st_size for p in (source / "dflash").rglob("*")) + (source / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed))     # less than that and what is added for small files
    with pytest.raises(OSError, match="Free some space or write elsewhere"):
        convert_directory(source, tmp_path / "out", layout="mimo")


def test_the_command_says_what_it_leaves_out(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kilotok(["convert", str(source), str(tmp_path / "dense"), "--layout", "dense", "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "tensors written in that dtype" in said and "no record of the export, no draft head" in said
    assert kilotok(["inspect", str(source / "dflash")]) == 2
    assert "is the draft head of" in capsys.readouterr().err


def test_a_reader_who_leaves_early_is_no_error(source: Path) -> None:
    program = f"import sys; from kilotok.runtime.cli import main; sys.exit(main(['inspect', {str(source)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 0 and b"error" not in process.stderr.read()
