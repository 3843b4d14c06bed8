"""Validation of an exported model directory: lossless, acceptance, speed, quality against the parent; one report."""

from .options import ValidateOptions
from .run import validate

__all__ = ["ValidateOptions", "validate"]
