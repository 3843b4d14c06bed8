"""The draft on disk: the published tensors bit for bit, and a refusal for whatever is damaged or made for another target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import export_experts, save_tiny_moe
from published_drafts import published_shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tolerances import assert_equal
from torch import Tensor

from kilotok.dflash import checkpoint as checkpoint_module
from kilotok.dflash.checkpoint import DRAFT_METADATA, read_config, read_draft, read_metadata, require_fitting_draft, target_record, write_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import DraftModel
from kilotok.quant.checkpoint import sha256_of_weights

CONFIG = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                     target_layer_ids=(1, 0), num_target_layers=2, mask_token_id=4090, sliding_window=32)
METADATA = {"target": {"name": "out", "sha256": "ab" * 32, "scale_mode": "even"}, "max_steps": 5}


def make_draft(config: DraftConfig = CONFIG, *, seed: int = 0) -> DraftModel:
    draft, generator = DraftModel(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(generator=generator)
    return draft


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "dflash").mkdir()
    write_draft(tmp_path / "dflash", make_draft(), metadata=METADATA)
    return tmp_path / "dflash"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- write and read ---


def test_exactly_the_published_tensors_are_written_in_bf16(written: Path) -> None:
    with safe_open(written / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}
        state = {name: f.get_tensor(name) for name in f.keys()}   # noqa: SIM118  # not a dict
    assert {name: tuple(t.shape) for name, t in state.items()} == published_shapes(CONFIG)
    assert len(state) == 11 * 2 + 3 and {t.dtype for t in state.values()} == {torch.bfloat16}
    for name, weight in make_draft().state_dict().items():
        assert_equal(state[name], weight.to(torch.bfloat16), what=name, bits=True)
    assert sorted(p.name for p in written.iterdir()) == ["config.json", "kilotok_draft.json", "model.safetensors"]
    assert {p.stat().st_mode & 0o044 for p in written.iterdir()} == {0o044}   # a server of another user can read all of it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_reading_gives_the_written_weights(written: Path, dtype: torch.dtype) -> None:
    draft = read_draft(written, dtype=dtype)
    assert draft.config == CONFIG and not draft.training
    for name, weight in make_draft().state_dict().items():
        assert_equal(draft.state_dict()[name], weight.to(torch.bfloat16).to(dtype), what=name, bits=True)


def test_writing_what_was_read_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    write_draft(tmp_path / "again", read_draft(written, dtype=torch.float32), metadata=METADATA)
    for name in ("model.safetensors", "config.json", DRAFT_METADATA):
        assert (tmp_path / "again" / name).read_bytes() == (written / name).read_bytes(), name


def test_config_and_metadata(written: Path) -> None:
    assert json.loads((written / "config.json").read_text()) == CONFIG.to_json() and read_config(written) == CONFIG
    assert read_metadata(written) == {"format": "dflash", "target_layer_ids": [1, 0], "mask_token_id": 4090, "block_size": 8, **METADATA}


def test_names_with_the_model_prefix_are_read(written: Path) -> None:
    expected = read_draft(written, dtype=torch.bfloat16).state_dict()
    state = load_file(written / "model.safetensors")
    save_file({f"model.{name}": t for name, t in state.items()}, written / "model.safetensors")
    for name, weight in read_draft(written, dtype=torch.bfloat16).state_dict().items():
        assert_equal(weight, expected[name], what=name, bits=True)


def test_a_draft_in_several_files_is_read(written: Path) -> None:
    expected = read_draft(written, dtype=torch.bfloat16).state_dict()
    state = load_file(written / "model.safetensors")
    (written / "model.safetensors").unlink()
    for n in range(2):
        save_file({name: t for i, (name, t) in enumerate(sorted(state.items())) if i % 2 == n}, written / f"model-0000{n + 1}-of-00002.safetensors")
    for name, weight in read_draft(written, dtype=torch.bfloat16).state_dict().items():
        assert_equal(weight, expected[name], what=name, bits=True)


# --- damage ---


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor_is_named(written: Path, name: str) -> None:
    edit(written, lambda state: state.pop(name))
    with pytest.raises(ValueError, match=rf"dflash: tensor {name} is missing \(1 such\)\. A DFlash draft of 2 layers like this one has "
                                         r"25 tensors and nothing else"):
        read_draft(written, dtype=torch.float32)


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "layers.0.self_attn.attention_sink_bias", "mask_embedding", "draft_ids", "own_head",
                                  "layers.0.self_attn.q_proj.bias"])
def test_an_unknown_tensor_is_named(written: Path, name: str) -> None:
    edit(written, lambda state: state.update({name: torch.zeros(4)}))
    with pytest.raises(ValueError, match=rf"dflash: tensor {name} is unknown \(1 such\)"):
        read_draft(written, dtype=torch.float32)


@pytest.mark.parametrize(("name", "shape"), [
    ("fc.weight", (64, 192)), ("layers.0.mlp.down_proj.weight", (96, 64)), ("layers.1.self_attn.q_norm.weight", (8,)),
    ("embed_tokens.weight", (4,)), ("lm_head.weight", (500, 64)),   # optional tensors; a head of fewer rows needs draft_vocab_size
])
def test_a_misshapen_tensor_is_named(written: Path, name: str, shape: tuple[int, ...]) -> None:
    edit(written, lambda state: state.update({name: torch.zeros(shape)}))
    right = published_shapes(CONFIG).get(name, (4096, 64))
    with pytest.raises(ValueError) as error:
        read_draft(written, dtype=torch.float32)
    assert f"{name} has shape {shape}; its config.json asks for {right}." in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named_in_reading_and_in_writing(written: Path, tmp_path: Path, value: float) -> None:
    def spoil(state: dict[str, Tensor]) -> None:
        state["layers.1.mlp.gate_proj.weight"][3, 5] = value

    edit(written, spoil)
    with pytest.raises(ValueError, match=r"dflash: layers\.1\.mlp\.gate_proj\.weight holds NaN or infinity\. The draft is damaged"):
        read_draft(written, dtype=torch.float32)
    draft = make_draft()
    with torch.no_grad():
        draft.layers[1].mlp.gate_proj.weight[3, 5] = value   # type: ignore[union-attr, index]
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"^draft: layers\.1\.mlp\.gate_proj\.weight holds NaN or infinity: the run has diverged\."):
        write_draft(tmp_path / "new", draft, metadata=METADATA)
    assert not list((tmp_path / "new").iterdir())


def test_what_overflows_bf16_is_not_finite(tmp_path: Path) -> None:
    draft = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.finfo(torch.float32).max   # rounds to infinity
    with pytest.raises(ValueError, match=r"^draft: fc\.weight holds NaN or infinity"):
        write_draft(tmp_path, draft, metadata=METADATA)


def test_a_truncated_file_and_a_missing_one(written: Path) -> None:
    path = written / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read as safetensors \(.*\)\. It is truncated or damaged: copy it again\."):
        read_draft(written, dtype=torch.float32)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"dflash: no safetensors file\. Give the directory of a DFlash draft head\."):
        read_draft(written, dtype=torch.float32)
    (written / "config.json").unlink()
    for read in (read_config, lambda d: read_draft(d, dtype=torch.float32)):
        with pytest.raises(FileNotFoundError, match=r"dflash: no config\.json\. Give the directory of a DFlash draft head\."):
            read(written)


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise checkpoint_module.SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", fail)
    with pytest.raises(OSError, match=r"^draft: writing to .* failed \(.*No space left on device\)\. Free some space or write elsewhere\."):
        write_draft(tmp_path, make_draft(), metadata=METADATA)


def test_damaged_json(written: Path) -> None:
    (written / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON \(.*\)\. Restore it\."):
        read_config(written)
    for text in ("{", "[]", "{}", '{"target": {}}', '{"target_layer_ids": []}', "3"):
        (written / DRAFT_METADATA).write_text(text)
        with pytest.raises(ValueError, match=r"kilotok_draft\.json: not readable \(.*\)\. Restore it, or distill the draft again\."):
            read_metadata(written)
    (written / DRAFT_METADATA).unlink()
    assert read_metadata(written) is None


# --- does it fit the target? ---


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("target"), scale_mode="even")


def export_tiny(folder: Path, *, scale_mode: str, seed: int = 1) -> Path:
    """An export of a finished run whose trained experts are the parent's, moved."""
    return export_experts(save_tiny_moe(folder / "parent"), folder / "out", scale_mode=scale_mode, move=0.02, seed=seed)


def fit(directory: Path, target: Path, **changes: Any) -> str:
    return require_fitting_draft(directory, target=target, target_config={**json.loads((target / "config.json").read_text()), **changes})


@pytest.fixture
def fitting(tmp_path: Path, target: Path) -> Path:
    (tmp_path / "dflash").mkdir()
    write_draft(tmp_path / "dflash", make_draft(), metadata={"target": target_record(target)})
    return tmp_path / "dflash"


def test_the_record_of_a_target(target: Path) -> None:
    assert target_record(target) == {"name": "out", "sha256": sha256_of_weights(target), "scale_mode": "even"}


def test_a_fitting_draft_says_what_it_was_made_for(fitting: Path, target: Path) -> None:
    assert fit(fitting, target) == f"draft {fitting}: distilled from these weights ({sha256_of_weights(target)[:12]}, scale_mode even)"


def test_a_draft_of_another_tool_is_taken_by_its_shapes(fitting: Path, target: Path) -> None:
    (fitting / DRAFT_METADATA).unlink()
    assert fit(fitting, target) == f"draft {fitting}: no kilotok_draft.json, so whether it was made for this target is not known; its shapes fit"
    with pytest.raises(ValueError, match=r"hidden_size 64"):
        fit(fitting, target, hidden_size=128)


@pytest.mark.parametrize(("name", "key", "mine", "theirs"), [
    ("hidden_size", "hidden_size", 64, 128), ("vocab_size", "vocab_size", 4096, 4095), ("num_target_layers", "num_hidden_layers", 2, 3),
])
def test_a_draft_of_other_shapes_is_refused(fitting: Path, target: Path, name: str, key: str, mine: int, theirs: int) -> None:
    with pytest.raises(ValueError) as error:
        fit(fitting, target, **{key: theirs})
    assert str(error.value) == f"draft: {fitting} is for a target with {name} {mine}; {target} has {theirs}. Distill a draft for this target."


def test_a_target_s_embedding_may_have_more_rows(fitting: Path, target: Path) -> None:
    """MiMo's is padded: 152,576 rows for a draft that says 152,064."""
    assert fit(fitting, target, vocab_size=4224) == fit(fitting, target)


def test_a_draft_of_other_weights_is_refused(fitting: Path, target: Path, tmp_path: Path) -> None:
    other = export_tiny(tmp_path / "other", scale_mode="even", seed=2)
    mine, theirs = sha256_of_weights(target)[:12], sha256_of_weights(other)[:12]
    assert mine != theirs
    with pytest.raises(ValueError) as error:
        fit(fitting, other)
    assert str(error.value).startswith(f"draft: {fitting} was distilled from out (weights {mine}); {other} has weights {theirs}. Distill a draft")


def test_a_draft_of_another_scale_mode_is_refused(fitting: Path, tmp_path: Path) -> None:
    other = export_tiny(tmp_path / "other", scale_mode="floor")
    with pytest.raises(ValueError) as error:
        fit(fitting, other)
    assert str(error.value).startswith(f"draft: {fitting} was distilled from a target with scale_mode even; {other} has floor. Distill a draft for this target")


def test_taps_that_were_edited_are_refused(fitting: Path, target: Path) -> None:
    """A tap off by one drafts badly and looks like nothing: config.json has to say what training used, in its order."""
    raw = json.loads((fitting / "config.json").read_text())
    edit_json(fitting / "config.json", dflash_config={**raw["dflash_config"], "target_layer_ids": [0, 1]})
    with pytest.raises(ValueError) as error:
        fit(fitting, target)
    assert str(error.value) == (f"draft: {fitting}: config.json taps layers [0, 1], the draft was trained on [1, 0] (kilotok_draft.json). Restore config.json.")
