"""Layers, third-party sets, cycles and the package list, read from the source with ast.

A rule takes the root of a tree and returns its breaches, one line each. The first test asks for none in this repository;
the second plants one breach at a time in a small tree, so that a rule which no longer sees anything is noticed.
"""

import ast
import graphlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OURS = {   # layer -> the layers it imports from, itself included
    "kernels": {"kernels"},
    "quant": {"kernels", "quant"},
    "dflash": {"kernels", "quant", "dflash"},
    "train": {"kernels", "quant", "dflash", "train"},
    "runtime": {"kernels", "quant", "dflash", "runtime"},
}
THIRD_PARTY = {
    "kernels": {"torch", "triton"},
    "quant": {"torch", "safetensors"},
    "dflash": {"torch", "safetensors", "transformers"},
    "train": {"torch", "safetensors", "lightning", "datasets", "wandb", "muon", "jsonargparse", "yaml", "numpy", "openai"},
    "runtime": {"torch", "safetensors", "transformers", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "openai", "matplotlib"},
}
EXTRA_THIRD_PARTY = {"quant/archs/": {"transformers", "gguf"}}        # the doors to transformers
# Imported at their point of use: the extras and what needs them, and what is not needed for local files.
OPTIONAL = {"wandb", "datasets", "gguf", "fastapi", "uvicorn", "pydantic", "openai", "matplotlib", "lightning.pytorch.loggers.WandbLogger",
            "runtime.serve.bind", "runtime.serve.serve"}
PACKAGE_DATA = {"recipes/pocket", "recipes/smollm2-moe"}                             # scripts that are shipped as data, not as a package
NOT_SOURCE = {"tests", "build", "runs", "wandb", "dist"}      # of these, tests is in git and the others are ignored by it
MAX_LINES = 400


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name."""

    file: str            # path below the root
    line: int
    relative: bool
    target: str          # dotted: `quant.plan` for one of our modules, `torch.nn` for another's
    name: str            # dotted, with the imported name: `quant.plan.make_plan`
    in_function: bool

    @property
    def layer(self) -> str:
        return self.file.split("/")[0]

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


def top_folders(root: Path) -> list[str]:
    """Folders at the top that hold Python source."""
    return sorted(d.name for d in root.iterdir()
                  if d.is_dir() and d.name[0] != "." and d.name not in NOT_SOURCE and any(d.rglob("*.py")))


def read_imports(root: Path) -> list[Import]:
    """All imports of all layers."""
    return [i for layer in OURS for path in sorted((root / layer).rglob("*.py")) for i in _imports_of(path, root=root)]


def _imports_of(path: Path, *, root: Path) -> Iterator[Import]:
    file = path.relative_to(root).as_posix()

    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file=file, line=child.lineno, relative=False, target=alias.name, name=alias.name, in_function=in_function)
            elif isinstance(child, ast.ImportFrom):
                base = path.parent.relative_to(root).parts
                base = base[:len(base) - child.level + 1] if child.level else ()
                dotted = (*base, *(child.module.split(".") if child.module else ()))
                for alias in child.names:
                    full = (*dotted, alias.name)
                    is_module = child.level and (root.joinpath(*full).is_dir() or root.joinpath(*full).with_suffix(".py").is_file())
                    yield Import(file=file, line=child.lineno, relative=child.level > 0, target=".".join(full if is_module or not dotted else dotted),
                                 name=".".join(full), in_function=in_function)
            else:
                yield from visit(child, in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    yield from visit(ast.parse(path.read_text()), False)


def layers(root: Path) -> list[str]:
    """A layer imports from its left only; nothing imports recipes."""
    unknown = [f"{t}/: a top folder without a layer; add it to this test" for t in top_folders(root) if t not in OURS and t != "recipes"]
    return unknown + [f"{i}: {i.layer} may import {', '.join(sorted(OURS[i.layer]))} only"
                      for i in read_imports(root) if i.relative and i.top not in OURS[i.layer]]


def relative_imports(root: Path) -> list[str]:
    """Our own code is imported by relative import."""
    names = {"kilotok", "recipes", *OURS}
    return [f"{i}: write a relative import" for i in read_imports(root) if not i.relative and i.top in names]


def third_party(root: Path) -> list[str]:
    """Each layer has a closed set of packages."""
    found = []
    for i in read_imports(root):
        allowed = THIRD_PARTY[i.layer].union(*(extra for prefix, extra in EXTRA_THIRD_PARTY.items() if i.file.startswith(prefix)))
        if not i.relative and i.top not in sys.stdlib_module_names and i.top not in allowed:
            found.append(f"{i}: not in the set of {i.layer}")
    return found


def imports_in_functions(root: Path) -> list[str]:
    """Only an optional package is imported inside a function."""
    return [f"{i}: imported inside a function" for i in read_imports(root) if i.in_function and not {i.top, i.name} & OPTIONAL]


def cycles(root: Path) -> list[str]:
    """No module of a layer reaches itself."""
    found, imports = [], read_imports(root)
    for layer in OURS:
        graph = graphlib.TopologicalSorter({layer: ()})
        for i in imports:
            if i.relative and i.layer == i.top == layer:
                graph.add(i.module, i.target)
        try:
            graph.prepare()
        except graphlib.CycleError as error:
            found.append("cycle: " + " <- ".join(error.args[1]))
    return found


def packages(root: Path) -> list[str]:
    """Folders with source, their __init__.py, and `packages` in pyproject.toml agree."""
    folders = []
    for top in top_folders(root):
        for folder in (root / top, *sorted(p for p in (root / top).rglob("*") if p.is_dir())):
            name = folder.relative_to(root).as_posix()
            if any(folder.rglob("*.py")) and not any(f"{name}/".startswith(f"{d}/") for d in PACKAGE_DATA):
                folders.append(name)
    found = []
    for name in folders:
        wanted = "/" in name or name == "recipes"
        if (root / name / "__init__.py").exists() != wanted:
            found.append(f"{name}/__init__.py: {'missing' if wanted else 'must not exist: it hides a public package of that name'}")
    found += [f"{d}/__init__.py: package data must not be a package" for d in sorted(PACKAGE_DATA) if (root / d / "__init__.py").exists()]
    listed = _setuptools(root)["packages"]
    wanted_packages = ["kilotok." + f.replace("/", ".") for f in folders]
    found += [f"pyproject.toml: packages lacks {p}" for p in wanted_packages if p not in listed]
    found += [f"pyproject.toml: packages names {p}, which holds no source" for p in listed if p not in wanted_packages]
    return found + [f"pyproject.toml: packages names {p} twice" for p in sorted({p for p in listed if listed.count(p) > 1})]


def package_dir(root: Path) -> list[str]:
    """package-dir maps every top folder that holds source, and no other."""
    mapped, wanted = _setuptools(root)["package-dir"], {f"kilotok.{t}": t for t in top_folders(root)}
    return [f"pyproject.toml: package-dir of {k} must be {wanted.get(k)!r}; got {mapped.get(k)!r}"
            for k in sorted(mapped.keys() | wanted.keys()) if mapped.get(k) != wanted.get(k)]


def _setuptools(root: Path) -> dict[str, dict]:
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]


def file_lengths(root: Path) -> list[str]:
    """No file is longer than 400 lines."""
    counts = {p: p.read_text().count("\n") for t in (*top_folders(root), "tests") for p in sorted((root / t).rglob("*.py"))}
    return [f"{p.relative_to(root).as_posix()}: {n} lines, more than {MAX_LINES}" for p, n in counts.items() if n > MAX_LINES]


RULES = (layers, relative_imports, third_party, imports_in_functions, cycles, packages, package_dir, file_lengths)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_this_repository_keeps(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


CLEAN = {
    "kernels/mx/__init__.py": "from .pack import pack\n", "kernels/mx/pack.py": "import torch\n",
    "quant/plan.py": "import re\nfrom ..kernels.mx import pack\nfrom . import tensor\n", "quant/tensor.py": "from ..kernels import mx\n",
    "quant/archs/__init__.py": "from .hf import load\n", "quant/archs/hf.py": "from transformers import AutoConfig\n",
    "train/loggers.py": "def f():\n    from lightning.pytorch.loggers import WandbLogger\n",
    "recipes/__init__.py": "", "recipes/pocket/corpus.py": "import tokenizers\n", "dflash/notes.md": "",
    "pyproject.toml": """\
[tool.setuptools]
packages = ["kilotok.kernels", "kilotok.kernels.mx", "kilotok.quant", "kilotok.quant.archs", "kilotok.recipes", "kilotok.train"]
[tool.setuptools.package-dir]
"kilotok.kernels" = "kernels"
"kilotok.quant" = "quant"
"kilotok.recipes" = "recipes"
"kilotok.train" = "train"
""",
}
BREACHES = [   # rule, file, its text, the one line it must report
    (layers, "kernels/mx/pack.py", "from ...quant.plan import x\n", "kernels/mx/pack.py:1: quant.plan.x: kernels may import kernels only"),
    (layers, "kernels/mx/pack.py", "from ... import quant\n", "kernels/mx/pack.py:1: quant: kernels may import kernels only"),
    (layers, "quant/plan.py", "from ..train import config\n", "quant/plan.py:1: train.config: quant may import kernels, quant only"),
    (layers, "train/x.py", "if 1:\n    from ..runtime.cli import main\n",
     "train/x.py:2: runtime.cli.main: train may import dflash, kernels, quant, train only"),
    (layers, "runtime/x.py", "def f():\n    from ..train.config import x\n",
     "runtime/x.py:2: train.config.x: runtime may import dflash, kernels, quant, runtime only"),
    (layers, "dflash/x.py", "from ..recipes import x\n", "dflash/x.py:1: recipes.x: dflash may import dflash, kernels, quant only"),
    (layers, "extra/x.py", "", "extra/: a top folder without a layer; add it to this test"),
    (relative_imports, "quant/plan.py", "from kilotok.kernels.mx import pack\n", "quant/plan.py:1: kilotok.kernels.mx.pack: write a relative import"),
    (relative_imports, "quant/plan.py", "import kernels\n", "quant/plan.py:1: kernels: write a relative import"),
    (third_party, "quant/plan.py", "import transformers.models\n", "quant/plan.py:1: transformers.models: not in the set of quant"),
    (third_party, "kernels/mx/pack.py", "import numpy as np\n", "kernels/mx/pack.py:1: numpy: not in the set of kernels"),
    (third_party, "runtime/x.py", "from lightning import Trainer\n", "runtime/x.py:1: lightning.Trainer: not in the set of runtime"),
    (third_party, "train/x.py", "import transformers\n", "train/x.py:1: transformers: not in the set of train"),
    (imports_in_functions, "train/x.py", "class A:\n    def f(self):\n        import torch\n", "train/x.py:3: torch: imported inside a function"),
    (imports_in_functions, "train/x.py", "async def f():\n    from lightning.pytorch.loggers import CSVLogger\n",
     "train/x.py:2: lightning.pytorch.loggers.CSVLogger: imported inside a function"),
    (cycles, "quant/tensor.py", "from .plan import x\n", "cycle: quant.plan <- quant.tensor <- quant.plan"),
    (cycles, "kernels/mx/pack.py", "from . import name\n", "cycle: kernels.mx <- kernels.mx.pack <- kernels.mx"),
    (packages, "quant/checkpoint/load.py", "", "quant/checkpoint/__init__.py: missing\npyproject.toml: packages lacks kilotok.quant.checkpoint"),
    (packages, "kernels/__init__.py", "", "kernels/__init__.py: must not exist: it hides a public package of that name"),
    (packages, "recipes/pocket/__init__.py", "", "recipes/pocket/__init__.py: package data must not be a package"),
    (packages, "pyproject.toml", CLEAN["pyproject.toml"].replace('"kilotok.train"]', '"kilotok.train", "kilotok.train.callbacks", "kilotok.train"]'),
     "pyproject.toml: packages names kilotok.train.callbacks, which holds no source\npyproject.toml: packages names kilotok.train twice"),
    (package_dir, "runtime/cli.py", "", "pyproject.toml: package-dir of kilotok.runtime must be 'runtime'; got None"),
    (package_dir, "pyproject.toml", CLEAN["pyproject.toml"] + '"kilotok.dflash" = "dflash"\n',
     "pyproject.toml: package-dir of kilotok.dflash must be None; got 'dflash'"),
    (file_lengths, "tests/x.py", "\n" * 401, "tests/x.py: 401 lines, more than 400"),
]


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_a_clean_tree_has_no_breach(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    assert rule(plant(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(("rule", "file", "text", "expected"), BREACHES, ids=[f"{b[0].__name__}-{i}" for i, b in enumerate(BREACHES)])
def test_a_planted_breach_is_reported(rule: Callable[[Path], list[str]], file: str, text: str, expected: str, tmp_path: Path) -> None:
    assert "\n".join(rule(plant(tmp_path, {**CLEAN, file: text}))) == expected
