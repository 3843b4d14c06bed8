"""Losses over a vocabulary that never hold [rows, vocabulary] at once."""

from .distill import DistillationSums, distillation_sums_ref

__all__ = ["DistillationSums", "distillation_sums_ref"]
