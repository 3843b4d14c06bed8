"""A transformers causal model as a Target: what distillation measures acceptance on.

Its logits may differ in the last bits with the number of tokens a step reads, as transformers' do; the runtime's executors
are the ones that keep a column's operations fixed.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from .context import Taps
from .generate import TargetStep


class HFTarget:
    """One sequence on a transformers model; its taps must be entered by the owner."""

    def __init__(self, model: nn.Module, *, taps: Taps, max_length: int) -> None:
        self.model, self.taps, self.max_length = model, taps, max_length
        self._cache: Any = DynamicCache()
        self._device = next(model.parameters()).device
        # transformers renamed the argument in 5.2x
        self._cache_argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    @torch.no_grad()
    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        """Errors: ValueError beyond max_length."""
        if self.length + len(ids) > self.max_length:
            raise ValueError(f"target: {self.length} + {len(ids)} tokens exceed its context of {self.max_length}. Shorten the text.")
        ids_BT = torch.tensor([list(ids)], device=self._device)
        output = self.model(input_ids=ids_BT, use_cache=True, logits_to_keep=1 if last_logits_only else 0, **{self._cache_argument: self._cache})
        return TargetStep(logits_TV=output.logits[0], features_TF=self.taps.take()[0])

    def rewind(self, length: int) -> None:
        if length < self.length:
            self._cache.crop(length - self.length)   # negative: how many to remove, the form that all versions know
