"""Pieces that the Lightning trainer calls."""

from .atomic_io import AtomicCheckpointIO
from .coverage import CountExperts
from .final import FinalFigures, save_final
from .heldout import HeldoutFigures
from .metrics_csv import MetricsCSV

__all__ = ["AtomicCheckpointIO", "CountExperts", "FinalFigures", "HeldoutFigures", "MetricsCSV", "save_final"]
