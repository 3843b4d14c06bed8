"""From a YAML recipe and command-line overrides to a frozen config, by jsonargparse.

Keys are checked before jsonargparse sees them, so that an unknown one names the nearest that exists. Overrides are put into
the recipe first: a list given on the command line replaces the recipe's, instead of being merged into it item by item.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe or an override that cannot be used."""


def load_recipe(kind: type[T], *, path: Path | None, overrides: list[str], default: T | None = None) -> T:
    """The recipe at `path`, or `default` without one, with `--key.sub value` overrides applied.

    Errors: RecipeError naming the key, the nearest valid one, or the value that does not fit.
    """
    if path is not None:
        raw = _read_yaml(path)
    else:
        assert default is not None, "a recipe needs a path or a default"
        raw = yaml.safe_load(to_yaml(default))
    where = str(path) if path is not None else "default recipe"
    check_keys(kind, raw, where=where)
    for key, value in _pairs(overrides, options=dict(options(kind))):
        branch = raw
        *parents, leaf = key.split(".")
        for name in parents:
            branch = branch.setdefault(name, {})
        branch[leaf] = value
    check_keys(kind, raw, where="command line")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    try:
        values = vars(parser.instantiate_classes(parser.parse_object(raw)))
    except jsonargparse.ArgumentError as error:
        raise RecipeError(f"{where}{' with the command line' if overrides else ''}: {' '.join(str(error).split())}") from error
    return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


def options(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of all fields, nested ones included."""
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        yield prefix + f.name, hints[f.name]
        if dataclasses.is_dataclass(hints[f.name]):
            yield from options(typing.cast(type[Any], hints[f.name]), f"{prefix}{f.name}.")


def option_names(kind: type[Any]) -> list[str]:
    """Dotted names of all fields, nested ones included."""
    return [name for name, _ in options(kind)]


def check_keys(kind: type[Any], raw: dict[str, Any], *, where: str, prefix: str = "") -> None:
    """Raise RecipeError for a key of `raw` that `kind` does not have, and for a null or a scalar where there can be none."""
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise RecipeError(f"{where}: unknown key {prefix + str(key)!r}. {_nearest(str(key), kind, prefix=prefix)}")
        if value is None and type(None) not in typing.get_args(hints[key]):
            raise RecipeError(f"{where}: {prefix}{key}: must have a value; got null. Leave the key out for the default.")
        is_list = typing.get_origin(hints[key]) is list
        if is_list and not isinstance(value, list):
            raise RecipeError(f"{where}: {prefix}{key}: must be a list; got {value!r:.80}.")
        for inner in _dataclasses_in(hints[key]):
            for index, item in enumerate(value if is_list else [value]):
                label = f"{prefix}{key}[{index}]" if is_list else f"{prefix}{key}"
                if not isinstance(item, dict):
                    raise RecipeError(f"{where}: {label}: must be a mapping of keys to values; got {item!r:.80}.")
                check_keys(inner, item, where=where, prefix=label + ".")


def to_yaml(recipe: Any) -> str:
    """The resolved recipe, every field; `load_recipe` reads it back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {key!r} is given twice")
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"recipe: no file at {path.absolute()}. Give the path of a YAML recipe, such as those in recipes/.")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values; got {type(raw).__name__}. See recipes/ for examples.")
    return raw


def _pairs(overrides: list[str], *, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `--key value` and `--key=value`; text for a text field, YAML for all others."""
    items = iter(overrides)
    for item in items:
        if not item.startswith("--"):
            raise RecipeError(f"{item}: unexpected argument. Overrides are written --key.sub value.")
        key, equals, text = item[2:].partition("=")
        if key not in options:
            raise RecipeError(f"--{key}: no such option. {_closest(key, options, show=lambda k: repr(f'--{k}'))}")
        if not equals:
            try:
                text = next(items)
            except StopIteration:
                raise RecipeError(f"--{key}: needs a value. Write --{key} VALUE.") from None
        if options[key] is str or (options[key] == str | None and text != "null"):
            yield key, text
            continue
        try:
            yield key, yaml.load(text, Loader=_UniqueKeys)
        except yaml.YAMLError as error:
            raise RecipeError(f"--{key}: not a YAML value: {error}") from error


def _dataclasses_in(hint: Any) -> Iterator[type[Any]]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type[Any], hint)
    elif typing.get_origin(hint) in (list, typing.Union, types.UnionType):
        for inner in typing.get_args(hint):
            yield from _dataclasses_in(inner)


def _nearest(key: str, kind: type[Any], *, prefix: str) -> str:
    """Advice for an unknown key: a field of a section below if it has that name, else the nearest on this level."""
    deeper = [n for n in option_names(kind) if n.rsplit(".", 1)[-1] == key]
    if deeper:
        return f"Did you mean {prefix + deeper[0]!r}?"
    return _closest(key, [f.name for f in dataclasses.fields(kind)], show=lambda k: repr(prefix + k))


def _closest(key: str, valid: Iterable[str], *, show: Any) -> str:
    names = list(valid)
    deeper = [n for n in names if n.rsplit(".", 1)[-1] == key]
    close = deeper or difflib.get_close_matches(key, names, n=1, cutoff=0.4)
    return f"Did you mean {show(close[0])}?" if close else f"Valid: {', '.join(sorted(names))}."
