"""From a YAML recipe and command-line overrides to a frozen config, by jsonargparse; unknown keys name the nearest valid one."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe or an override that cannot be used."""


def load_recipe(kind: type[T], *, path: Path, overrides: list[str]) -> T:
    """The recipe at `path` with `--key.sub value` overrides applied.

    Errors: RecipeError naming the key, the nearest valid one, or the value that does not fit.
    """
    if not path.is_file():
        raise RecipeError(f"recipe: no file at {path.absolute()}. Give the path of a YAML recipe, such as those in recipes/.")
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values; got {type(raw).__name__}. See recipes/ for examples.")
    check_keys(kind, raw, where=str(path))
    valid = set(option_names(kind))
    for item in overrides:
        key = item.split("=", 1)[0]
        if key.startswith("--") and key[2:] not in valid:
            raise RecipeError(f"{key}: no such option. {_nearest(key[2:], valid, prefix='--')}")
    parser = make_parser(kind)
    try:
        namespace = parser.parse_args(["--config", str(path), *overrides])
    except jsonargparse.ArgumentError as error:
        raise RecipeError(f"{path}: {error}") from error
    values = vars(parser.instantiate_classes(namespace))
    return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


def make_parser(kind: type[Any]) -> jsonargparse.ArgumentParser:
    """The jsonargparse parser of a recipe class; it raises instead of leaving the process."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, as_group=False)
    return parser


def option_names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, nested ones included."""
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        yield prefix + f.name
        if dataclasses.is_dataclass(hints[f.name]):
            yield from option_names(typing.cast(type[Any], hints[f.name]), f"{prefix}{f.name}.")


def check_keys(kind: type[Any], raw: dict[str, Any], *, where: str, prefix: str = "") -> None:
    """Raise RecipeError for the first key of `raw` that `kind` does not have, naming the nearest that it has."""
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise RecipeError(f"{where}: unknown key {prefix + str(key)!r}. {_nearest(str(key), hints, prefix=prefix)}")
        for inner in _dataclasses_in(hints[key]):
            for index, item in enumerate(value if isinstance(value, list) else [value]):
                label = f"{prefix}{key}[{index}]." if isinstance(value, list) else f"{prefix}{key}."
                if isinstance(item, dict):
                    check_keys(inner, item, where=where, prefix=label)


def _dataclasses_in(hint: Any) -> Iterator[type[Any]]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type[Any], hint)
    elif typing.get_origin(hint) in (list, typing.Union, types.UnionType):
        for inner in typing.get_args(hint):
            yield from _dataclasses_in(inner)


def _nearest(key: str, valid: Any, *, prefix: str) -> str:
    close = difflib.get_close_matches(key, list(valid), n=1, cutoff=0.4)
    return f"Did you mean {prefix + close[0]!r}?" if close else f"Valid: {', '.join(sorted(valid))}."


def to_yaml(recipe: Any) -> str:
    """The resolved recipe, every field."""
    plain = dataclasses.asdict(recipe)
    return yaml.safe_dump(_lists(plain), sort_keys=False)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(v) for v in value]
    return value
