"""The catalogue: one line a family."""

from collections.abc import Callable
from typing import Any

from ..graph import ModelGraph
from . import mixtral, qwen3_moe

GRAPHS: tuple[tuple[str, Callable[[dict[str, Any], str], ModelGraph]], ...] = (("qwen3_moe", qwen3_moe.graph), ("mixtral", mixtral.graph))


def graph_of(config: dict[str, Any], *, where: str) -> ModelGraph:
    """The graph of a config.json; NotImplementedError, naming what runs, for a family or a variant of one that does not."""
    for model_type, graph in GRAPHS:
        if config.get("model_type") == model_type:
            return graph(config, where)
    raise NotImplementedError(f"{where}: the reference executor runs {', '.join(name for name, _ in GRAPHS)}; got model_type {config.get('model_type')!r}. "
                              "Other families need one file in runtime/archs/; serve this directory with vLLM or SGLang meanwhile.")
