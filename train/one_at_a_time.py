"""KL and perplexity of one model under many choices of formats for its routed experts, each against the model with none quantized.

The compared models differ in a few weights only, so one model is held, and three things are shared. The parent's hidden states are computed
once a batch of rows. So are the outputs of its decoder layers: a choice that changes layer 17 first is handed the recorded outputs of layers
0 to 16 and computes from there on, which halves the work of one measurement for each layer. And the experts are held in bf16, in which every
format reads them, so an unquantized one costs no copy.

Each finished measurement is a line of a file: a run that is killed goes on where it stopped.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.loss import distillation_sums_ref
from ..quant.checkpoint import write_atomically
from ..quant.experts import attach_fake_quant
from ..quant.plan import QuantPlan
from ..quant.quality import Quality, head_weight, hidden_states
from ..quant.tensor import SOURCE_DTYPE
from .recipe import RecipeError

_LAYER = re.compile(r"(.*?)\.(\d+)\.")   # the list of decoder layers, and the index in it, at the start of a weight's name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Formats by name of fused weight; every other routed expert stays in bf16."""

    key: str
    formats: Mapping[str, str]

    @property
    def first_layer(self) -> int:
        """The first layer that computes other than the parent; 0 when none does, so that the whole model runs again."""
        return min((layer_of(n) for n in self.formats), default=0)


class Measurements:
    """A file of finished measurements: a line of JSON that says what of, then one a batch and choice.

    Errors: RecipeError when the file is of something else.
    """

    def __init__(self, path: Path, *, of: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[str, str, int, str], Quality] = {}
        if path.exists():
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]   # whole ones: a killed process may have left half of one
            if lines:
                self._read(lines, of=dict(of))
                write_atomically(path, text="".join(line + "\n" for line in lines))
                return
        write_atomically(path, text=json.dumps(dict(of)) + "\n")

    def _read(self, lines: Sequence[str], *, of: dict[str, Any]) -> None:
        before = json.loads(lines[0])
        changed = [k for k in of if before.get(k) != of[k]]
        if changed:
            raise RecipeError(f"{self.path}: was started with another {changed[0]}: {before.get(changed[0])} there, {of[changed[0]]} now. "
                              "Restore that, choose another --run, or remove the folder.")
        for line in lines[1:]:
            raw = json.loads(line)
            self._found[raw["part"], raw["domain"], raw["batch"], raw["choice"]] = Quality(**raw["quality"])

    def has(self, part: str, domain: str, batch: int, key: str) -> bool:
        return (part, domain, batch, key) in self._found

    def add(self, part: str, domain: str, batch: int, key: str, quality: Quality) -> None:
        self._found[part, domain, batch, key] = quality
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps({"part": part, "domain": domain, "batch": batch, "choice": key, "quality": dataclasses.asdict(quality)}) + "\n")

    def of_choice(self, part: str, key: str) -> dict[str, list[Quality]]:
        """Domain -> its batches."""
        found: dict[str, list[Quality]] = {}
        for (p, domain, _, k), quality in sorted(self._found.items(), key=lambda item: item[0][2]):
            if (p, k) == (part, key):
                found.setdefault(domain, []).append(quality)
        return found


class OneModel:
    """A model and its routed experts, measured under one choice after another. Experts are rounded to bf16 in place."""

    def __init__(self, model: nn.Module, *, plan: QuantPlan, autocast_dtype: torch.dtype | None, chunk_rows: int) -> None:
        self.model, self.plan, self.autocast_dtype, self.chunk_rows = model, plan, autocast_dtype, chunk_rows
        for weight in plan.experts:
            parameter = model.get_parameter(weight.name)
            parameter.data = parameter.data.to(SOURCE_DTYPE)
        match = _LAYER.match(plan.experts[0].name)
        assert match is not None, plan.experts[0].name
        self.layers = list(model.get_submodule(match[1]).children())

    @torch.no_grad()
    def measure(self, rows: Tensor, *, choices: Sequence[Choice]) -> Iterator[tuple[Choice, Quality]]:
        """Sums over a batch, divided by its tokens, of each choice in turn. Shapes: rows int64 [B, T + 1]."""
        inputs, labels = rows[:, :-1], rows[:, 1:].flatten()
        recorded: dict[int, Any] = {}
        hooks = []
        for i, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_hook(lambda module, args, output, i=i: recorded.__setitem__(i, output)))   # type: ignore[misc]
        try:
            parent_TD = self._hidden(inputs, formats={}, first_layer=0)
        finally:
            for hook in hooks:
                hook.remove()
        for choice in choices:
            first = choice.first_layer
            with _replayed({layer: recorded[i] for i, layer in enumerate(self.layers[:first])}):
                hidden_TD = self._hidden(inputs, formats=choice.formats, first_layer=first)
                with self._precision(rows.device):
                    sums = distillation_sums_ref(hidden_TD, teacher_hidden_TD=parent_TD, head_VD=head_weight(self.model),
                                                 teacher_head_VD=head_weight(self.model), labels_T=labels, chunk_rows=self.chunk_rows)
            tokens = labels.numel()
            yield choice, Quality(tokens=tokens, kl=float(sums.kl) / tokens, cross_entropy=float(sums.cross_entropy) / tokens,
                                  parent_cross_entropy=float(sums.teacher_cross_entropy) / tokens)

    def _hidden(self, inputs_BT: Tensor, *, formats: Mapping[str, str], first_layer: int) -> Tensor:
        weights = tuple(dataclasses.replace(w, format=formats.get(w.name, "bf16")) for w in self.plan.experts if layer_of(w.name) >= first_layer)
        attached = attach_fake_quant(self.model, plan=dataclasses.replace(self.plan, weights=weights))
        try:
            attached.begin_step()
            with self._precision(inputs_BT.device):
                states = hidden_states(self.model, inputs_BT)
            attached.end_step()
        finally:
            attached.detach()
        return states

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.autocast_dtype is None else torch.autocast(device.type, dtype=self.autocast_dtype)


@contextlib.contextmanager
def _replayed(outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
    """These modules give these outputs instead of computing."""
    for module, output in outputs.items():
        module.__dict__["forward"] = lambda *args, _output=output, **kwargs: _output   # found before the method of the class
    try:
        yield
    finally:
        for module in outputs:
            del module.__dict__["forward"]


def layer_of(name: str) -> int:
    """Index of the decoder layer that a weight belongs to."""
    match = _LAYER.match(name)
    assert match is not None, name
    return int(match[2])
