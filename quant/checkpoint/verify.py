"""The last question before a directory gets its name: does the model that is read back predict what the trained one did?

Bytes were compared before; what is left are names, order and config, which a reader could take otherwise. Both models run over the same
texts in fp32: the one read from the files as any user of ours would, and the trained one with its fake-quantized weights.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..archs import load_config, load_model, load_tokenizer
from ..experts import attach_fake_quant
from ..plan import QuantPlan
from ..quality import measure_quality
from .check import stored_dtypes
from .load import load_exported_model
from .masters import Masters
from .reader import CheckpointReader

# Two models with equal weights differ by the order of sums alone; the KL of that is far below, that of a wrong expert far above.
MAX_KL = 1e-5
TOKENS = 48
TEXTS = (
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    "A train leaves at nine and goes 80 kilometres an hour. Another leaves the same place at ten and goes 120. When does it catch up?",
    "The river had frozen in the night, and the children who lived along its bank went down before school to see whether it would bear them.",
    "To restart the service, stop the running process, wait until the port is free, and start it again with the same configuration file.")


@dataclass(frozen=True, kw_only=True)
class KLReport:
    """KL(trained || read back) in nats a token, or why it was not measured."""

    kl: float | None
    tokens: int
    reason: str = ""

    def __str__(self) -> str:
        return f"KL of the model read back against the trained one {self.kl:.1e} nats over {self.tokens} tokens" if self.kl is not None else self.reason


def measure_kl(directory: Path, *, parent: Path, plan: QuantPlan, masters: Masters, prompts: Sequence[str] = ()) -> KLReport:
    """Compare the model of `directory` with the run's. Errors: ValueError for a KL above MAX_KL, or one that is no number."""
    needed = 2 * 4 * sum(torch.Size(r.shape).numel() * r.count for r in plan.rows)
    if (free := available_memory()) < 1.5 * needed:
        return KLReport(kl=None, tokens=0, reason=f"KL not measured: two models in fp32 take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free")
    rows = token_rows(parent, prompts=prompts)
    trained = trained_model(parent, plan=plan, masters=masters)
    read_back = load_exported_model(directory, dtype=torch.float32)
    quality = measure_quality(read_back, parent=trained, rows=rows)
    if not quality.kl <= MAX_KL:   # NaN too
        raise ValueError(f"export: the model read back is not the trained one: KL {quality.kl:.3g} nats a token over {quality.tokens} tokens; "
                         f"at most {MAX_KL:.0e} is rounding. Nothing was kept; please report this.")
    return KLReport(kl=quality.kl, tokens=quality.tokens)


@torch.no_grad()
def trained_model(parent: Path, *, plan: QuantPlan, masters: Masters) -> nn.Module:
    """The model as training left it, computing with quantized weights; what was trained beside them as the export writes it."""
    model = load_model(parent, dtype=torch.float32)
    planned = {w.name for w in plan.weights}
    dtypes = stored_dtypes(CheckpointReader(parent), config=load_config(parent))
    parameters = dict(model.named_parameters())
    for name in masters:
        if name in parameters:   # a tied head has one parameter
            value = masters.get(name)
            parameters[name].copy_(value if name in planned else value.to(dtypes.get(name, value.dtype)))
    attach_fake_quant(model, plan=plan)
    return model.eval()


def token_rows(parent: Path, *, prompts: Sequence[str]) -> list[Tensor]:
    """Rows of one length: of the prompts, or the built-in texts; of arbitrary tokens where the parent has no tokenizer."""
    config = load_config(parent)
    length = min(TOKENS, config.max_position_embeddings)
    if not any((parent / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return list(torch.randint(config.vocab_size, (4, length), generator=torch.Generator().manual_seed(0)))
    tokenizer = load_tokenizer(parent)
    ids = [tokenizer(text)["input_ids"] for text in (prompts or TEXTS)]
    flat = torch.tensor([i % config.vocab_size for row in ids for i in row])
    rows = [flat[i: i + length] for i in range(0, len(flat), length)]
    return [r for r in rows if len(r) == length] or [flat.repeat(length)[:length]]


def available_memory() -> float:
    """Bytes a process can still take, by the kernel's own estimate."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))

