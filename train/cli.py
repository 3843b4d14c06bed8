"""The `train` command."""

import os
import sys
from pathlib import Path
from typing import Any

from .config import QATRecipe
from .distill import run_distill
from .distill_config import DistillRecipe, default_recipe
from .qat import run_qat
from .recipe import load_recipe, to_yaml

USAGE = """\
usage: train qat RECIPE [--resume] [--print_config] [--key.sub value ...]
       train dflash-distill [RECIPE] [--resume] [--print_config] [--key.sub value ...]

  qat RECIPE               quantization-aware training of a model's experts to MXFP4, by the YAML recipe
  dflash-distill [RECIPE]  train a DFlash draft head for an exported directory, on the target's own responses;
                           inside such a directory the recipe may be left out: the default one is printed and used
  --resume                 continue the run the recipe names, from its newest checkpoint
  --print_config           print the resolved recipe and stop
  --key.sub value          override any field of the recipe, such as --trainer.max_steps 100
                           (--model DIR, --target DIR and --run DIR are fields like the others; a list is replaced as a whole)

Recipes: recipes/README.md. Exit status: 0 done, 2 wrong input, 130 interrupted.
"""
COMMANDS = ("qat", "dflash-distill")


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
    flags = {f for f in ("--resume", "--print_config") if f in args}
    rest = [a for a in args[1:] if a not in flags]
    try:
        recipe = _read(args[0], rest, quiet="--print_config" in flags)
        if "--print_config" in flags:
            print(to_yaml(recipe), end="")
            return 0
        if isinstance(recipe, QATRecipe):
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


def _read(command: str, rest: list[str], *, quiet: bool) -> Any:
    """The recipe of a command: the file that comes first, or dflash-distill's default."""
    if rest and not rest[0].startswith("-"):
        kind: Any = QATRecipe if command == "qat" else DistillRecipe
        return load_recipe(kind, path=Path(rest[0]), overrides=rest[1:])
    if command == "qat":
        raise ValueError("train qat: the recipe comes first: train qat RECIPE [--key value ...].")
    recipe = load_recipe(DistillRecipe, path=None, overrides=rest, default=default_recipe())
    if not quiet:
        print(f"no recipe given: the default one is used\n{to_yaml(recipe)}", flush=True)
    return recipe


if __name__ == "__main__":
    sys.exit(main())
