"""Documents, the held-out rule, token rows, and the data module."""

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .config import DataConfig, Source
from .packing import cut_rows, pick_row, spread
from .sharding import data_parallel_rank, data_parallel_size

T = TypeVar("T")
HELDOUT_MODULUS = 10


def is_held_out(name: str) -> bool:
    """The rule that keeps a document out of training: sha256 of its name, as an integer, divisible by 10.

    The name of a standard-library module is its path below Lib/, that of a dataset row its prompt or text.
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELDOUT_MODULUS == 0


def read_source(source: Source) -> Iterator[tuple[str, Any]]:
    """(name, text | {"messages", "tools"}) of the documents of one source: its `part`, at most `documents` of them.

    Errors: FileNotFoundError for a path that is not there, ValueError for a column, a row or a file that cannot be used,
        each naming the source and the remedy.
    """
    if source.stdlib:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [n for n in _stdlib_names(root) if _is_in_part(n, source)]
        for name in _limited(names, source):
            # the library's own tests hold files that no decoder or parser takes, on purpose: they are not code anyone reads
            try:
                text = (root / name).read_text(encoding="utf-8")
                ast.parse(text)
            except (UnicodeDecodeError, SyntaxError, ValueError):
                continue
            if text.strip():
                yield name, text
        return
    documents = [(n, d) for n, d in _rows(source) if _is_in_part(n, source)]
    yield from _limited(documents, source)


def describe_source(source: Source) -> str:
    """Where a source's text comes from, for records: names the Python version of a standard library."""
    if source.stdlib:
        return f"Python {platform.python_version()} standard library"
    return str(source.path or "/".join(p for p in (source.hub, source.hub_config, source.split) if p))


def _is_in_part(name: str, source: Source) -> bool:
    return source.part == "all" or (source.part == "heldout") == is_held_out(name)


def _limited(items: list[T], source: Source) -> list[T]:
    return items if source.documents is None else [items[i] for i in spread(len(items), limit=source.documents)]


def _stdlib_names(root: Path) -> list[str]:
    """Modules below Lib/ in name order; installed packages, tables of character sets and empty files are left out."""
    names = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("site-packages/", "dist-packages/", "encodings/", "lib2to3/tests/data/")) and path.stat().st_size:
            names.append(name)
    return names


def _where(source: Source) -> str:
    return f"data source {source.domain!r}"


def _read_text(path: Path, source: Source) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{_where(source)}: {path} is not text: {error}. Convert it to UTF-8, or leave it out.") from error


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    where = _where(source)
    if source.path is not None:
        path = Path(source.path)
        if not path.exists():
            raise FileNotFoundError(f"{where}: nothing at {path.absolute()}. Correct data.*.path, or give hub: NAME on a machine with a network.")
        if path.is_dir() or path.suffix in (".txt", ".py"):
            files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".py")) if path.is_dir() else [path]
            if not files:
                raise ValueError(f"{where}: no .txt or .py file below {path.absolute()}.")
            yield from ((p.name, _read_text(p, source)) for p in files)
            return
        if path.suffix == ".jsonl":
            table: Any = list(_json_lines(path, source))
            columns = list(table[0]) if table else []
        elif path.suffix == ".parquet":
            table = _load_dataset("parquet", data_files=str(path), split="train")
            columns = table.column_names
        else:
            raise ValueError(f"{where}: path must be .jsonl, .parquet, .txt, .py or a folder; got {path}.")
    else:
        try:
            table = _load_dataset(source.hub, source.hub_config, split=source.split)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where}: {describe_source(source)} cannot be read from the Hub: {error} "
                             "On a machine without a network give the same source a local `path:`.") from error
        columns = table.column_names
    for column in (source.text, source.prompt, source.response, source.tools):
        if column is not None and column not in columns:
            raise ValueError(f"{where}: no column {column!r} in {describe_source(source)}; it has {', '.join(columns) or 'no rows'}.")
    if source.text is None and source.prompt is None:
        raise ValueError(f"{where}: name the column to read: text: COLUMN for plain text, prompt: COLUMN for a user's turn.")
    for index, row in enumerate(table):
        for column in (source.text, source.prompt, source.response):
            if column is not None and not isinstance(row.get(column), str):
                raise ValueError(f"{where}: row {index} of {describe_source(source)}: column {column!r} must be text; "
                                 f"got {type(row.get(column)).__name__}. Repair or remove the row.")
            if column is not None and any("\ud800" <= c <= "\udfff" for c in row[column]):
                raise ValueError(f"{where}: row {index} of {describe_source(source)}: column {column!r} holds half a surrogate pair, which is no text. "
                                 "Repair or remove the row.")
        if source.text is not None:
            yield row[source.text], row[source.text]
            continue
        messages = [{"role": "user", "content": row[source.prompt]}]
        if source.response is not None:
            messages.append({"role": "assistant", "content": row[source.response]})
        tools = row.get(source.tools) if source.tools is not None else None
        yield row[source.prompt], {"messages": messages, "tools": _drop_nulls(tools) if not isinstance(table, list) else tools}


def _load_dataset(*args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset`; text, Python and JSON lines are read without it, and without its second of import."""
    import datasets

    datasets.disable_progress_bars()   # the training bar is the one to watch
    return datasets.load_dataset(*args, **kwargs)


def _json_lines(path: Path, source: Source) -> Iterator[dict[str, Any]]:
    """Rows as they are written: Arrow would reorder keys, unify types and read dates in them."""
    for number, line in enumerate(_read_text(path, source).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_where(source)}: {path}, line {number}: not JSON: {error}. Each line is one object.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{_where(source)}: {path}, line {number}: must be an object; got {type(row).__name__}.")
        yield row


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
    if end is None:
        raise ValueError("tokenizer: needs a pad or an eos token to end documents with; it has neither. Set one in tokenizer_config.json.")
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    ids = [i for t in encoded for i in (*t, end)]
    cuts = cut_rows(ids, length=length)
    if not cuts:
        raise ValueError(
            f"data source {source.domain!r}: {len(ids)} tokens in {describe_source(source)} ({source.part}) are less than one row of {length}. "
            "Lower data.sequence_length or add text.")
    stream = torch.tensor(ids)
    return [stream[s:e] for s, e in cuts]


def heldout_rows(config: DataConfig, *, tokenizer: Any) -> dict[str, list[Tensor]]:
    """Domain -> rows of data.sequence_length + 1 tokens, at most data.heldout_rows of them, spread evenly over its text."""
    found: dict[str, list[Tensor]] = {}
    for source in config.heldout:
        found.setdefault(source.domain, []).extend(token_rows(source, tokenizer=tokenizer, length=config.sequence_length))
    return {d: [rows[i] for i in spread(len(rows), limit=config.heldout_rows)] for d, rows in found.items()}


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
        self.heldout = heldout_rows(config, tokenizer=tokenizer)

    def sha256(self) -> str:
        """One hash over all rows: a run is resumed on the text it was started with, or not at all."""
        digest = hashlib.sha256()
        for rows in (*self.sources, *self.heldout.values()):
            for row in rows:
                digest.update(row.numpy().tobytes())
        return digest.hexdigest()

    def max_token_id(self) -> int:
        return max(int(row.max()) for rows in (*self.sources, *self.heldout.values()) for row in rows)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return step_loader(self.sources, weights=[s.weight for s in self.config.train], seed=self.seed, trainer=self.trainer, batch_size=self.batch_size,
                           accumulate=self.accumulate, max_steps=self.max_steps)


def step_loader(
    sources: list[list[Tensor]], *, weights: list[float], seed: int, trainer: L.Trainer | None, batch_size: int, accumulate: int, max_steps: int,
) -> DataLoader[Tensor]:
    """Batches of this rank from the trainer's global step on, contiguous in the run's row index: step, then rank, then micro-batch, then row."""
    assert trainer is not None, "a data module asks for its loader once it is attached to a trainer"
    done, world, rank = trainer.global_step, data_parallel_size(trainer), data_parallel_rank(trainer)
    per_step = batch_size * accumulate
    rows = TrainRows(sources, weights=weights, seed=seed, count=max_steps * world * per_step)
    indices = [(step * world + rank) * per_step + i for step in range(done, max_steps) for i in range(per_step)]
    return StepLoader(rows, batch_size=batch_size, sampler=indices, run_batches=max_steps * accumulate)
