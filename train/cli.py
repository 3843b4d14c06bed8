"""The `train` command."""

import os
import sys
from pathlib import Path
from typing import Any

from .build_config import BuildRecipe
from .build_moe import run_build
from .config import QATRecipe
from .distill import run_distill
from .distill_config import DistillRecipe, default_recipe
from .qat_run import run_qat
from .recipe import load_recipe, to_yaml
from .seeds import FinishedRun, seeds_table
from .sensitivity import run_sensitivity

USAGE = """\
usage: train qat RECIPE [--sensitivity] [--resume] [--print_config] [--key.sub value ...]
       train qat-report RUN [RUN ...]
       train dflash-distill [RECIPE] [--resume] [--print_config] [--key.sub value ...]
       train build-moe RECIPE [--print_config] [--key.sub value ...]

  qat RECIPE               quantization-aware training of a model's experts to MXFP4, by the YAML recipe
  qat-report RUN ...       finished qat runs in one table; of several seeds of one recipe also mean and spread
  dflash-distill [RECIPE]  train a DFlash draft head for an exported directory, on the target's own responses;
                           inside such a directory the recipe may be left out: the default one is printed and used
  build-moe RECIPE         a real mixture of experts out of a dense Llama-class model (recipes/smollm2-moe)
  --sensitivity            qat only: instead of training, measure on held-out text what each expert weight costs in MXFP4, and
                           write the table to the folder RUN-sensitivity; with quant.bits_per_weight also the plan it gives
  --resume                 continue the run the recipe names, from its newest checkpoint
  --print_config           print the resolved recipe and stop
  --key.sub value          override any field of the recipe, such as --trainer.max_steps 100
                           (--model DIR, --target DIR and --run DIR are fields like the others; a list is replaced as a whole)

Recipes: recipes/README.md. Exit status: 0 done, 2 wrong input, 130 interrupted.
"""
KINDS: dict[str, Any] = {"qat": QATRecipe, "dflash-distill": DistillRecipe, "build-moe": BuildRecipe}
COMMANDS = ("qat", "qat-report", "dflash-distill", "build-moe")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong input (one line says what to do), 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or {"-h", "--help"} & set(args):
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] not in COMMANDS:
        print(f"error: train: unknown command {args[0]!r}. There is: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    args = ["--print_config" if a == "--print-config" else a for a in args]
    flags: set[str] = {f for f in ("--resume", "--print_config", "--sensitivity") if f in args}
    rest = [a for a in args[1:] if a not in flags]
    try:
        if "--sensitivity" in flags and args[0] != "qat":
            raise ValueError(f"--sensitivity: belongs to train qat; got train {args[0]}.")
        if args[0] == "qat-report":
            print(_compare(rest, flags=flags))
            return 0
        recipe = _read(args[0], rest, quiet="--print_config" in flags)
        if "--print_config" in flags:
            print(to_yaml(recipe), end="")
            return 0
        if "--sensitivity" in flags:
            run_sensitivity(recipe, resume="--resume" in flags)
        elif isinstance(recipe, BuildRecipe):
            if "--resume" in flags:
                raise ValueError("--resume: a build is short and starts over; remove what is left of it, or choose another --out.")
            run_build(recipe)
        elif isinstance(recipe, QATRecipe):
            run_qat(recipe, resume="--resume" in flags)
        else:
            run_distill(recipe, resume="--resume" in flags)
    except (KeyboardInterrupt, SystemExit):   # Lightning turns Ctrl-C into an exit of its own
        print("interrupted: continue from the newest checkpoint with the same command and --resume", file=sys.stderr)
        return 130
    except (ValueError, OSError, NotImplementedError) as error:
        if os.environ.get("KILOTOK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(args: list[str], *, flags: set[str]) -> str:
    if not args or flags or any(a.startswith("-") for a in args):
        raise ValueError("train qat-report: takes run directories and nothing else: train qat-report RUN [RUN ...].")
    return seeds_table([FinishedRun.open(Path(a)) for a in args])


def _read(command: str, rest: list[str], *, quiet: bool) -> Any:
    """The recipe of a command: the file that comes first, or dflash-distill's default."""
    if rest and not rest[0].startswith("-"):
        kind: Any = KINDS[command]
        return load_recipe(kind, path=Path(rest[0]), overrides=rest[1:])
    if command != "dflash-distill":
        raise ValueError(f"train {command}: the recipe comes first: train {command} RECIPE [--key value ...].")
    recipe = load_recipe(DistillRecipe, path=None, overrides=rest, default=default_recipe())
    if not quiet:
        print(f"no recipe given: the default one is used\n{to_yaml(recipe)}", flush=True)
    return recipe


if __name__ == "__main__":
    sys.exit(main())
