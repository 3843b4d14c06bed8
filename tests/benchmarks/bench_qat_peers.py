"""kilotok's MXFP4 QAT beside the public ones, on one device under the same conditions: time of a step, and what an export gives.

Conditions, equal for every row: a Qwen3-30B-A3B-shaped model of a few layers with random weights of one seed, bf16 parameters, AdamW
(fused on a GPU) over all of them, one batch of random tokens a step, mean cross entropy of the next token, forward + backward +
optimizer. Experts in MXFP4, weights only. Each row runs in a process of its own, so a crash or a patched library stays with its row.

    time      CUDA events around a step; median, p20 and p80. The overhead is against the unquantized step on the same experts
              code: nvidia-modelopt quantizes inside F.linear and so needs transformers' eager loop over the experts, which the
              "bf16, eager" row measures without it; kilotok keeps grouped_mm. The share of peak counts only the products of the
              unquantized model, no recomputation.
    export    the trained expert weights, packed and read back by the implementation's own exporter, against the bf16 weights
              (relative squared error) and, as values, against what training computed with. The latter is observed, not asked for:
              the right-hand operands of the products that run when an experts module is called. Below the table, both against
              kilotok's numbers under the peer's scale rule.

A peer's packages are looked up in its folder, for its own process only. What cannot run becomes a row that says why.

    pip install --no-deps --target DIR nvidia-modelopt ...
    python tests/benchmarks/bench_qat_peers.py --modelopt DIR --torchao DIR --out DIR
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig

from kilotok.kernels.mx import MX_BLOCK_SIZE, ScaleMode
from kilotok.quant.archs import build_model
from kilotok.quant.experts import Backward, attach_fake_quant
from kilotok.quant.plan import make_plan
from kilotok.quant.tensor import fake_quant_weight, quantize_weight

WHERE = "bench_qat_peers"
PEAK_FLOPS = {"NVIDIA H200": 989.5e12}   # dense bf16 rate of the data sheet, by the name torch gives the device
# Read in their sources; nothing there can be timed under these conditions.
NOT_TRIED = {
    "llm-compressor 0.14.0.1": "it has no training entry point (oneshot only), and it rewrites fused experts into linear layers",
    "FP-Quant 0.3.2": "it replaces nn.Linear modules only; these experts are 3-D parameters",
}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model made ready to train."""

    export: Callable[[Tensor], Tensor] | None = None   # one expert's weight [out, in] to what its exported bytes read back as
    twin: ScaleMode = "rceil"                          # kilotok's name of the scale rule
    refused: str | None = None                         # why it cannot train
    begin_step: Callable[[], None] = lambda: None
    end_step: Callable[[], None] = lambda: None
    build_s: float | None = None                       # of a compiled extension


def prepare_kilotok(model: nn.Module, args: argparse.Namespace, *, backward: Backward) -> Prepared:
    plan = make_plan(model.config, scale_mode=args.scale_mode, where=WHERE)
    attached = attach_fake_quant(model, plan=plan, backward=backward)
    return Prepared(export=lambda w: quantize_weight(w, name="expert", scale_mode=args.scale_mode).dequantize(dtype=w.dtype), twin=args.scale_mode,
                    begin_step=attached.begin_step, end_step=attached.end_step)


def prepare_modelopt(model: nn.Module, args: argparse.Namespace) -> Prepared:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.extensions import get_cuda_ext_mx
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    def export(w: Tensor) -> Tensor:   # what to_quantized_weight of modelopt.torch.export calls, and its inverse
        packed, scales = MXFP4QTensor.quantize(w, MX_BLOCK_SIZE)
        return packed.dequantize(dtype=w.dtype, scale=scales, block_sizes={-1: MX_BLOCK_SIZE})

    began = time.perf_counter()
    try:
        get_cuda_ext_mx(raise_if_failed=True)   # else compiled inside the first forward
    except RuntimeError as error:
        traceback.print_exc()
        return Prepared(export=export, refused=_last_line(error))
    build_s = time.perf_counter() - began
    mtq.quantize(model, mtq.MXFP4_MLP_WEIGHT_ONLY_CFG)
    enabled = [name for name, module in model.named_modules() if isinstance(module, TensorQuantizer) and module.is_enabled]
    expected = 2 * model.config.num_experts * model.config.num_hidden_layers
    if len(enabled) != expected or not all(".mlp.experts." in name and "weight_quantizer" in name for name in enabled):
        raise RuntimeError(f"{WHERE}: the preset must quantize the {expected} expert matrices alone; got {len(enabled)}: {enabled[:4]}. Restrict the preset.")
    return Prepared(export=export, build_s=build_s)


def prepare_torchao(model: nn.Module, args: argparse.Namespace) -> Prepared:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    weights, refused = MXFakeQuantizeConfig(), []                     # MXFP4, runs of 32, RCEIL
    linear = nn.Sequential(nn.Linear(MX_BLOCK_SIZE, MX_BLOCK_SIZE))   # whether experts unrolled into linear layers would do
    for target, matches in ((model, lambda module, name: name.endswith(".mlp.experts")), (linear, None)):
        try:
            quantize_(target, QATConfig(weight_config=weights, step="prepare"), filter_fn=matches)
            break   # the experts are taken
        except ValueError as error:
            refused.append(_last_line(error))
    return Prepared(export=lambda w: MXTensor.to_mx(w, weights.dtype, weights.block_size, scaling_mode=weights.scaling_mode).dequantize(w.dtype),
                    refused="; of a Linear: ".join(refused) or None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation. experts: transformers' experts implementation it starts from; baseline: the row its overhead is against."""

    name: str
    title: str
    experts: str
    prepare: Callable[[nn.Module, argparse.Namespace], Prepared]
    baseline: str | None = None
    package: str | None = None


ROWS = (
    Row(name="grouped", title="bf16, grouped_mm", experts="grouped_mm", prepare=lambda model, args: Prepared()),
    Row(name="eager", title="bf16, eager", experts="eager", prepare=lambda model, args: Prepared()),
    Row(name="kilotok-keep", title="kilotok QAT, weights kept", experts="grouped_mm", prepare=partial(prepare_kilotok, backward="keep"), baseline="grouped"),
    Row(name="kilotok-recompute", title="kilotok QAT, weights recomputed", experts="grouped_mm", prepare=partial(prepare_kilotok, backward="recompute"),
        baseline="grouped"),
    Row(name="modelopt", title="nvidia-modelopt QAT", experts="eager", prepare=prepare_modelopt, baseline="eager", package="nvidia-modelopt"),
    Row(name="torchao", title="torchao QAT", experts="grouped_mm", prepare=prepare_torchao, baseline="grouped", package="torchao"),
)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def shape(args: argparse.Namespace) -> Any:
    """Qwen3-30B-A3B with fewer layers and a small vocabulary, or a tiny one for a look on a CPU."""
    sizes = dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
                 moe_intermediate_size=768, vocab_size=1024, num_hidden_layers=args.layers)
    if args.tiny:
        sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
                     moe_intermediate_size=32, vocab_size=96, num_hidden_layers=2)
    return Qwen3MoeConfig(**sizes, max_position_embeddings=args.length, norm_topk_prob=True, initializer_range=0.02, use_cache=False,
                          dtype=torch.bfloat16, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def step_flops(config: Any, *, batch: int, length: int) -> float:
    """Products of a step, forward and backward, two operations a multiply-add; causal attention counted by half."""
    heads = config.num_attention_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * config.num_key_value_heads * config.head_dim + config.num_experts)
    layer += config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
    a_token = config.num_hidden_layers * (2 * layer + 2 * heads * length) + 2 * config.hidden_size * config.vocab_size
    return 3.0 * a_token * batch * length


def time_steps(model: nn.Module, prepared: Prepared, args: argparse.Namespace) -> dict[str, Any]:
    """Train; milliseconds of the steps after the warm-up, and the peak of memory in them."""
    cuda = args.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    total = args.warmup + args.steps
    tokens = torch.randint(model.config.vocab_size, (total, args.batch, args.length), generator=torch.Generator().manual_seed(1)).to(args.device)

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
        if cuda:
            event.record()
        return event

    losses, marks = [], []
    for i, ids in enumerate(tokens):
        if i == args.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        start = mark()
        prepared.begin_step()
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        prepared.end_step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append((start, mark()))
        losses.append(loss.detach())
    if cuda:
        torch.cuda.synchronize()
    ms = torch.tensor([a.elapsed_time(b) if cuda else (b - a) * 1e3 for a, b in marks[args.warmup:]], dtype=torch.float64)
    median, p20, p80 = (float(ms.quantile(q)) for q in (0.5, 0.2, 0.8))
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if cuda else None
    return {"ms": median, "ms_p20": p20, "ms_p80": p80, "steps": len(ms), "loss_first": float(losses[0]), "loss_last": float(losses[-1]),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "of_peak": step_flops(model.config, batch=args.batch, length=args.length) / (median * 1e-3) / peak if peak else None}


class _Products(TorchDispatchMode):
    """Collects the right-hand operand of every matrix product, as [..., out, in]."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::_grouped_mm", "transformers::grouped_mm_fallback"):
            self.weights.append(args[1].detach().transpose(-2, -1))
        return func(*args, **(kwargs or {}))


def weights_in_use(experts: nn.Module) -> dict[str, Tensor]:
    """What the two products of an experts module compute with, [E, out, in] each, seen by sending one token to every expert."""
    masters = {leaf: experts._parameters[leaf] for leaf in ("gate_up_proj", "down_proj")}
    count, _, dim = masters["gate_up_proj"].shape   # type: ignore[union-attr]
    device = masters["gate_up_proj"].device         # type: ignore[union-attr]
    with _Products() as seen:
        experts(torch.randn(count, dim, device=device, dtype=torch.bfloat16), torch.arange(count, device=device)[:, None],
                torch.ones(count, 1, device=device, dtype=torch.bfloat16))
    found = seen.weights                 # two grouped products, or two for each expert in turn
    if len(found) == 2 * count:
        found = [torch.stack(found[0::2]), torch.stack(found[1::2])]
    if [w.shape for w in found] != [m.shape for m in masters.values() if m is not None]:
        raise RuntimeError(f"{WHERE}: an experts module must run 2 products, or 2 for each of {count} experts, with operands shaped like its parameters; "
                           f"got {len(found)}, the first {[tuple(w.shape) for w in found[:2]]}. Teach weights_in_use.")
    return dict(zip(masters, found, strict=True))


def measure_export(model: nn.Module, prepared: Prepared) -> dict[str, Any]:
    """Exported weights against the bf16 ones, those in use and, under the same scale rule, kilotok's. Shares of elements and of MX blocks."""
    error, norm, elements = 0.0, 0.0, 0
    shares: dict[str, Tensor] = {}

    def compare(what: str, a: Tensor, b: Tensor) -> None:
        differs = a != b
        counts = torch.tensor([int(differs.sum()), int(differs.unflatten(-1, (-1, MX_BLOCK_SIZE)).any(-1).sum()) * MX_BLOCK_SIZE], dtype=torch.float64)
        shares[what] = shares.get(what, 0) + counts

    for layer in model.model.layers:   # type: ignore[union-attr]
        used = {} if prepared.refused else weights_in_use(layer.mlp.experts)   # type: ignore[union-attr, arg-type]
        for leaf in ("gate_up_proj", "down_proj"):
            for i, master in enumerate(layer.mlp.experts._parameters[leaf].detach()):   # type: ignore[union-attr]
                exported, kilotok = prepared.export(master), fake_quant_weight(master, name=leaf, scale_mode=prepared.twin)
                error += float((exported.float() - master.float()).square().sum(dtype=torch.float64))
                norm, elements = norm + float(master.float().square().sum(dtype=torch.float64)), elements + master.numel()
                compare("export_not_kilotok", exported, kilotok)
                if used:
                    compare("export_not_training", exported, used[leaf][i])
                    compare("training_not_kilotok", used[leaf][i], kilotok)
    return {"relative_mse": error / norm, "scale_rule": prepared.twin, "expert_weights": elements, **{k: (v / elements).tolist() for k, v in shares.items()}}


def run_row(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Everything of one row. What goes wrong is part of the result."""
    result: dict[str, Any] = {"row": row.name, "title": row.title, "error": None}
    torch.manual_seed(0)
    try:
        model = build_model(shape(args), device=args.device).train()
        model.set_experts_implementation(row.experts)   # type: ignore[operator]
        prepared = row.prepare(model, args)
        result |= {"error": prepared.refused, "build_s": prepared.build_s, "experts_implementation": model.config._experts_implementation}
        if not prepared.refused:
            result |= time_steps(model, prepared, args)
        if prepared.export:
            result |= measure_export(model, prepared)
    except Exception as error:   # the boundary: every failure of a row is a row
        traceback.print_exc()
        remedy = f". pip install {row.package}, or give --{row.name} DIR" if row.package and isinstance(error, ImportError) else ""
        result["error"] = "; then ".join(filter(None, [result["error"], f"{type(error).__name__}: {_last_line(error)}{remedy}"]))
    packages = ("torch", "triton", "transformers", row.package or "torch")
    found = {name: importlib.metadata.version(name) for name in packages if any(importlib.metadata.distributions(name=name))}
    return result | {"versions": {"python": platform.python_version(), "cuda": str(torch.version.cuda), **found}}


def run_in_process(row: Row, args: argparse.Namespace, *, limit_s: float) -> dict[str, Any]:
    """`run_row` in a new process that sees its own peer's packages; killed with its compilers after `limit_s`."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])   # ninja, for extensions built at first use
    site = {"modelopt": args.modelopt, "torchao": args.torchao}.get(row.name)
    if site:
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(site.absolute()), env.get("PYTHONPATH", "")) if p)
    path = args.out.absolute() / f"{row.name}.result"
    path.unlink(missing_ok=True)
    with (args.out / "peers.log").open("a") as log:
        print(f"\n===== {row.name}", file=log, flush=True)
        child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--row", row.name, "--result", str(path)],
                                 env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            problem = f"the process ended with code {child.wait(timeout=limit_s)} and no result"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            problem = f"it did not end within {limit_s:.0f} s"
    if not path.is_file():
        return {"row": row.name, "title": row.title, "error": problem}
    result: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; then what the columns have no room for."""
    by_name, baselines = {r["row"]: r for r in results}, {row.name: row.baseline for row in ROWS}
    lines = ["| implementation | step ms (p20, p80) | overhead | of bf16 peak | peak GiB | relative MSE of export "
             "| export differs from training: elements | MX blocks |", "|---|---|---|---|---|---|---|---|"]
    notes = []
    for r in results:
        base, problem = by_name.get(baselines.get(r["row"]) or "", {}), (r["error"] or "").replace("|", "/")
        ms, overhead = f"did not run, because {problem}", "-"
        if "ms" in r:
            ms = f"{r['ms']:.1f} ({r['ms_p20']:.1f}, {r['ms_p80']:.1f})" + (f"; then {problem}" if problem else "")
            overhead = f"{r['ms'] / base['ms'] - 1:+.1%} of {base['title']}" if "ms" in base else "-"
        differs = r.get("export_not_training", (None, None))
        values = (r.get("of_peak"), r.get("peak_gib"), r.get("relative_mse"), *differs)
        cells = ["-" if v is None else format(v, form) for v, form in zip(values, (".1%", ".2f", ".5f", ".4%", ".2%"), strict=True)]
        lines.append(f"| {r['title']} | {ms} | {overhead} | {' | '.join(cells)} |")
        for what, key in (("training", "training_not_kilotok"), ("exported", "export_not_kilotok")):
            if key in r:
                notes.append(f"- {r['title']}, {what} weights: {r[key][0]:.4%} ({r[key][1]:.2%} of MX blocks) differ from kilotok's {r['scale_rule']}.")
    lines += [f"| {title} | did not run, because {reason} | - | - | - | - | - | - |" for title, reason in NOT_TRIED.items()]
    return "\n".join([*lines, "", *notes])


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def conditions(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    config = shape(args)
    sizes = ("num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size")
    return {"device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
            "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "commit": args.commit or _output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
            "versions": {k: v for r in results for k, v in r.get("versions", {}).items()}, **{s: getattr(config, s) for s in sizes},
            "batch": args.batch, "length": args.length, "warmup": args.warmup, "steps": args.steps,
            "step_tflop": step_flops(config, batch=args.batch, length=args.length) / 1e12, "command": [Path(__file__).name, *sys.argv[1:]]}


def parse(argv: list[str]) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a look on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, help="sequences a step; default 4, with --tiny 2")
    parser.add_argument("--length", type=int, help="tokens a sequence; default 2048, with --tiny 64")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--scale-mode", choices=get_args(ScaleMode), default="even", help="kilotok's scale rule")
    parser.add_argument("--only", action="append", choices=names, help="rows to run, repeatable; default all")
    parser.add_argument("--modelopt", type=Path, help="folder that holds nvidia-modelopt and what it needs")
    parser.add_argument("--torchao", type=Path, help="folder that holds torchao")
    parser.add_argument("--limit-s", type=float, default=540, help="for everything; rows that do not fit say so")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path, default=Path("build/bench_qat_peers"), help="folder for table.md, results.jsonl and peers.log")
    parser.add_argument("--row", choices=names, help=argparse.SUPPRESS)   # one row, in this process, to the file --result
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch sees; got none. For a look without one: --tiny --device cpu.")
    args.batch, args.length = args.batch or (2 if args.tiny else 4), args.length or (64 if args.tiny else 2048)
    return args


def main() -> None:
    args, began = parse(sys.argv[1:]), time.monotonic()
    if args.row:
        args.result.write_text(json.dumps(run_row(next(row for row in ROWS if row.name == args.row), args)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.log").write_text("")
    results: list[dict[str, Any]] = []
    for row in ROWS:
        if args.only and row.name not in args.only:
            continue
        start = time.monotonic()
        result = run_in_process(row, args, limit_s=max(args.limit_s - (start - began), 1))
        results.append({**result, "process_s": round(time.monotonic() - start, 1)})
        print(json.dumps(results[-1]), flush=True)
        # after every row: what comes later may take the machine down
        (args.out / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in results))
        text = f"{json.dumps(conditions(args, results))}\n\n{table(results)}\n"
        (args.out / "table.md").write_text(text)
    print(f"\n{text}", flush=True)
    sys.exit(0 if any("ms" in r for r in results) else f"{WHERE}: no row was timed; see {args.out / 'peers.log'}.")


if __name__ == "__main__":
    main()
