"""Sources, the held-out rule, token rows and the data module."""

import ast
import json
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer

from kilotok.train.config import DataConfig, Source
from kilotok.train.data import HELDOUT_MODULUS, TextData, is_held_out, read_source, token_rows
from kilotok.train.packing import pick_row

POCKET_RECIPE = Path(__file__).parents[2] / "recipes" / "pocket"


@pytest.fixture(scope="module")
def tokenizer(pocket: Path) -> Any:
    return AutoTokenizer.from_pretrained(pocket)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in, or taken from, the user's cache of datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def source(path: str | Path, **fields: Any) -> Source:
    return Source(domain="d", path=str(path), **fields)


def stream(rows: list[Tensor]) -> list[int]:
    """The tokens that rows of length 1 were cut from."""
    return [int(rows[0][0]), *(int(r[1]) for r in rows)]


# --- the held-out rule ---

def test_held_out_by_hand() -> None:
    # in decimal, sha256("ast.py") ends in the digit 0 and sha256("abc.py") in 4
    assert is_held_out("ast.py") and not is_held_out("abc.py")


def test_held_out_modules_of_the_pocket() -> None:
    """The pocket model never saw the modules that this rule holds out: its list has them, and its recipe the same modulus."""
    names = json.loads((POCKET_RECIPE / "heldout.json").read_text())["stdlib"]
    assert len(names) == len(set(names)) > 100
    assert [n for n in names if not is_held_out(n)] == []
    assert yaml.safe_load((POCKET_RECIPE / "pretrain.yaml").read_text())["holdout_modulus"] == HELDOUT_MODULUS


def test_held_out_share_is_a_tenth() -> None:
    # 10000 names: 1000 held out on average, deviation 30; six deviations
    assert abs(sum(is_held_out(f"name {i}") for i in range(10_000)) - 1000) < 180


@pytest.fixture
def small_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three packages of this Python's library, with files beside them that must not be read. (The whole takes half a minute to parse.)"""
    real, root = Path(sysconfig.get_paths()["stdlib"]), tmp_path / "Lib"
    for package in ("asyncio", "email", "json"):
        shutil.copytree(real / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, data in {"encodings/table.py": b"x = 1\n", "site-packages/other/mod.py": b"x = 1\n", "dist-packages/mod.py": b"x = 1\n",
                       "lib2to3/tests/data/py2.py": b"x = 1\n", "broken.py": b"print 'no'\n", "latin.py": b"# \xe9\n", "empty.py": b" \n",
                       "notes.txt": b"x = 1\n", "ast.py": b"y = 2\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.setattr("kilotok.train.data.sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


def test_parts_of_the_standard_library(small_stdlib: Path) -> None:
    parts: dict[str, dict[str, str]] = {}
    for part in ("all", "train", "heldout"):
        documents = list(read_source(Source(domain="code", stdlib=True, part=part)))   # type: ignore[arg-type]
        parts[part] = dict(documents)
        assert len(documents) == len(parts[part])
    assert parts["train"] and parts["heldout"]
    assert not parts["train"].keys() & parts["heldout"].keys()
    assert parts["train"] | parts["heldout"] == parts["all"]
    assert all(is_held_out(n) for n in parts["heldout"]) and not any(is_held_out(n) for n in parts["train"])
    on_disk = {p.relative_to(small_stdlib).as_posix(): p for d in ("asyncio", "email", "json") for p in (small_stdlib / d).rglob("*.py")}
    expected = {"ast.py": "y = 2\n"} | {n: p.read_text(encoding="utf-8") for n, p in on_disk.items()}
    assert parts["all"] == {n: t for n, t in expected.items() if t.strip()}
    assert all(ast.parse(t) for t in parts["all"].values())


def test_parts_of_rows_go_by_prompt(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": f"name {i}", "a": "x"} for i in range(50)])
    names = {part: [n for n, _ in read_source(source(path, prompt="q", response="a", part=part))] for part in ("all", "train", "heldout")}
    assert names["heldout"] == [f"name {i}" for i in range(50) if is_held_out(f"name {i}")] != []
    assert sorted(names["train"] + names["heldout"]) == sorted(names["all"]) and len(names["all"]) == 50


# --- documents to tokens ---

LAMP = {"name": "switch", "description": "Turn a lamp.", "parameters": {"type": "object", "properties": {
    "room": {"type": "string", "enum": ["hall", "den"]}, "on": {"type": "boolean"}}, "required": ["room", "on"]}}
TIMER = {"name": "timer", "description": "Start a timer.", "parameters": {"type": "object", "properties": {
    "minutes": {"type": "integer", "description": "Length"}}, "required": ["minutes"]}}
BELL = {"name": "bell", "description": "Ring.", "parameters": {"type": "object", "properties": {}}}


def test_a_turn_with_tools_is_the_chat_template_s_text(tmp_path: Path, tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "switch", "arguments": {"room": "hall", "on": true}}\n</tool_call>'
    rows = [{"q": "Light the hall.", "a": call, "t": [LAMP, TIMER]}, {"q": "Caf\u00e9?\n ", "a": "12 + 30 = 42", "t": None}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    text = tokenizer.decode(stream(token_rows(source(path, prompt="q", response="a", tools="t"), tokenizer=tokenizer, length=1)))
    assert text == (
        f"<|im_start|>system\nTools:\n{json.dumps(LAMP)}\n{json.dumps(TIMER)}\n<|im_end|>\n"
        f"<|im_start|>user\nLight the hall.<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n<|endoftext|>"
        "<|im_start|>user\nCaf\u00e9?\n <|im_end|>\n<|im_start|>assistant\n12 + 30 = 42<|im_end|>\n<|endoftext|>")
    assert text == "".join(tokenizer.apply_chat_template(
        [{"role": "user", "content": r["q"]}, {"role": "assistant", "content": r["a"]}], tools=r["t"], tokenize=False) + "<|endoftext|>" for r in rows)


def test_a_turn_without_an_answer_ends_where_the_assistant_starts(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": "Hello there."}])
    text = tokenizer.decode(stream(token_rows(source(path, prompt="q"), tokenizer=tokenizer, length=1)))
    assert text == "<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"


def test_plain_text_is_kept_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    texts = ["def f(x):\n\treturn x  # \u00fc\n", "\n two\r\n"]
    path = jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    assert tokenizer.decode(stream(token_rows(source(path, text="text"), tokenizer=tokenizer, length=1))) == "".join(t + "<|endoftext|>" for t in texts)


def test_rows_are_cut_from_one_stream(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"Row number {i} of the text."} for i in range(20)])
    whole = stream(token_rows(source(path, text="text"), tokenizer=tokenizer, length=1))
    rows = token_rows(source(path, text="text"), tokenizer=tokenizer, length=7)
    assert [r.tolist() for r in rows] == [whole[s:s + 8] for s in range(0, len(whole) - 7, 7)]
    assert all(r.dtype == torch.int64 for r in rows)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_nested_tool_schemas_gain_no_null_keys(tmp_path: Path, suffix: str) -> None:
    tools = [[LAMP, TIMER], [TIMER], [BELL], [], None]
    rows = [{"q": f"{i}", "t": t} for i, t in enumerate(tools)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    else:
        table = pyarrow.Table.from_pylist(rows)   # a column of one type: every row has the keys of all rows
        assert table.column("t").to_pylist()[1][0]["parameters"]["properties"]["room"] is None
        pyarrow.parquet.write_table(table, path)
    assert [d["tools"] for _, d in read_source(source(path, prompt="q", tools="t"))] == tools


@pytest.mark.parametrize(("one", "other"), [
    ({"name": "a", "parameters": {"x": {"type": "string", "description": "d"}}}, {"parameters": {"x": {"description": "d", "type": "string"}}, "name": "a"}),
    ({"name": "a", "default": 1}, {"name": "a", "default": 1.5}),
], ids=["order of keys", "integers"])
def test_tools_of_a_row_do_not_depend_on_other_rows(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": "1", "t": [one]}, {"q": "2", "t": [other]}])
    assert [json.dumps(d["tools"]) for _, d in read_source(source(path, prompt="q", tools="t"))] == [json.dumps([one]), json.dumps([other])]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    for text in ("first", "again"):   # same path, same size
        path = jsonl(tmp_path / "a.jsonl", [{"text": text}])
        assert list(read_source(source(path, text="text"))) == [(text, text)]


def test_a_folder_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "sub/a.py", "c.md", "d.jsonl"):
        (folder / name).write_text(f"in {name}")
    assert list(read_source(source(folder))) == [("b.txt", "in b.txt"), ("a.py", "in sub/a.py")]
    assert list(read_source(source(folder / "b.txt"))) == [("b.txt", "in b.txt")]


# --- what cannot be used ---

def refusal(kind: type[Exception], wanted: Source, tokenizer: Any) -> str:
    with pytest.raises(kind) as caught:
        token_rows(wanted, tokenizer=tokenizer, length=64)
    return str(caught.value)


def test_wrong_column_names_the_columns_there_are(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": "2"}])
    for wanted in (source(path, text="text"), source(path, prompt="q", response="text"), source(path, prompt="text"), source(path, prompt="q", tools="text")):
        assert refusal(ValueError, wanted, tokenizer) == f"data source 'd': no column 'text' in {path}; it has q, a."


def test_no_column(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"q": "1"}])
    assert refusal(ValueError, source(path), tokenizer) == \
        "data source 'd': name the column to read: text: COLUMN for plain text, prompt: COLUMN for a user's turn."


def test_missing_path(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "none.jsonl"
    assert refusal(FileNotFoundError, source(path, text="text"), tokenizer) == \
        f"data source 'd': nothing at {path}. Correct data.*.path, or give hub: NAME on a machine with a network."


def test_unknown_suffix(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.csv"
    path.touch()
    assert refusal(ValueError, source(path, text="text"), tokenizer) == \
        f"data source 'd': path must be .jsonl, .parquet, .txt, .py or a folder; got {path}."


def test_folder_without_text(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.md").write_text("x")
    assert refusal(ValueError, source(folder), tokenizer) == f"data source 'd': no .txt or .py file below {folder}."


def test_too_little_text_for_a_row(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "1234"}])   # a token a digit, and the end: a row of 4 needs 5
    assert len(token_rows(source(path, text="text"), tokenizer=tokenizer, length=4)) == 1
    with pytest.raises(ValueError) as caught:
        token_rows(source(path, text="text"), tokenizer=tokenizer, length=5)
    assert str(caught.value) == f"data source 'd': 5 tokens in {path} (all) are less than one row of 5. Lower data.sequence_length or add text."


@pytest.mark.parametrize(("name", "data", "fields"), [
    ("a.jsonl", b'{"text": "a"}\nnot json\n', {"text": "text"}),
    ("a.jsonl", b"", {"text": "text"}),
    ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', {"text": "text"}),
    ("a.jsonl", b'{"text": null}\n', {"text": "text", "part": "train"}),
    ("a.jsonl", b'{"text": 5}\n', {"text": "text"}),
    ("a.txt", b"caf\xe9", {}),
], ids=["not json", "empty file", "null", "null by part", "number", "not utf-8"])
def test_damaged_data_names_the_source(tmp_path: Path, tokenizer: Any, name: str, data: bytes, fields: dict[str, Any]) -> None:
    (tmp_path / name).write_bytes(data)
    assert "data source 'd'" in refusal(ValueError, source(tmp_path / name, **fields), tokenizer)


def test_no_source_at_all(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"^data: data.train and data.heldout need at least one source each"):
        TextData(DataConfig(heldout=[Source(domain="d", hub="h", text="t")]), tokenizer=tokenizer, seed=0, batch_size=1, accumulate=1, max_steps=1)


# --- the data module ---

STEPS, LENGTH = 5, 6


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Two training sources, and two held-out ones of one domain."""
    paths = [jsonl(tmp_path / f"{n}.jsonl", [{"text": f"{n} row {i}: {i * 37 % 101}, {i * 53 % 97}."} for i in range(30)]) for n in "ab"]
    return DataConfig(train=[Source(domain="a", path=paths[0], text="text", weight=3.0), Source(domain="b", path=paths[1], text="text")],
                      heldout=[Source(domain="h", path=p, text="text") for p in paths], sequence_length=LENGTH, heldout_rows=4)


def make_data(config: DataConfig, tokenizer: Any, *, batch_size: int = 2, accumulate: int = 2, seed: int = 1) -> TextData:
    return TextData(config, tokenizer=tokenizer, seed=seed, batch_size=batch_size, accumulate=accumulate, max_steps=STEPS)


def steps_of(data: TextData, *, done: int = 0, world: int = 1, rank: int = 0) -> list[list[list[int]]]:
    """[step][row] tokens that a rank reads when it starts with `done` steps behind it."""
    data.trainer = SimpleNamespace(strategy=None, global_step=done, world_size=world, global_rank=rank)   # type: ignore[assignment]
    loader = data.train_dataloader()
    assert len(loader) == STEPS * data.accumulate   # the whole run's, restarted or not: Lightning counts the batches before
    batches = [b.tolist() for b in loader]
    assert all(len(b) == data.batch_size and all(len(row) == LENGTH + 1 for row in b) for b in batches)
    n = data.accumulate
    return [[row for b in batches[i:i + n] for row in b] for i in range(0, len(batches), n)]


def test_rows_of_a_step_do_not_depend_on_where_a_run_restarted(config: DataConfig, tokenizer: Any) -> None:
    whole = steps_of(make_data(config, tokenizer))
    assert len(whole) == STEPS and all(len(rows) == 4 for rows in whole)
    assert len({json.dumps(s) for s in whole}) == STEPS   # the steps differ
    again = make_data(config, tokenizer)
    for done in range(STEPS + 1):
        assert steps_of(again, done=done) == whole[done:]


def test_rows_depend_on_the_seed(config: DataConfig, tokenizer: Any) -> None:
    assert steps_of(make_data(config, tokenizer, seed=1)) != steps_of(make_data(config, tokenizer, seed=2))


def test_ranks_share_the_rows_of_a_step(config: DataConfig, tokenizer: Any) -> None:
    """Two devices with a batch of 2 read, together, what one with a batch of 4 reads; so do two micro-batches for one."""
    data = make_data(config, tokenizer, batch_size=2, accumulate=1)
    first, second = (steps_of(data, world=2, rank=r, done=1) for r in (0, 1))
    assert all(a != b for a, b in zip(first, second, strict=True))
    one = steps_of(make_data(config, tokenizer, batch_size=4, accumulate=1), done=1)
    assert [a + b for a, b in zip(first, second, strict=True)] == one
    assert steps_of(make_data(config, tokenizer, batch_size=2, accumulate=2), done=1) == one


def test_heldout_rows_are_spread_over_all_text_of_a_domain(config: DataConfig, tokenizer: Any) -> None:
    rows = [r for s in config.heldout for r in token_rows(s, tokenizer=tokenizer, length=LENGTH)]
    heldout = make_data(config, tokenizer).heldout
    assert list(heldout) == ["h"]
    assert [r.tolist() for r in heldout["h"]] == [rows[i * len(rows) // 4].tolist() for i in range(4)]


def test_rows_are_picked_by_the_weights_of_the_recipe(config: DataConfig, tokenizer: Any) -> None:
    data = make_data(config, tokenizer, batch_size=20, accumulate=1, seed=9)
    num_rows = [len(rows) for rows in data.sources]
    picked = [pick_row(i, seed=9, weights=[3.0, 1.0], num_rows=num_rows) for i in range(20 * STEPS)]
    assert {s for s, _ in picked} == {0, 1}
    assert [row for rows in steps_of(data) for row in rows] == [data.sources[s][r].tolist() for s, r in picked]
