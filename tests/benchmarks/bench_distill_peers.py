"""One step of training a DFlash draft: SpecForge's and speculators' own step beside kilotok's, on one device and one shape.

Conditions, equal for every row: the draft of Qwen3-8B (5 layers, 5 taps, block 8) with random weights, one document whose tokens from
64 on are supervised, 512 anchors, random target features given (no target runs), frozen random embedding and head.

    specforge       `TrainerCore.train_step` over `DFlashTrainStrategy` and an unwrapped `FSDPTrainingBackend`, as its recipe for Qwen3-8B
                    sets them: bf16 weights, fp32 masters in `BF16Optimizer`, full attention by transformers' compiled FlexAttention.
    speculators     `Trainer.train_epoch` over a list of batches, with what `speculators train` resolves for DFlash: fp32 weights under
                    bf16 autocast, the whole forward compiled, FlexAttention, CE weighted by D-PACE in its fused Triton loss, Muon.
    -fast, -full    the options they publish that make it faster; the attention that the others have (`distill_steps.py`).
    kilotok         `draft_blocks` and `slot_sums`, as a training step calls them.

The peers' modules run unmodified. Time is between CUDA events: before a step, at the entry of its optimizer (clipping belongs to it:
SpecForge's optimizer clips), after its schedule. A peer's packages are looked up in --site, for its own process only; packages that it
imports but a step does not use are replaced by empty ones if missing (UNUSED), and named below the table. What cannot run is a row that
says why.

    pip install --no-deps --target DIR specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 liger-kernel pydantic ...
    python tests/benchmarks/bench_distill_peers.py --site DIR
    python tests/benchmarks/bench_distill_peers.py --site DIR --tiny     on a CPU, without FlexAttention and Triton: shows only that it runs
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from distill_steps import ROWS, TINY, WARMUP, WHERE, Clock, Job, Shape, peak_gib
from machine import environment

UNUSED = ("datasets", "openai")   # read by the peers' data loading and capture clients only


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for the UNUSED packages that are not installed; their classes can be named and nothing else."""

    def __init__(self) -> None:
        self.missing = {name for name in UNUSED if importlib.util.find_spec(name) is None}
        self.replaced: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self.missing:
            return None
        self.replaced.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = partial(self._member, spec.name)  # type: ignore[method-assign, assignment]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module is empty."""

    @staticmethod
    def _member(package: str, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"{package} is not installed")
        return type(name, (Exception,), {})


def run_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything of one row. What goes wrong is part of the result."""
    import transformers.modeling_utils  # noqa: F401  before any package is replaced: it asks which ones exist

    absent = Absent()
    sys.meta_path.insert(0, absent)
    title, run = ROWS[name]
    result: dict[str, Any] = {"row": name, "title": title, "error": None}
    shape, device = (TINY, "cpu") if args.tiny else (Shape(), "cuda")
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(shape=shape, device=device, steps=args.steps, clock=Clock(cuda=device == "cuda"), scratch=Path(scratch))
            ran = run(job)
        step, optimizer = job.clock.times()
        losses, plain = [float(x) for x in job.clock.losses], ran.weight * math.log(shape.vocab_size)
        if not all(map(math.isfinite, losses)) or not 0.9 * plain < losses[0] < 1.25 * plain:
            raise RuntimeError(f"{WHERE}: the first loss must be about {plain:.3f}, that of ln V a slot, and all must be finite; "
                               f"got {losses[0]:.3f} and then {losses[1:4]}. The step is wrong.")
        more = dict(ran.more)
        result |= asdict(ran) | {"step_ms": step, "optimizer_ms": optimizer, "peak_gib": more.pop("peak_gib", [peak_gib(job)])[0], "more": more,
                                 "loss": losses[0], "plain_loss": plain, "gradients": job.clock.gradients}
    except Exception as error:   # the boundary: every failure of a row is a row
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        result["error"] = f"{type(error).__name__}: {lines[-1] if lines else ''}"
    packages = ("torch", "triton", "transformers", "specforge", "speculators", "liger-kernel")
    found = {p: importlib.metadata.version(p) for p in packages if any(importlib.metadata.distributions(name=p))}
    return result | {"versions": found, "replaced": sorted(absent.replaced)}


def run_in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`run_row` in a process of its own, killed with its compilers after --timeout seconds."""
    env = dict(os.environ)
    if args.site and name != "kilotok":
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(args.site.absolute()), env.get("PYTHONPATH", "")) if p)
    title, began = ROWS[name][0], time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, (args.log or Path(scratch) / "log").open("a+") as log:
        path = Path(scratch) / "result"
        print(f"\n===== {name}", file=log, flush=True)
        child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--row", name, "--result", str(path)], env=env, stdout=log,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        try:
            problem = f"the process ended with code {child.wait(timeout=args.timeout)} and no result"
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            problem = f"it did not end within {args.timeout:.0f} s"
        result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"row": name, "title": title, "error": problem}
        if result["error"]:
            log.seek(0)
            print(f"{name}, the end of its output:", *log.read().splitlines()[-15:], sep="\n    ", file=sys.stderr)
    return result | {"seconds": time.perf_counter() - began}


def milliseconds(values: list[float]) -> str:
    ms = torch.tensor(values, dtype=torch.float64)
    median, p20, p80 = (float(ms.quantile(q)) for q in (0.5, 0.2, 0.8))
    return f"{median:.1f} ({p20:.1f}, {p80:.1f})"


def table(results: list[dict[str, Any]], *, tokens: int) -> str:
    """Markdown; then what the columns have no room for."""
    lines = ["| implementation | forward + backward ms (p20, p80) | optimizer ms (p20, p80) | step tokens/s | peak GiB | options | optimizer |",
             "|---|---|---|---|---|---|---|"]
    notes = []
    for r in results:
        if r["error"]:
            lines.append(f"| {r['title']} | did not run, because {r['error'].replace('|', '/')} | - | - | - | - | - |")
            continue
        total = float(torch.tensor(r["step_ms"], dtype=torch.float64).add(torch.tensor(r["optimizer_ms"], dtype=torch.float64)).quantile(0.5))
        more = "".join(f"; {name} {milliseconds(ms)}" for name, ms in r["more"].items())
        lines.append(f"| {r['title']} | {milliseconds(r['step_ms'])} | {milliseconds(r['optimizer_ms'])}{more} | {tokens / total * 1e3:.0f} "
                     f"| {r['peak_gib']:.1f} | {r['options']} | {r['optimizer']} |")
        replaced = f"; replaced by empty packages: {', '.join(r['replaced'])}" if r["replaced"] else ""
        notes.append(f"- {r['title']}: first loss {r['loss']:.3f} (ln V in every slot: {r['plain_loss']:.3f}); gradients in {r['gradients']} tensors; "
                     f"{r['seconds']:.0f} s with start and compilation{replaced}.")
    versions = {k: v for r in results for k, v in r.get("versions", {}).items()}
    known = [f"- {', '.join(f'{k} {v}' for k, v in versions.items())}."] if versions else []
    return "\n".join([*lines, "", *notes, *known])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, help="folder that holds the peers' packages; none: those installed")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after 3 of warm-up")
    parser.add_argument("--timeout", type=float, default=150, help="seconds of a row")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to see whether the rows run")
    parser.add_argument("--log", type=Path, help="file for the rows' own output; none: only the end of a failed row's is shown")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: must be at least 1; got {args.steps}.")
    if args.site and not args.site.is_dir():
        parser.error(f"--site: must be a folder; got {args.site}.")
    return args


def main() -> None:
    args = parse()
    if args.row:
        args.result.write_text(json.dumps(run_row(args.row, args)))
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit(f"{WHERE}: needs a CUDA device; torch sees none. Give --tiny to run a small shape on the CPU.")
    shape = TINY if args.tiny else Shape()
    print(f"CPU, torch {torch.__version__}" if args.tiny else environment())
    print(f"{shape}; {WARMUP} steps of warm-up, {args.steps} timed\n", flush=True)
    results = []
    for name in args.rows:
        results.append(run_in_process(name, args))
        print(f"({name}: {results[-1]['error'] or 'done'}, {results[-1]['seconds']:.0f} s)", flush=True)
    print("\n" + table(results, tokens=shape.length))
    if any(r["error"] for r in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
