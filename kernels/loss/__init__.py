"""Losses over a vocabulary that never hold [rows, vocabulary] at once."""

from .distill import DistillationSums, distillation_sums_ref
from .slots import SlotLosses, slot_losses, slot_losses_ref

__all__ = ["DistillationSums", "SlotLosses", "distillation_sums_ref", "slot_losses", "slot_losses_ref"]
