"""The `kilotok` command."""

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..dflash.checkpoint import DRAFT_DIRECTORY
from ..dflash.export import KIND as DRAFT_RUN
from ..dflash.export import export_draft
from ..dflash.inspect import inspect_draft
from ..quant.checkpoint import ExportOptions, RankResult, convert_directory, export_run, inspect_directory
from ..quant.checkpoint.convert import DENSE, TARGETS
from ..quant.checkpoint.layouts import WRITABLE
from ..quant.checkpoint.run import RUN_METADATA, Run, read_meta
from .bench import BenchOptions, bench_engine
from .executors import DEVICES, DTYPES, EXECUTORS
from .loading import load_served
from .pacing import AUTO, read_draft_length
from .shapes import SHAPES
from .validate import ValidateOptions, validate

JOBS = min(4, os.cpu_count() or 1)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 validation found a failure, 2 wrong input (one line says what to do), 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["train"]:
        return _exec_train(args[1:])
    parser = argparse.ArgumentParser(
        prog="kilotok", description="MXFP4 experts, a DFlash draft head, a server: export, convert, inspect, serve, validate, bench.")
    parser.add_argument("--version", action="version", version=f"kilotok {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a run's weights as a Hugging Face directory with packed experts")
    export.add_argument("run", type=Path, help="run directory of `train qat`; one of `train dflash-distill` gives the draft of its newest checkpoint")
    export.add_argument("out", type=Path, help="directory to create")
    export.add_argument("--parent", type=Path, help="where the parent model lies now, if it moved since the run")
    export.add_argument("--layout", choices=WRITABLE, help="how experts are packed; default: the family's own, gpt-oss's or compressed-tensors")
    export.add_argument("--prompts", type=Path, help="a text a line, over which the model read back is compared with the trained one; default: built-in ones")
    export.add_argument("--rank", type=int, default=0, help="which of several processes this is (see ranks); rank 0 finishes the directory")
    export.add_argument("--ranks", type=int, default=1, help="processes on one file system that write one directory, each its own experts")
    export.add_argument("--jobs", type=int, default=JOBS, help=f"threads over shards (default {JOBS})")
    convert = commands.add_parser("convert", help="write a directory with packed experts in another layout, byte for byte, or its values")
    convert.add_argument("source", type=Path, help="a directory in compressed-tensors, gpt-oss, mimo or DeepSeek-V4's layout")
    convert.add_argument("out", type=Path, help="directory to create")
    convert.add_argument("--layout", choices=TARGETS, required=True, help=f"{DENSE}: the values, as an unquantized checkpoint that can be trained further")
    convert.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help=f"of the {DENSE} values (default bfloat16, exact)")
    convert.add_argument("--jobs", type=int, default=JOBS, help=f"threads over shards (default {JOBS})")
    inspect = commands.add_parser("inspect", help="print what a checkpoint directory holds, and the conventions of the draft head in it")
    inspect.add_argument("directory", type=Path)
    serve = commands.add_parser("serve", help="an OpenAI-compatible server for an exported directory and the draft head in it")
    serve.add_argument("out", type=Path, help="directory of `kilotok export`")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 picks a free one (default 8000)")
    serve.add_argument("--name", help="the model's name for clients; default: the directory's")
    serve.add_argument("--no-draft", action="store_true", help="decode without the draft head")
    serve.add_argument("--tree-budget", type=int, help="decode with draft trees of so many nodes, unless a request says otherwise; default: chains")
    _add_draft_length(serve, "proposals verified a round, unless a request says otherwise; auto: as many as pay, none where drafting does not pay")
    _add_executor(serve)
    serve.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on cpu, bfloat16 on cuda")
    serve.add_argument("--max-running", type=int, default=8, help="requests decoded together or in turns; the others wait (default 8)")
    serve.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's")
    check = commands.add_parser("validate", help="measure a served directory: lossless, acceptance, tokens/s, quality; writes a report")
    check.add_argument("out", type=Path, help="directory of `kilotok export` with a draft head in dflash/")
    defaults = ValidateOptions(out=Path())
    check.add_argument("--prompts", type=Path, help="held-out prompts, JSON lines; default: OUT/dflash/heldout.jsonl")
    check.add_argument("--parent", type=Path, help="bf16 parent for perplexity and KL; default: where the export was made from")
    check.add_argument("--report", type=Path, help="directory to write; default: OUT/validation")
    check.add_argument("--prompts-per-domain", type=int, default=defaults.prompts_per_domain)
    check.add_argument("--max-tokens", type=int, default=defaults.max_tokens, help=f"of each answer (default {defaults.max_tokens})")
    check.add_argument("--quality-tokens", type=int, default=defaults.quality_tokens, help=f"a domain (default {defaults.quality_tokens})")
    check.add_argument("--temperature", type=float, default=defaults.temperature, help=f"of the sampled requests (default {defaults.temperature})")
    check.add_argument("--price-per-hour", type=float, help="of the machine, for the cost of a million tokens")
    check.add_argument("--threads", type=int)
    _add_draft_length(check, "auto: full drafts, and adaptive ones beside them; a number: of the drafts that are measured")
    _add_executor(check)
    bench = commands.add_parser("bench", help="measure this machine: a decode step of the persistent kernel")
    engine = bench.add_subparsers(dest="bench", required=True).add_parser("engine", help="a decode step, phase by phase, against the bytes it must read")
    step = BenchOptions(model="")
    engine.add_argument("model", help=f"{', '.join(SHAPES)} (random weights), or a directory of `kilotok export`")
    engine.add_argument("--columns", type=int, nargs="+", default=list(step.columns), help="live token columns of a step, 1..64 (default 1 8)")
    engine.add_argument("--per-sequence", type=int, default=step.per_sequence, help="columns of a sequence, up to 8; more than one verifies a draft")
    engine.add_argument("--context", type=int, default=step.context, help="tokens of every sequence (default 512)")
    engine.add_argument("--layers", type=int, help="only so many, for a quick look")
    engine.add_argument("--seed", type=int, default=step.seed)
    engine.add_argument("--draft", action="store_true", help="rounds instead of steps: a draft head's block, the step that verifies it, its acceptance")
    engine.add_argument("--sequences", type=int, nargs="+", default=list(step.sequences), help="of rounds, 1..8 (default 1)")
    engine.add_argument("--assume-acceptance", type=float, nargs="+", default=[], metavar="LENGTH",
                        help="tokens a round, for tokens/s that are labelled as assumed; random weights accept nothing")
    commands.add_parser("train", help="the `train` command, for systems where that name is taken", add_help=False)
    options = parser.parse_args(args)
    try:
        if options.command == "export":
            _export(options)
        elif options.command == "convert":
            _convert(options)
        elif options.command == "serve":
            _serve(options)
        elif options.command == "validate":
            fields = {k: v for k, v in vars(options).items() if k != "command"}
            fields["draft_length"] = read_draft_length(options.draft_length)
            return 0 if validate(ValidateOptions(**fields))["ok"] else 1
        elif options.command == "bench":
            bench_engine(BenchOptions(model=options.model, columns=tuple(options.columns), per_sequence=options.per_sequence, context=options.context,
                                      layers=options.layers, seed=options.seed, draft=options.draft, sequences=tuple(options.sequences),
                                      assume_acceptance=tuple(options.assume_acceptance)))
        else:
            if options.directory.name == DRAFT_DIRECTORY and (options.directory.parent / "config.json").is_file():
                raise ValueError(f"{options.directory}: is the draft head of {options.directory.parent}. Inspect that directory: it says all of both.")
            print(inspect_directory(options.directory), flush=True)   # also where the draft beside it is damaged
            print(inspect_draft(options.directory / DRAFT_DIRECTORY))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:     # whoever reads has had enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError) as error:   # NotImplementedError is a RuntimeError
        if os.environ.get("KILOTOK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_draft_length(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--draft-length", default=AUTO, metavar="auto|0..7", help=f"{text} (default auto)")


def _add_executor(command: argparse.ArgumentParser) -> None:
    command.add_argument("--executor", choices=EXECUTORS, default="auto",
                         help="reference: plain torch; persistent: the resident kernel, on an sm_90 GPU; auto: persistent where it runs (default)")
    command.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where the persistent executor runs, else cpu (default)")


def _version() -> str:
    try:
        return importlib.metadata.version("kilotok")
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _export(options: argparse.Namespace) -> None:
    run_dir: Path = options.run
    if (run_dir / RUN_METADATA).is_file() and read_meta(run_dir)["kind"] == DRAFT_RUN:
        step = export_draft(run_dir, options.out)
        print(f"{options.out}: the draft of {run_dir} at step {step} of {read_meta(run_dir)['max_steps']}; {_measured(read_meta(run_dir), step=step)}")
        return
    run = Run.open(run_dir)
    if not run.is_complete:
        print(f"note: {run_dir} stopped at step {run.step} of {run.meta['max_steps']}; exporting that step", flush=True)
    prompts = tuple(line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()) if options.prompts is not None else ()
    result = export_run(run_dir, options.out, parent_dir=options.parent, options=ExportOptions(
        layout=options.layout, jobs=options.jobs, rank=options.rank, ranks=options.ranks, prompts=prompts))
    if isinstance(result, RankResult):
        print(f"{options.out}: rank {result.rank} of {options.ranks} wrote {result.shards} shard(s), {result.num_bytes / 1e6:.2f} MB; "
              "rank 0 finishes the directory")
        return
    rounded = f", {result.rounded_tensors} trained ones rounded to the parent's dtype" if result.rounded_tensors else ""
    print(f"{result.directory}: layout {result.layout}, {result.expert_tensors} tensors packed, {result.kept_tensors} kept as they were{rounded}; "
          f"re-read: all {result.expert_weights:,} packed weights equal those training computed with, all other tensors what was to be written; {result.kl}; "
          f"{result.bytes_before / 1e6:.2f} MB -> {result.bytes_after / 1e6:.2f} MB ({_counts(result.dtypes)})")
    for warning in result.warnings:
        print(f"warning: {warning}")


def _convert(options: argparse.Namespace) -> None:
    result = convert_directory(options.source, options.out, layout=options.layout, dtype=None if options.dtype is None else getattr(torch, options.dtype),
                               jobs=options.jobs)
    kept = "written in that dtype" if options.dtype not in (None, "bfloat16") else "kept as they were"
    print(f"{result.directory}: layout {result.source_layout} -> {result.layout}; re-read: all {result.weights:,} packed weights equal the source's, "
          f"{result.kept_tensors} tensors {kept}; {result.bytes_before / 1e6:.2f} MB -> {result.bytes_after / 1e6:.2f} MB ({_counts(result.dtypes)})")
    if options.layout == DENSE:
        print(f"note: {DENSE} holds the values alone: no record of the export, no draft head; `train qat` and `kilotok export` pack them again")
    for warning in result.warnings:
        print(f"warning: {warning}")


def _counts(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())


def _measured(meta: dict[str, Any], *, step: int) -> str:
    """What a distillation run knows of its draft's acceptance at a step; only that of its last one is measured on the weights that are written."""
    if step != meta["max_steps"] or "after" not in meta:
        return "its acceptance at this step was not measured"
    length = meta["after"]["all"]["acceptance_length_repeats_cut"]
    return "its acceptance was measured" + (", on no rounds" if length is None else f": {length:.3f} tokens a round on held-out prompts")


def _serve(options: argparse.Namespace) -> None:
    """Bind first, so that a port in use is said before minutes of loading."""
    try:
        from .serve import bind, serve
    except ImportError as error:
        raise RuntimeError(f"serve: needs the optional packages ({error}). Install them with: pip install 'kilotok[serve]'.") from error
    if options.threads is not None:
        if options.threads < 1:
            raise ValueError(f"threads: must be at least 1; got {options.threads}.")
        torch.set_num_threads(options.threads)
    draft_length = read_draft_length(options.draft_length)
    with bind(options.host, options.port) as sock:
        served = load_served(options.out, name=options.name, use_draft=not options.no_draft, device=options.device, dtype=options.dtype,
                             tree_budget=options.tree_budget, executor=options.executor, max_running=options.max_running, draft_length=draft_length)
        said = served.description
        print(said["draft"], flush=True)
        print(f"{served.name}: {said['executor']}, {said['device']}, {said['dtype']}; {said['column_rule']}; this executor because {said['executor_reason']}",
              flush=True)
        serve(served, sock=sock, max_running=options.max_running)


def _exec_train(args: list[str]) -> int:
    """Become the `train` command of this installation, whatever else is called `train` on the PATH."""
    os.execv(sys.executable, [sys.executable, "-m", "kilotok.train.cli", *args])


if __name__ == "__main__":
    sys.exit(main())
