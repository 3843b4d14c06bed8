"""Pieces that the Lightning trainer calls."""

from .atomic_io import AtomicCheckpointIO
from .heldout import HeldoutFigures
from .metrics_csv import MetricsCSV

__all__ = ["AtomicCheckpointIO", "HeldoutFigures", "MetricsCSV"]
