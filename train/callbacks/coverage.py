"""Counting, over a run, which experts the tokens reach."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor, nn

from ...quant.coverage import ExpertCounts, coverage_record
from ...quant.plan import PlannedWeight


class CountExperts(L.Callback):
    """Counts the forwards of the training steps, on all ranks; the checkpoint holds the counts, so that they are of the whole run after a resume.

    student: called once the model is set up. Held-out figures are taken between steps, and the second run of a checkpointed layer comes in
    backward: neither counts.
    """

    def __init__(self, student: Callable[[], nn.Module], *, experts: tuple[PlannedWeight, ...]) -> None:
        self.student, self.experts = student, experts
        self._counts: ExpertCounts | None = None
        self._before: dict[str, list[int]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._counts = ExpertCounts(self.student(), experts=self.experts)
        self._counts.before = self._before

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, batch_idx: int) -> None:
        assert self._counts is not None, "counting starts after on_fit_start"
        self._counts.counting = True

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        assert self._counts is not None, "counting starts after on_fit_start"
        self._counts.counting = False

    def record(self) -> dict[str, Any]:
        """The figures of the run so far, for RUN/meta.json; every rank must call it."""
        assert self._counts is not None, "counting starts after on_fit_start"
        return coverage_record(self._counts.totals())

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_per_expert": self._before if self._counts is None else self._counts.totals()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["tokens_per_expert"]
        if self._counts is not None:   # sharded models are restored after on_fit_start
            self._counts.before = self._before
