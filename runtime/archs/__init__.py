"""Which families the executors can run: a config.json to a ModelGraph."""

from .catalogue import GRAPHS, graph_of

__all__ = ["GRAPHS", "graph_of"]
