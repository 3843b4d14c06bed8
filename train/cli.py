"""The `train` command."""

import os
import sys
from pathlib import Path

from .config import QATRecipe
from .qat import run_qat
from .recipe import load_recipe, to_yaml

USAGE = """\
usage: train qat RECIPE [--resume] [--print_config] [--key.sub value ...]

  qat RECIPE       quantization-aware training of a model's experts to MXFP4, by the YAML recipe
  --resume         continue the run the recipe names, from its newest checkpoint
  --print_config   print the resolved recipe and stop
  --key.sub value  override any field of the recipe, such as --trainer.max_steps 100
                   (--model DIR and --run DIR are fields like the others; a list is replaced as a whole)

Recipes: recipes/README.md. Exit status: 0 done, 2 wrong input, 130 interrupted.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong input (one line says what to do), 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or {"-h", "--help"} & set(args):
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] != "qat":
        print(f"error: train: unknown command {args[0]!r}. There is: qat.", file=sys.stderr)
        return 2
    args = ["--print_config" if a == "--print-config" else a for a in args]
    flags = {f for f in ("--resume", "--print_config") if f in args}
    rest = [a for a in args[1:] if a not in flags]
    if not rest or rest[0].startswith("-"):
        print("error: train qat: the recipe comes first: train qat RECIPE [--key value ...].", file=sys.stderr)
        return 2
    try:
        recipe = load_recipe(QATRecipe, path=Path(rest[0]), overrides=rest[1:])
        if "--print_config" in flags:
            print(to_yaml(recipe), end="")
            return 0
        run_qat(recipe, resume="--resume" in flags)
    except (KeyboardInterrupt, SystemExit):   # Lightning turns Ctrl-C into an exit of its own
        print("interrupted: continue from the newest checkpoint with the same command and --resume", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("KILOTOK_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
