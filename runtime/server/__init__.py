"""OpenAI-compatible HTTP over the engine."""

from .app import create_app
from .served import Served

__all__ = ["Served", "create_app"]
