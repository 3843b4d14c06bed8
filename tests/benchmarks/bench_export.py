"""Export of a checkpoint with the shapes of MiMo-V2.5-Pro: throughput, peak memory, and the count of what the whole model would hold.

    python tests/benchmarks/bench_export.py --folder DIR [--layers 1] [--experts 384] [--jobs 1] [--layout mimo]

The config is the whole model's; the counts and bytes of the export are worked out for it, tensor by tensor. `--layers` of its 69 layers of
experts are exported for real, from a sharded bf16 checkpoint of masters whose pieces all point at the same bytes of one file, as the
format allows: reading, packing, writing, re-reading and comparing are those of a real run, and the disk need not hold 29 GB a layer. The
parent's expert tensors are a hole in a sparse file, since the export takes them from the run; so its hash is left out of the time.
"""

import argparse
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import AutoConfig

from kilotok.quant.archs import build_model, find_arch
from kilotok.quant.checkpoint import ExportOptions, export, export_run
from kilotok.quant.checkpoint.layouts import find_layout
from kilotok.quant.checkpoint.stream import TensorSpec, Unit, plan_shards, write_shards
from kilotok.quant.plan import make_plan

LAYERS = 70
NO_HASH = "0" * 64
# V2.5-Pro: the first layer dense, 384 experts of 2048 hidden channels, 8 active; attention as the Flash model's, which transformers builds.
PRO = {"hidden_size": 6144, "intermediate_size": 16384, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts": 384,
       "num_experts_per_tok": 8, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128, "vocab_size": 152576}


def config_of(layers: int, *, experts: int = 384) -> Any:
    """The config of the first `layers` layers, the dense one among them, with so many experts in each."""
    return AutoConfig.for_model("mimo_v2_flash", **{**PRO, "n_routed_experts": experts, "num_experts": experts}, num_hidden_layers=layers)


def count_whole_model(layout_name: str) -> str:
    """Expert tensors and bytes of the export of all layers, from the config alone."""
    config, layout = config_of(LAYERS), find_layout(layout_name)
    plan = make_plan(config, scale_mode="even", where="MiMo-V2.5-Pro")
    counts: Counter[str] = Counter()
    size = 0
    for weight in plan.experts:
        num, rows, columns = weight.canonical_shape
        for parts in plan.arch.disk_names(weight.name, num_experts=num):
            for part in parts:
                stem = part.removesuffix(".weight")
                names = layout.names(stem, "mxfp4")
                specs = layout.specs("mxfp4", (rows // len(parts), columns), scales=torch.bfloat16)
                for kind, name, (dtype, shape) in zip(("weights", "scales"), names, specs, strict=True):
                    counts[kind] += 1
                    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
                    assert dtype == "U8" and name
                    size += spec.num_bytes
    return f"whole model: {counts['weights']:,} expert weights and {counts['scales']:,} scales, U8, {size / 1e9:.1f} GB of {plan.bytes_after / 1e9:.1f} GB"


def write_parent(directory: Path, config: Any) -> None:
    """Random tensors beside the experts, and holes where the run has masters."""
    config.save_pretrained(directory)
    model, arch = build_model(config, device="meta"), find_arch(config.model_type, where="bench")
    units, holes = [], []
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        leaf = name.rpartition(".")[2]
        if leaf in arch.fused and parameter.dim() == 3:
            num, rows, columns = parameter.shape
            for parts in arch.disk_names(name, num_experts=num):
                holes += [(part, (rows // len(parts), columns)) for part in parts]
        elif "inv_freq" not in name:
            units.append(Unit(tensors=(TensorSpec(name=name, dtype="BF16", shape=tuple(parameter.shape)),), check=lambda written: 0,
                              make=lambda s=tuple(parameter.shape): [noise(s, seed=0)]))   # type: ignore[misc]
    write_shards(directory, plan_shards(units), jobs=1, label="parent")
    (directory / "model.safetensors").rename(directory / "plain.safetensors")
    described, end = {}, 0
    for name, shape in holes:
        size = 2 * shape[0] * shape[1]
        described[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "experts.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end)
    names = {u.tensors[0].name: "plain.safetensors" for u in units} | {name: "experts.safetensors" for name, _ in holes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def write_run(directory: Path, parent: Path, config: Any, *, ranks: int) -> None:
    """A sharded checkpoint of bf16 masters. Pieces of one shape share one archive."""
    path = directory / "checkpoints" / "step-00000001.ckpt"
    path.mkdir(parents=True)
    plan = make_plan(config, scale_mode="even", where="bench")
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    archives: dict[tuple[int, ...], Any] = {}
    for weight in plan.experts:
        num, *shape = weight.shape
        rows = -(-num // ranks)
        key = f"state_dict.student.{weight.name}"
        described[key] = TensorStorageMetadata(properties=TensorProperties(dtype=torch.bfloat16), size=torch.Size(weight.shape), chunks=[])
        for start in range(0, num, rows):
            piece = (min(rows, num - start), *shape)
            if piece not in archives:
                saved = io.BytesIO()
                torch.save(noise(piece, seed=1), saved)
                file = f"__{len(archives)}_0.distcp"
                (path / file).write_bytes(saved.getbuffer())
                archives[piece] = _StorageInfo(file, 0, len(saved.getbuffer()))
            offsets = torch.Size((start, *(0,) * len(shape)))
            described[key].chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece)))
            storage[MetadataIndex(key, offsets)] = archives[piece]
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata=described, storage_data=storage)))
    meta = {"kind": "qat", "status": "complete", "max_steps": 1, "parent": {"path": str(parent), "sha256": NO_HASH},
            "quant": {"format": "mxfp4", "scale_mode": "even", "source_dtype": "bfloat16", "trainable": "experts"}, "versions": {}}
    (directory / "meta.json").write_text(json.dumps(meta))


def prepare(folder: Path, config: Any, ranks: int) -> None:
    write_parent(folder / "parent", config)
    write_run(folder / "run", folder / "parent", config, ranks=ranks)


def noise(shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """bf16 weights of the usual size; a million random numbers again and again."""
    size = torch.Size(shape).numel()
    some = torch.randn(min(size, 2**20 + 7), generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
    return some.repeat(-(-size // len(some)))[:size].clone().view(shape)


def write_rate(folder: Path) -> float:
    """GB/s at which this disk takes 2 GB that are then forced to it."""
    data = memoryview(torch.randint(0, 256, (2**28,), dtype=torch.uint8).numpy())
    began = time.perf_counter()
    with (folder / "probe").open("wb") as f:
        for _ in range(8):
            f.write(data)
        f.flush()
        os.fsync(f.fileno())
    seconds = time.perf_counter() - began
    (folder / "probe").unlink()
    return 8 * len(data) / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty place; 8 GB a layer and 6 GB are needed, and removed at the end")
    parser.add_argument("--layers", type=int, default=1, help="layers of experts that are exported for real")
    parser.add_argument("--experts", type=int, default=384, help="of each such layer; every tensor has the same shape with fewer, there are just not so many")
    parser.add_argument("--ranks", type=int, default=8, help="pieces of the checkpoint")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--layout", default="mimo")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(count_whole_model(args.layout), flush=True)
    folder: Path = args.folder / "bench-export"
    folder.mkdir(parents=True)
    try:
        config = config_of(1 + args.layers, experts=args.experts)
        process = multiprocessing.get_context("spawn").Process(target=prepare, args=(folder, config, args.ranks))   # its memory is not the export's
        process.start()
        process.join()
        assert process.exitcode == 0, "the inputs could not be written"
        read = 2 * sum(torch.Size(w.shape).numel() for w in make_plan(config, scale_mode="even", where="bench").experts)
        disk = write_rate(folder)
        export.sha256_of_weights = lambda directory, **how: NO_HASH   # type: ignore[assignment]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, began = time.process_time(), time.perf_counter()
        result = export_run(folder / "run", folder / "out", options=ExportOptions(layout=args.layout, jobs=args.jobs))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        written = sum(p.stat().st_size for p in (folder / "out").glob("*.safetensors"))
        print(f"{result}")
        print(f"{args.layers} layer(s) of {args.experts} experts: {read / 1e9:.2f} GB of bf16 masters read, {written / 1e9:.2f} GB written, read again "
              f"and compared in {seconds:.0f} s ({args.jobs} thread(s)), {read / seconds / 1e9:.3f} GB/s of masters; {cpu_seconds:.0f} s of CPU, "
              f"{read / cpu_seconds / 1e9:.3f} GB/s of masters a core; peak memory {peak / 2**30:.2f} GiB "
              f"(before the export {before / 2**20:.2f}); this disk takes {disk:.2f} GB/s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
