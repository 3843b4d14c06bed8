"""The `kilotok` command."""

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from ..quant.checkpoint import export_run, inspect_directory
from ..quant.checkpoint.run import Run


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong input (one line says what to do)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["train"]:
        return _exec_train(args[1:])
    parser = argparse.ArgumentParser(prog="kilotok", description="Experts in MXFP4: export and look at checkpoints.")
    parser.add_argument("--version", action="version", version=f"kilotok {importlib.metadata.version('kilotok')}")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a run's weights as a Hugging Face directory with packed experts")
    export.add_argument("run", type=Path, help="run directory of `train qat`")
    export.add_argument("out", type=Path, help="directory to create")
    export.add_argument("--parent", type=Path, help="where the parent model lies now, if it moved since the run")
    inspect = commands.add_parser("inspect", help="print what a checkpoint directory holds")
    inspect.add_argument("directory", type=Path)
    commands.add_parser("train", help="the `train` command, for systems where that name is taken", add_help=False)
    options = parser.parse_args(args)
    try:
        if options.command == "export":
            _export(options.run, options.out, parent=options.parent)
        else:
            print(inspect_directory(options.directory))
    except (ValueError, OSError) as error:
        if os.environ.get("KILOTOK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _export(run_dir: Path, out: Path, *, parent: Path | None) -> None:
    run = Run.open(run_dir)
    if not run.is_complete:
        print(f"note: {run_dir} stopped at step {run.step} of {run.meta['max_steps']}; exporting that step", flush=True)
    result = export_run(run_dir, out, parent_dir=parent)
    rounded = f", {result.rounded_tensors} trained ones rounded to the parent's dtype" if result.rounded_tensors else ""
    print(f"{result.directory}: {result.expert_tensors} expert tensors packed, {result.kept_tensors} kept as they were{rounded}; "
          f"re-read: all {result.expert_weights:,} expert weights equal those training computed with, all other tensors what was to be written; "
          f"{result.bytes_before / 1e6:.2f} MB -> {result.bytes_after / 1e6:.2f} MB")


def _exec_train(args: list[str]) -> int:
    """Become the `train` command of this installation, whatever else is called `train` on the PATH."""
    os.execv(sys.executable, [sys.executable, "-m", "kilotok.train.cli", *args])


if __name__ == "__main__":
    sys.exit(main())
