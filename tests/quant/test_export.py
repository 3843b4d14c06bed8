"""Export: the bytes on disk are the numbers of training, for our reader and for transformers with compressed-tensors."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import MODES, ScaleMode
from conftest import finished_run
from forked import start
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kilotok.quant.archs import load_config, load_model
from kilotok.quant.checkpoint import CheckpointReader, disk, export_run, inspect_directory, load_exported_model, read_exported_experts, stream
from kilotok.quant.experts import attach_fake_quant
from kilotok.quant.formats import MXFP4, Packed
from kilotok.quant.plan import make_plan
from kilotok.quant.tensor import fake_quant_weight
from kilotok.runtime.cli import main as kilotok

EXPERTS = [f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")]


def write_run(directory: Path, parent: Path, *, scale_mode: str = "even", step: int = 6, max_steps: int = 6) -> dict[str, torch.Tensor]:
    """A finished run whose trained experts are the parent's, moved; returns them (fp32 masters)."""
    return finished_run(directory, parent, scale_mode=scale_mode, step=step, max_steps=max_steps, move=0.02, seed=1)


@pytest.fixture
def run(tmp_path: Path, tiny_moe: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    return tmp_path / "run", write_run(tmp_path / "run", tiny_moe)


def load_with_compressed_tensors(directory: Path) -> torch.nn.Module:
    """The export as transformers and compressed-tensors read it, in fp32.

    compressed-tensors dequantizes to bf16, which holds every MXFP4 value, whatever dtype is asked for; transformers refuses
    .float() on such a model, so the parameters are widened one by one for both models to compute alike.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model  # type: ignore[no-any-return]


def assert_nothing_left(folder: Path, *, before: set[Path]) -> None:
    assert sorted(set(folder.rglob("*")) - before) == []


@pytest.mark.parametrize("scale_mode", MODES)
def test_transformers_with_compressed_tensors_reads_exactly_the_weights_of_training(tmp_path: Path, tiny_moe: Path, scale_mode: ScaleMode) -> None:
    trained = write_run(tmp_path / "run", tiny_moe, scale_mode=scale_mode)
    export_run(tmp_path / "run", tmp_path / "out")
    theirs = load_with_compressed_tensors(tmp_path / "out")
    ours = load_model(tiny_moe, dtype=torch.float32)
    plan = make_plan(load_config(tiny_moe), scale_mode=scale_mode, where="test")
    assert sorted(e.name for e in plan.experts) == sorted(EXPERTS)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, w in trained.items():
            parameters[name].copy_(w)
    state = theirs.state_dict()
    for name, w in trained.items():
        expected = fake_quant_weight(w, name=name, scale_mode=scale_mode).float()
        assert torch.equal(state[name], expected), name
    for name, w in parameters.items():
        if name not in trained:
            assert torch.equal(state[name], w), name
    attach_fake_quant(ours, plan=plan)
    ids = torch.randint(4, 4096, (3, 40))
    with torch.no_grad():
        # the same weights through the same operations in the same order: equal to the bit
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_a_real_run_exports_to_the_logits_it_was_trained_to(tiny_recipe: Path, tmp_path: Path) -> None:
    from kilotok.train.cli import main as train

    assert train(["qat", str(tiny_recipe)]) == 0
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    ids = torch.randint(4, 4096, (2, 33))
    model = load_exported_model(tmp_path / "out", dtype=torch.float32)
    theirs = load_with_compressed_tensors(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
    exported = json.loads((tmp_path / "out" / "kilotok.json").read_text())
    assert exported["parent"] == meta["parent"] and exported["scale_mode"] == "even" and exported["run"]["step"] == 6
    assert exported["run"]["results"]["qat"] == meta["qat"]


def test_everything_but_the_experts_is_copied_bit_for_bit(run: tuple[Path, dict[str, torch.Tensor]], tiny_moe: Path, tmp_path: Path) -> None:
    result = export_run(run[0], tmp_path / "out")
    parent, exported = load_file(tiny_moe / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = {n for n in parent if ".mlp.experts." not in n}
    assert result.kept_tensors == len(kept) and result.expert_tensors == 2 * 4 * 3
    for name in kept:
        assert exported[name].dtype == parent[name].dtype and torch.equal(exported[name], parent[name]), name
    packed = {n for n in exported if n.endswith((".weight_packed", ".weight_scale"))}
    assert set(exported) == kept | packed and len(packed) == 2 * 2 * 4 * 3
    assert exported["model.layers.0.mlp.experts.3.up_proj.weight_packed"].shape == (32, 32)
    assert exported["model.layers.0.mlp.experts.3.up_proj.weight_scale"].shape == (32, 2)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tiny_moe / file).read_bytes()
        assert (tmp_path / "out" / file).stat().st_mode == (tmp_path / "out" / "model.safetensors").stat().st_mode   # readable by a server too
    text = "def f(x):\n    return x"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(tiny_moe)(text)


def test_config_names_experts_as_targets_and_every_other_linear_as_ignored(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    import re

    export_run(run[0], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (target,) = config["config_groups"]["group_0"]["targets"]
    pattern = target.removeprefix("re:")
    for e in range(4):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            assert re.match(pattern, f"model.layers.1.mlp.experts.{e}.{projection}")   # how vLLM and compressed-tensors look a layer up
    assert not re.match(pattern, "model.layers.1.mlp.gate_proj") and not re.match(pattern, "model.layers.1.mlp.shared_expert.up_proj")
    attention = [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in ("k", "q", "v", "o", "qkv")]   # qkv: as engines put them together
    assert sorted(config["ignore"]) == sorted([*attention, "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"])


def test_sharded_export_reads_the_same(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_run(run[0], tmp_path / "one")
    monkeypatch.setattr(stream, "MAX_SHARD_BYTES", 100_000)
    export_run(run[0], tmp_path / "many")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) >= 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    a, b = CheckpointReader(tmp_path / "one"), CheckpointReader(tmp_path / "many")
    assert sorted(a.names) == sorted(b.names)
    assert all(torch.equal(a.get(n), b.get(n)) for n in a.names)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(b.get(n).numel() * b.get(n).element_size() for n in b.names)
    reread = AutoModelForCausalLM.from_pretrained(tmp_path / "many").state_dict()
    assert torch.equal(reread[EXPERTS[0]], AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()[EXPERTS[0]])
    (tmp_path / "many" / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{files[1]}: named by .* but not there"):
        CheckpointReader(tmp_path / "many")


def test_a_sharded_parent_exports(run: tuple[Path, dict[str, torch.Tensor]], tiny_moe: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe)
    (tiny_moe / "model.safetensors").unlink()
    model.save_pretrained(tiny_moe, max_shard_size="200KB")
    assert len(list(tiny_moe.glob("*.safetensors"))) >= 2
    trained = write_run(tmp_path / "run2", tiny_moe)
    export_run(tmp_path / "run2", tmp_path / "out")
    experts = read_exported_experts(tmp_path / "out", arch=make_plan(load_config(tiny_moe), scale_mode="even", where="test").arch)
    assert all(torch.equal(experts[n].dequantize(), fake_quant_weight(w, name=n, scale_mode="even")) for n, w in trained.items())


def test_trained_tensors_beside_the_experts_are_measured_and_written_alike(
        tiny_recipe: Path, tiny_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """quant.trainable all on a tied parent that stores its head as well: the head is the trained embedding in every reader."""
    from kilotok.quant.quality import measure_quality
    from kilotok.train.cli import main as train
    from kilotok.train.config import QATRecipe
    from kilotok.train.data import heldout_rows
    from kilotok.train.recipe import load_recipe

    state = load_file(tiny_moe / "model.safetensors")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tiny_moe / "model.safetensors", metadata={"format": "pt"})
    assert train(["qat", str(tiny_recipe), "--quant.trainable", "all", "--optim.lr", "1e-2"]) == 0
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "trained ones rounded to the parent's dtype" in capsys.readouterr().out
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    assert not torch.equal(exported["lm_head.weight"], state["model.embed_tokens.weight"])
    recipe = load_recipe(QATRecipe, path=tiny_recipe, overrides=[])
    rows = heldout_rows(recipe.data, tokenizer=AutoTokenizer.from_pretrained(tiny_moe))["code"]
    theirs = load_with_compressed_tensors(tmp_path / "out")
    measured = measure_quality(theirs, parent=load_model(tiny_moe, dtype=torch.float32), rows=rows, rows_per_batch=2)
    reported = json.loads((tmp_path / "run" / "meta.json").read_text())["qat"]["code"]
    assert measured.kl == reported["kl"] and measured.cross_entropy == reported["cross_entropy"]


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe"])
def test_other_families_read_back_exactly(family: str, tmp_path: Path) -> None:
    """Qwen2-MoE with a shared expert and a dense layer, and OLMoE: the same checks as for Qwen3-MoE."""
    from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
             "vocab_size": 512, "intermediate_size": 64, "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if family == "qwen2_moe":
        extra = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]}
        model: torch.nn.Module = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **extra))
    else:
        model = OlmoeForCausalLM(OlmoeConfig(**shape))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "parent")  # type: ignore[operator]
    trained = write_run(tmp_path / "run", tmp_path / "parent")
    export_run(tmp_path / "run", tmp_path / "out")
    theirs = load_with_compressed_tensors(tmp_path / "out")
    ours = load_exported_model(tmp_path / "out", dtype=torch.float32)
    state = theirs.state_dict()
    assert len(trained) == (4 if family == "qwen2_moe" else 6)
    for name, w in trained.items():
        assert torch.equal(state[name], fake_quant_weight(w, name=name, scale_mode="even").float()), name
    ids = torch.randint(2, 512, (2, 20))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_inspect_prints_what_is_there(run: tuple[Path, dict[str, torch.Tensor]], tiny_moe: Path, tmp_path: Path) -> None:
    export_run(run[0], tmp_path / "out")
    report = inspect_directory(tmp_path / "out")
    assert "compressed-tensors mxfp4-pack-quantized" in report and "packed experts     24 tensors" in report
    assert "scale_mode    even" in report and "QAT step 6 of 6" in report and "WARNING" not in report
    assert "different; 0 of 1,536 blocks all zero" in report
    assert "unquantized" in inspect_directory(tiny_moe)
    with pytest.raises(ValueError, match="is a run of `train qat`"):
        inspect_directory(run[0])


def test_inspect_warns_of_an_expert_that_was_wiped(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    export_run(run[0], tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    state["model.layers.1.mlp.experts.2.down_proj.weight_packed"].zero_()
    save_file(state, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    state["model.layers.0.mlp.experts.1.up_proj.weight_scale"][3:5, 0] = 0
    save_file(state, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    report = inspect_directory(tmp_path / "out")
    assert "WARNING       model.layers.1.mlp.experts.down_proj: experts [2] are all zero" in report
    assert "64 of 1,536 blocks all zero" in report and "WARNING       2 blocks hold codes under scale byte 0" in report


def test_an_unfinished_run_is_exported_with_a_note(tiny_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", tiny_moe, step=4, max_steps=6)
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "stopped at step 4 of 6" in capsys.readouterr().out


def test_a_parent_that_moved_is_named_on_the_command_line(run: tuple[Path, dict[str, torch.Tensor]], tiny_moe: Path, tmp_path: Path) -> None:
    tiny_moe.rename(tmp_path / "moved")
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 2
    assert kilotok(["export", str(run[0]), str(tmp_path / "out"), "--parent", str(tmp_path / "moved")]) == 0
    assert (tmp_path / "out" / "kilotok.json").is_file()


def test_an_existing_directory_is_refused_and_untouched(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    before = set(tmp_path.rglob("*"))
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert_nothing_left(tmp_path, before=before)


def break_parent_truncate(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_parent_change(tmp_path: Path) -> None:
    state = load_file(tmp_path / "tiny" / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, tmp_path / "tiny" / "model.safetensors", metadata={"format": "pt"})


def break_parent_remove(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "tiny")


def break_run_nan(tmp_path: Path) -> None:
    path = next((tmp_path / "run" / "checkpoints").iterdir())
    checkpoint = torch.load(path)
    checkpoint["state_dict"][f"student.{EXPERTS[0]}"][1, 2, 3] = float("nan")
    torch.save(checkpoint, path)


def break_run_truncate(tmp_path: Path) -> None:
    path = next((tmp_path / "run" / "checkpoints").iterdir())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def break_run_empty(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run" / "checkpoints")


def break_run_other_model(tmp_path: Path) -> None:
    path = next((tmp_path / "run" / "checkpoints").iterdir())
    torch.save({"state_dict": {"student.model.norm.weight": torch.ones(64)}}, path)


@pytest.mark.parametrize(("damage", "parts"), [
    (break_parent_truncate, ["model.safetensors", "truncated or damaged"]),
    (break_parent_change, ["is not the parent of", "--parent"]),
    (break_parent_remove, ["tiny", "is not there", "--parent DIR"]),
    (break_run_nan, ["model.layers.0.mlp.experts.1.gate_proj.weight", "nan at index (2, 3)"]),
    (break_run_truncate, ["step-00000006.ckpt", "cannot be read as a checkpoint", "--resume"]),
    (break_run_empty, ["no checkpoint yet", "--resume"]),
    (break_run_other_model, ["holds no model.layers.0.mlp.experts.down_proj (of 4 missing)", "another model"]),
])
def test_bad_input_is_one_clear_error_and_leaves_nothing(
        damage: Callable[[Path], None], parts: list[str], run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    damage(tmp_path)
    before = set(tmp_path.rglob("*"))
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    for part in parts:
        assert part in error
    assert_nothing_left(tmp_path, before=before)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, tiny_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kilotok(["export", str(tiny_moe), str(tmp_path / "out")]) == 2
    assert "Give the run directory that `train qat` wrote" in capsys.readouterr().err
    assert kilotok(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "no directory at" in capsys.readouterr().err


def test_too_little_room_is_refused_before_writing(
        run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    before = set(tmp_path.rglob("*"))
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 2
    assert "Free some space" in capsys.readouterr().err
    assert_nothing_left(tmp_path, before=before)


def limit_files(kilobytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1000, kilobytes * 1000))


@pytest.mark.parametrize("kilobytes", [100, 500])
def test_a_disk_that_fills_up_while_writing_leaves_nothing(
        run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, kilobytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernel refuses writes beyond a file-size limit (as a full disk refuses them) in a process of its own."""
    before = set(tmp_path.rglob("*"))
    done = start(kilotok, ["export", str(run[0]), str(tmp_path / "out")], folder=tmp_path_factory.mktemp("printed"), before=partial(limit_files, kilobytes))
    assert (status := done.wait()) == 2, f"{status}: {done.stderr.read_text()}"
    assert "Free some space" in done.stderr.read_text()
    assert_nothing_left(tmp_path, before=before)
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 0   # with room again


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small file system needs root on Linux")
def test_a_really_full_disk_leaves_nothing(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        monkeypatch.setattr("kilotok.quant.checkpoint.export.require_free_space", lambda *a, **k: None)
        assert kilotok(["export", str(run[0]), str(small / "out")]) == 2
        assert "Free some space" in capsys.readouterr().err
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_a_killed_export_of_something_else_left_is_removed(
        run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / ".out.unfinished-0123456789ab"
    stale.mkdir()
    (stale / "model.safetensors").write_text("half")
    (stale / ".lock-0").touch()
    assert kilotok(["export", str(run[0]), str(tmp_path / "out")]) == 0
    assert "left by an export of something else that was killed" in capsys.readouterr().out
    assert not stale.exists() and list(tmp_path.glob(".out*")) == []


def test_a_difference_on_re_reading_stops_the_export(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the verification is for: one flipped nibble between training and disk."""
    real = MXFP4.encode

    def flip(self: MXFP4, weight: torch.Tensor, *, name: str, scale_mode: ScaleMode) -> Packed:
        packed = real(self, weight, name=name, scale_mode=scale_mode)
        if name.endswith("layers.1.mlp.experts.0.down_proj.weight"):
            packed.elements[5, 7] ^= 0x70
        return packed

    monkeypatch.setattr(MXFP4, "encode", flip)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight: 1 of 2048 values differ from training; first at \(5, 15\)"):
        export_run(run[0], tmp_path / "out")
    assert_nothing_left(tmp_path, before=before)
