"""Writing in shards: the bytes safetensors would write, bounded memory, several threads and ranks, and nothing half-written under the final name."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import finished_run, save_tiny_moe
from families import save_family
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from kilotok.quant.checkpoint import (
    CheckpointReader,
    ExportOptions,
    RankResult,
    convert_directory,
    export_run,
    load_exported_model,
    stream,
)
from kilotok.quant.checkpoint.masters import Masters
from kilotok.quant.checkpoint.progress import Progress
from kilotok.quant.checkpoint.stream import TensorSpec, Unit, in_parallel, plan_shards, write_index, write_shards
from kilotok.quant.formats import MXFP4
from kilotok.runtime.cli import main as kilotok


@pytest.fixture
def run(tmp_path: Path, tiny_moe: Path) -> Path:
    finished_run(tmp_path / "run", tiny_moe, move=0.02)
    return tmp_path / "run"


def unit(name: str, tensor: torch.Tensor, *, owner: int = 0) -> Unit:
    spec = TensorSpec(name=name, dtype={torch.bfloat16: "BF16", torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype], shape=tuple(tensor.shape))
    return Unit(tensors=(spec,), make=lambda: [tensor], check=lambda written: 0, owner=owner)


# --- the files ---


def test_a_shard_is_the_file_safetensors_writes(tmp_path: Path) -> None:
    state = {"layers.10.w": torch.randn(3, 5), "layers.9.w": torch.randn(7).to(torch.bfloat16), "a": torch.arange(9, dtype=torch.uint8),
             "empty": torch.empty(0, 4), "scalar": torch.tensor(2.0)}
    write_shards(tmp_path, plan_shards([unit(n, t) for n, t in state.items()]), jobs=1, label="test")
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_shards_keep_their_limit_and_the_index_its_total(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.full((100,), i, dtype=torch.uint8) for i in range(12)}
    shards = plan_shards([unit(n, t) for n, t in reversed(state.items())], max_bytes=250)
    assert [[u.tensors[0].name for u in s.units] for s in shards] == [[f"layers.{i}.w", f"layers.{i + 1}.w"] for i in range(0, 12, 2)]
    assert all(s.num_bytes <= 250 for s in shards) and shards[0].file == "model-00001-of-00006.safetensors"
    write_shards(tmp_path, shards, jobs=3, label="test")
    write_index(tmp_path, shards)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 1200
    reader = CheckpointReader(tmp_path)
    assert all(torch.equal(reader.get(n), t) for n, t in state.items()) and len(reader.files) == 6


def test_a_name_written_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="w would be written twice"):
        plan_shards([unit("w", torch.ones(1)), unit("w", torch.ones(1))])


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_first_error_stops_the_others(jobs: int) -> None:
    begun = []

    def task(i: int) -> int:
        begun.append(i)
        if i == 1:
            raise ValueError("broken")
        time.sleep(0.02)
        return i

    with pytest.raises(ValueError, match="broken"):
        in_parallel([lambda i=i: task(i) for i in range(60)], jobs=jobs)  # type: ignore[misc]
    assert len(begun) < 60
    assert in_parallel([lambda i=i: i for i in range(9)], jobs=jobs) == list(range(9))  # type: ignore[misc]


def test_threads_and_shards_change_no_tensor(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_run(run, tmp_path / "one")
    monkeypatch.setattr(stream, "MAX_SHARD_BYTES", 20_000)
    export_run(run, tmp_path / "many", options=ExportOptions(jobs=4))
    a, b = CheckpointReader(tmp_path / "one"), CheckpointReader(tmp_path / "many")
    assert len(b.files) > 5 and set(a.names) == set(b.names) and all(torch.equal(a.get(n), b.get(n)) for n in a.names)


def test_progress_says_how_far_it_is() -> None:
    progress = Progress("export: writing", total_bytes=4_000_000_000)
    progress.done = 1_000_000_000
    assert progress.text(2.0) == "export: writing: 1.00 of 4.00 GB (25%), 0.50 GB/s, 6 s left"


# --- memory ---


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor_and_not_by_the_model(tmp_path: Path) -> None:
    """A sharded checkpoint of some 400 MB of masters exported in a process of its own: it grows by far less than that."""
    parent = save_tiny_moe(tmp_path / "parent", hidden_size=512, moe_intermediate_size=512, num_experts=32, num_hidden_layers=4)
    masters = finished_run(tmp_path / "run", parent)
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    path.unlink()
    save_shards({"state_dict": {f"student.{n}": w for n, w in masters.items()}}, storage_writer=FileSystemWriter(path), no_dist=True)
    total = sum(w.numel() * 4 for w in masters.values())
    program = (
        "import resource, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from kilotok.quant.checkpoint import export, export_run\n"
        "export.measure_kl = lambda *a, **k: export.KLReport(kl=None, tokens=0, reason='left out')\n"   # it needs the model twice, and says so
        "from kilotok.quant.archs import load_config, build_model; build_model(load_config(Path(sys.argv[3])), device='meta')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export_run(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run"), str(tmp_path / "out"), str(parent)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.splitlines()[-1]) * (1 if sys.platform == "darwin" else 1024)
    largest = 4 * 2 * 512 * 512 * 32   # gate and up of a layer, fp32: it is read an expert at a time
    assert total > 390e6 and grown < largest + 30e6, f"{grown / 1e6:.0f} MB"


# --- kills and ranks ---


def kill_during(command: list[str], *, when: Any) -> None:
    """Start a process and kill it at the first moment `when()` is true."""
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not when() and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, "the export was over before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_killed_export_goes_on_where_it_was(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys, time; from kilotok.quant.checkpoint import stream; stream.MAX_SHARD_BYTES = 20_000; real = stream._write_shard\n"
        "def slow(*a, **k):\n    real(*a, **k)\n    time.sleep(0.5)\n"
        "stream._write_shard = slow\n"
        "from kilotok.runtime.cli import main; sys.exit(main(sys.argv[1:]))")
    args = ["export", str(run), str(tmp_path / "out"), "--jobs", "1"]
    kill_during([program, *args], when=lambda: len(list(tmp_path.glob(".out.unfinished-*/model-*.safetensors"))) >= 3)
    (partial,) = tmp_path.glob(".out.unfinished-*")
    finished = {p: p.stat().st_mtime_ns for p in partial.glob("model-*.safetensors")}
    assert finished and not (tmp_path / "out").exists()
    monkeypatch.setattr(stream, "MAX_SHARD_BYTES", 20_000)
    written = []
    real = stream._write_shard
    monkeypatch.setattr(stream, "_write_shard", lambda d, shard, **k: written.append(shard.file) or real(d, shard, **k))
    assert kilotok(args) == 0
    out = capsys.readouterr().out
    assert f"{len(finished)} of " in out and "are there already, from a run that was stopped" in out
    assert written and not {p.name for p in finished} & set(written)
    assert {p.name: (tmp_path / "out" / p.name).stat().st_mtime_ns for p in finished} == {p.name: t for p, t in finished.items()}
    assert not list(tmp_path.glob(".out*")) and not list((tmp_path / "out").glob(".*"))
    export_run(run, tmp_path / "whole")
    assert all((tmp_path / "out" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "whole").glob("*.safetensors"))


def test_shards_of_other_inputs_are_not_taken_over(run: Path, tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_SHARD_BYTES", 20_000)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_write_shard", interrupted_after(2))
        with pytest.raises(KeyboardInterrupt):
            export_run(run, tmp_path / "out")
    assert len(list(tmp_path.glob(".out.unfinished-*/model-*.safetensors"))) == 2
    trained = finished_run(tmp_path / "other", tiny_moe, move=0.05, seed=9)
    export_run(tmp_path / "other", tmp_path / "out")
    state = load_exported_model(tmp_path / "out", dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(state[name], MXFP4().fake_quant(trained[name], name=name, scale_mode="even", dim=-1, dtype=torch.float32, faults=None))
    assert not list(tmp_path.glob(".out*"))


def interrupted_after(count: int) -> Any:
    real, done = stream._write_shard, []

    def write(*args: Any, **how: Any) -> None:
        if len(done) == count:
            raise KeyboardInterrupt
        real(*args, **how)
        done.append(1)

    return write


def test_two_exports_into_one_directory_do_not_meet(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stream._write_shard

    def nested(*args: Any, **how: Any) -> None:
        with pytest.raises(RuntimeError, match="another process is writing"):
            export_run(run, tmp_path / "out")
        real(*args, **how)

    monkeypatch.setattr(stream, "_write_shard", nested)
    export_run(run, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def sharded_checkpoint(run: Path, masters: dict[str, torch.Tensor], *, ranks: int) -> Path:
    """The run's checkpoint in pieces of consecutive experts, a file a rank, as FSDP2 leaves it; without a process group."""
    import io
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    (path,) = (run / "checkpoints").iterdir()
    path.unlink()
    path.mkdir()
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for rank in range(ranks):
        data = io.BytesIO()
        for name, w in masters.items():
            rows = -(-len(w) // ranks)
            piece = w[rank * rows: (rank + 1) * rows].clone()
            offsets = torch.Size((rank * rows, *(0,) * (w.dim() - 1)))
            key, start = f"state_dict.student.{name}", data.tell()
            saved = io.BytesIO()
            torch.save(piece, saved)
            data.write(saved.getvalue())
            entry = described.setdefault(key, TensorStorageMetadata(properties=TensorProperties(dtype=w.dtype), size=w.shape, chunks=[]))
            entry.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=piece.shape))
            storage[MetadataIndex(key, offsets)] = _StorageInfo(f"__{rank}_0.distcp", start, data.tell() - start)
        (path / f"__{rank}_0.distcp").write_bytes(data.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata=described, storage_data=storage)))
    return path


@pytest.mark.parametrize(("name", "ranks"), [("qwen3_moe", 2), ("mixtral", 3), ("llama4_text", 2)])
def test_masters_are_read_in_rows_from_the_files_that_hold_them(name: str, ranks: int, tmp_path: Path) -> None:
    parent = save_family(tmp_path / "parent", name)
    trained = finished_run(tmp_path / "run", parent, move=0.02)
    path = sharded_checkpoint(tmp_path / "run", trained, ranks=ranks)
    masters = Masters.of_shards(path, prefix="student.")
    assert sorted(masters) == sorted(trained)
    for n, w in trained.items():
        assert masters.shape(n) == tuple(w.shape) and torch.equal(masters.get(n), w)
        for e in range(4):
            assert torch.equal(masters.rows(n, start=e, stop=e + 1), w[e: e + 1])
        assert [masters.owner(n, row=e, ranks=ranks) for e in range(4)] == [e // -(-4 // ranks) for e in range(4)]


def test_each_rank_writes_its_own_experts_from_its_own_file(tmp_path: Path, tiny_moe: Path) -> None:
    """Rank 1 finds no file but its own; together the ranks write what one writes, tensor for tensor."""
    trained = finished_run(tmp_path / "run", tiny_moe, move=0.02)
    export_run(tmp_path / "run", tmp_path / "one")
    path = sharded_checkpoint(tmp_path / "run", trained, ranks=2)
    hidden, sizes = path / "__0_0.distcp", {p.name: p.read_bytes() for p in path.glob("*.distcp")}
    hidden.write_bytes(b"\0" * len(sizes[hidden.name]))   # in place, for the hash over all files, and without a tensor
    first = export_run(tmp_path / "run", tmp_path / "lost", options=ExportOptions(rank=1, ranks=2))
    assert isinstance(first, RankResult) and first.shards == 1
    (partial,) = tmp_path.glob(".lost.unfinished-*")
    mine = load_file(next(partial.glob("model-*.safetensors")))
    assert {n.split(".experts.")[1][0] for n in mine} == {"2", "3"} and len(mine) == 2 * 2 * 3 * 2
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(one[n], t) for n, t in mine.items())

    hidden.write_bytes(sizes[hidden.name])
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--rank", "1", "--ranks", "2"]) == 0
    assert not (tmp_path / "out").exists()
    assert kilotok(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--rank", "0", "--ranks", "2"]) == 0
    both = CheckpointReader(tmp_path / "out")
    assert set(both.names) == set(one) and all(torch.equal(both.get(n), t) for n, t in one.items())


# --- faults of a packed directory ---


def test_convert_of_a_damaged_directory_leaves_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_run(run, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    good = load_file(path)
    codes, scale = (f"model.layers.1.mlp.experts.2.up_proj.{s}" for s in ("weight_packed", "weight_scale"))

    def without_scale(s: dict[str, torch.Tensor]) -> None:
        del s[scale]

    def zero_scales(s: dict[str, torch.Tensor]) -> None:
        s[scale].zero_()

    def nan_scale(s: dict[str, torch.Tensor]) -> None:
        s[scale][3, 1] = 255

    def one_expert_less(s: dict[str, torch.Tensor]) -> None:
        for name in [n for n in s if n.startswith(codes.removesuffix(".weight_packed"))]:
            del s[name]

    def other_shape(s: dict[str, torch.Tensor]) -> None:
        s[scale] = s[scale][:, :1].contiguous()

    for damage, said in ((without_scale, f"{codes} has no {scale} beside it"), (zero_scales, "all 64 scale bytes are 0 while its codes are not"),
                         (nan_scale, r"up_proj: scale byte 255 (NaN) at index (3, 1)"), (one_expert_less, "expert 2, part 1 is not in the files"),
                         (other_shape, "do not belong together")):
        state = {n: t.clone() for n, t in good.items()}
        damage(state)
        save_file(state, path, metadata={"format": "pt"})
        for command in (["convert", str(tmp_path / "out"), str(tmp_path / "there"), "--layout", "mimo"], ["inspect", str(tmp_path / "out")]):
            assert kilotok(command) == 2, (damage, command)
            assert said in capsys.readouterr().err
        with pytest.raises(ValueError, match=r"up_proj"):
            load_exported_model(tmp_path / "out", dtype=torch.float32)
        assert not list(tmp_path.glob("*there*")) and not list(tmp_path.glob(".*"))
    save_file(good, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    for cut, said in ((100, "its tensors end at byte"), (len(whole) - 20, "cannot be read as safetensors")):
        path.write_bytes(whole[:-cut])
        assert kilotok(["convert", str(tmp_path / "out"), str(tmp_path / "there"), "--layout", "mimo"]) == 2
        error = capsys.readouterr().err
        assert said in error and "truncated or damaged" in error and not list(tmp_path.glob("*there*"))
    path.write_bytes(whole)
    assert kilotok(["convert", str(tmp_path / "out"), str(tmp_path / "there"), "--layout", "mimo"]) == 0   # a second run completes


def test_an_index_that_names_another_file_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_SHARD_BYTES", 100_000)
    export_run(run, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    file = index["weight_map"][name]
    other = next(f for f in index["weight_map"].values() if f != file)
    for change, said in (({name: other}, "says that .* is in"), ({"model.more.weight": file}, "disagrees with the shards about model.more.weight")):
        path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **change}}))
        with pytest.raises(ValueError, match=said):
            convert_directory(tmp_path / "out", tmp_path / "there", layout="mimo")
        assert not list(tmp_path.glob("*there*"))
    path.write_text(json.dumps(index))
    convert_directory(tmp_path / "out", tmp_path / "there", layout="mimo")   # a second run completes
    codes = [load_exported_model(tmp_path / d, dtype=torch.float32).get_parameter("model.layers.1.mlp.experts.gate_up_proj") for d in ("out", "there")]
    assert torch.equal(*codes)


def test_a_model_that_reads_back_as_another_is_not_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What KL is for: the bytes are right and the names are not; here two experts' names are exchanged on reading."""
    from kilotok.quant.checkpoint import verify

    real = verify.load_exported_model

    def exchanged(directory: Path, *, dtype: torch.dtype) -> torch.nn.Module:
        model = real(directory, dtype=dtype)
        weight = model.get_parameter("model.layers.0.mlp.experts.down_proj")
        with torch.no_grad():
            weight[[0, 1]] = weight[[1, 0]]
        return model

    monkeypatch.setattr(verify, "load_exported_model", exchanged)
    with pytest.raises(ValueError, match=r"the model read back is not the trained one: KL .* nats a token"):
        export_run(run, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_kl_is_left_out_where_two_models_do_not_fit(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kilotok.quant.checkpoint import verify

    monkeypatch.setattr(verify, "available_memory", lambda: 1e6)
    assert kilotok(["export", str(run), str(tmp_path / "out")]) == 0
    assert "KL not measured: two models in fp32 take" in capsys.readouterr().out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n\n" + "a line of text, and another one after it that goes on for a while\n" * 4)
    monkeypatch.undo()
    assert kilotok(["export", str(run), str(tmp_path / "two"), "--prompts", str(prompts)]) == 0
    assert "KL of the model read back against the trained one 0.0e+00 nats over" in capsys.readouterr().out
