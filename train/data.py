"""Documents, the held-out rule, token rows, and the data module."""

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .config import DataConfig, Source
from .packing import cut_rows, pick_row, spread

HELDOUT_MODULUS = 10
datasets.disable_progress_bars()   # local files of a few rows; the training bar is the one to watch


def is_held_out(name: str) -> bool:
    """The rule that keeps a document out of training: sha256 of its name, as an integer, divisible by 10.

    The name of a standard-library module is its path below Lib/, that of a dataset row its prompt or text.
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELDOUT_MODULUS == 0


def read_source(source: Source) -> Iterator[tuple[str, Any]]:
    """(name, text | {"messages", "tools"}) of the documents of one source, its `part` only.

    Errors: FileNotFoundError for a path that is not there, ValueError for a missing column, each naming the remedy.
    """
    for name, document in _stdlib_modules() if source.stdlib else _rows(source):
        if source.part == "all" or (source.part == "heldout") == is_held_out(name):
            yield name, document


def describe_source(source: Source) -> str:
    """Where a source's text comes from, for records: names the Python version of a standard library."""
    if source.stdlib:
        return f"Python {platform.python_version()} standard library"
    return str(source.path or "/".join(p for p in (source.hub, source.hub_config, source.split) if p))


def _stdlib_modules() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        # tables of character sets, and files that are broken on purpose, are not code anyone reads
        if name.startswith(("site-packages/", "dist-packages/", "encodings/", "lib2to3/tests/data/")):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if source.strip():
            yield name, source


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    where = f"data source {source.domain!r}"
    if source.path is not None:
        path = Path(source.path)
        if not path.exists():
            raise FileNotFoundError(f"{where}: nothing at {path.absolute()}. Correct data.*.path, or give hub: NAME on a machine with a network.")
        if path.is_dir() or path.suffix in (".txt", ".py"):
            files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".py")) if path.is_dir() else [path]
            if not files:
                raise ValueError(f"{where}: no .txt or .py file below {path.absolute()}.")
            yield from ((p.name, p.read_text(encoding="utf-8")) for p in files)
            return
        builder = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix)
        if builder is None:
            raise ValueError(f"{where}: path must be .jsonl, .json, .parquet, .txt, .py or a folder; got {path}.")
        table = datasets.load_dataset(builder, data_files=str(path), split="train")
    else:
        table = datasets.load_dataset(source.hub, source.hub_config, split=source.split)
    for column in (source.text, source.prompt, source.response, source.tools):
        if column is not None and column not in table.column_names:
            raise ValueError(f"{where}: no column {column!r} in {describe_source(source)}; it has {', '.join(table.column_names)}.")
    if source.text is None and source.prompt is None:
        raise ValueError(f"{where}: name the column to read: text: COLUMN for plain text, prompt: COLUMN for a user's turn.")
    for row in table:
        if source.text is not None:
            yield row[source.text], row[source.text]
            continue
        messages = [{"role": "user", "content": row[source.prompt]}]
        if source.response is not None:
            messages.append({"role": "assistant", "content": row[source.response]})
        tools = _drop_nulls(row[source.tools]) if source.tools is not None else None
        yield row[source.prompt], {"messages": messages, "tools": tools}


def _drop_nulls(value: Any) -> Any:
    """Arrow gives every row of a nested column the union of all keys, null where a row had none."""
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value


def token_rows(source: Source, *, tokenizer: Any, length: int) -> list[Tensor]:
    """The source's documents, each ended by the padding/end-of-text token, as int64 rows of length + 1.

    Errors: ValueError when the source's text is shorter than one row.
    """
    texts = []
    for _, document in read_source(source):
        if isinstance(document, str):
            texts.append(document)
        else:
            texts.append(tokenizer.apply_chat_template(
                document["messages"], tools=document["tools"], tokenize=False, add_generation_prompt=len(document["messages"]) == 1))
    end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    ids = [i for t in encoded for i in (*t, end)]
    cuts = cut_rows(ids, length=length)
    if not cuts:
        raise ValueError(
            f"data source {source.domain!r}: {len(ids)} tokens in {describe_source(source)} ({source.part}) are less than one row of {length}. "
            "Lower data.sequence_length or add text.")
    stream = torch.tensor(ids)
    return [stream[s:e] for s, e in cuts]


class TrainRows(Dataset[Tensor]):
    """All rows of a run, in order; item i is a function of (seed, i)."""

    def __init__(self, sources: list[list[Tensor]], *, weights: list[float], seed: int, count: int) -> None:
        self.sources, self.weights, self.seed, self.count = sources, weights, seed, count
        self.num_rows = [len(s) for s in sources]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        source, row = pick_row(index, seed=self.seed, weights=self.weights, num_rows=self.num_rows)
        return self.sources[source][row]


class StepLoader(DataLoader[Tensor]):
    """A loader whose position is the trainer's global step, so it has no state of its own to save.

    Its length is the whole run's, also when it yields only the rest of it: Lightning counts the batches done before a resume.
    """

    def __init__(self, rows: Dataset[Tensor], *, batch_size: int, sampler: list[int], run_batches: int) -> None:
        self._run_batches = run_batches
        super().__init__(rows, batch_size=batch_size, sampler=sampler)

    def __len__(self) -> int:
        return self._run_batches

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing: `train_dataloader` started at the restored step."""


class TextData(L.LightningDataModule):
    """Training rows by (seed, step) and held-out rows by domain.

    `heldout`: domain -> rows, at most data.heldout_rows each. Training restarts at the trainer's global step.
    """

    def __init__(self, config: DataConfig, *, tokenizer: Any, seed: int, batch_size: int, accumulate: int, max_steps: int) -> None:
        super().__init__()
        if not config.train or not config.heldout:
            raise ValueError("data: data.train and data.heldout need at least one source each; see recipes/pocket/qat.yaml.")
        self.config, self.seed, self.batch_size, self.accumulate, self.max_steps = config, seed, batch_size, accumulate, max_steps
        length = config.sequence_length
        self.sources = [token_rows(s, tokenizer=tokenizer, length=length) for s in config.train]
        self.heldout: dict[str, list[Tensor]] = {}
        for s in config.heldout:
            self.heldout.setdefault(s.domain, []).extend(token_rows(s, tokenizer=tokenizer, length=length))
        self.heldout = {d: [rows[i] for i in spread(len(rows), limit=config.heldout_rows)] for d, rows in self.heldout.items()}

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of this rank, contiguous in the run's row index: step, then rank, then micro-batch, then row."""
        assert self.trainer is not None
        done, world, rank = self.trainer.global_step, self.trainer.world_size, self.trainer.global_rank
        per_step = self.batch_size * self.accumulate
        rows = TrainRows(self.sources, weights=[s.weight for s in self.config.train], seed=self.seed, count=self.max_steps * world * per_step)
        indices = [(step * world + rank) * per_step + i for step in range(done, self.max_steps) for i in range(per_step)]
        return StepLoader(rows, batch_size=self.batch_size, sampler=indices, run_batches=self.max_steps * self.accumulate)
