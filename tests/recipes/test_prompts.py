"""The prompts and held-out answers written for this project: format, no leak between them, and answers that are right."""

import ast
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
PROMPTS = sorted((RECIPES / "prompts").glob("*.jsonl"))
HELDOUT = sorted((RECIPES / "pocket" / "heldout").glob("*.jsonl"))
DOMAINS = ["agent", "chat", "code", "math"]

SUM = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ([-+x*/]) (\d+(?:\.\d+)?) = (\d+(?:\.\d+)?)(?![\d/])")
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
PYTHON_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def normalized(prompt: str) -> str:
    """Letters and digits only: two prompts that differ in spaces or stops are the same."""
    return re.sub(r"[^a-z0-9]+", " ", prompt.lower()).strip()


def stem(path: Path) -> str:
    return path.stem


def heldout(domain: str) -> list[dict[str, Any]]:
    return rows_of(RECIPES / "pocket" / "heldout" / f"{domain}.jsonl")


def test_there_is_a_file_for_each_domain() -> None:
    assert [p.stem for p in PROMPTS] == DOMAINS
    assert [p.stem for p in HELDOUT] == DOMAINS


@pytest.mark.parametrize("path", PROMPTS, ids=stem)
def test_prompt_rows(path: Path) -> None:
    rows = rows_of(path)
    assert len(rows) >= 40
    assert [r["id"] for r in rows] == [f"{path.stem}-{i:03d}" for i in range(1, len(rows) + 1)]
    keys = ["id", "domain", "prompt", *(["tools"] if path.stem == "agent" else [])]
    assert all(list(r) == keys and r["domain"] == path.stem and isinstance(r["prompt"], str) and r["prompt"].strip() for r in rows)


@pytest.mark.parametrize("path", HELDOUT, ids=stem)
def test_heldout_rows(path: Path) -> None:
    rows = rows_of(path)
    assert len(rows) >= 40
    assert [r["id"] for r in rows] == [f"heldout-{path.stem}-{i:03d}" for i in range(1, len(rows) + 1)]
    keys = ["id", "prompt", *(["tools"] if path.stem == "agent" else []), "response"]
    assert all(list(r) == keys and r["prompt"].strip() and r["response"] == r["response"].strip() != "" for r in rows)


@pytest.mark.parametrize("path", [*PROMPTS, *HELDOUT], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_files_are_ascii_once_decoded(path: Path) -> None:
    assert path.read_bytes().isascii() and path.read_bytes().endswith(b"}\n")
    escaped = [r["id"] for r in rows_of(path) if not json.dumps(r, ensure_ascii=False).isascii()]
    assert escaped == [], "JSON escapes such as \\u00e9 hide characters that are not ASCII"


def test_no_prompt_occurs_twice_nor_is_held_out() -> None:
    """Over all files: the training prompts are text the model is trained on, the held-out ones are not."""
    ids: dict[str, list[str]] = {}
    for path in (*PROMPTS, *HELDOUT):
        for row in rows_of(path):
            ids.setdefault(normalized(row["prompt"]), []).append(row["id"])
    assert [same for same in ids.values() if len(same) > 1] == []


def test_no_training_prompt_holds_a_held_out_one() -> None:
    training = "\n".join(normalized(r["prompt"]) for p in PROMPTS for r in rows_of(p))
    found = [r["id"] for p in HELDOUT for r in rows_of(p) if normalized(r["prompt"]) in training or normalized(r["response"]) in training]
    assert found == []


def schema_faults(schema: Any, where: str) -> Iterator[str]:
    """What is not JSON schema, of the part of it that tools use."""
    if not isinstance(schema, dict) or schema.get("type") not in PYTHON_TYPES:
        yield f"{where}: must be a dict with a known type; got {schema!r}"
        return
    allowed = {"type", "description", "enum"} | {"object": {"properties", "required"}, "array": {"items"}}.get(schema["type"], set())
    if schema.keys() - allowed:
        yield f"{where}: unknown keys {sorted(schema.keys() - allowed)}"
    if not isinstance(schema.get("description", ""), str):
        yield f"{where}: description must be text"
    if "enum" in schema and (not schema["enum"] or any(not isinstance(e, PYTHON_TYPES[schema["type"]]) for e in schema["enum"])):
        yield f"{where}: enum must hold values of type {schema['type']}; got {schema['enum']!r}"
    if schema["type"] == "object":
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict):
            yield f"{where}: properties must be a dict; got {properties!r}"
            return
        if len(set(required)) != len(required) or set(required) - set(properties):
            yield f"{where}: required must be names of properties, each once; got {required!r}"
        for name, inner in properties.items():
            yield from schema_faults(inner, f"{where}.{name}")
    if schema["type"] == "array":
        yield from schema_faults(schema.get("items"), f"{where}[]")


def value_faults(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Where a value does not fit its schema."""
    kind = schema["type"]
    if not isinstance(value, PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{where}: must be {kind}; got {value!r}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where}: must be one of {schema['enum']}; got {value!r}"
    elif kind == "array":
        for i, item in enumerate(value):
            yield from value_faults(item, schema["items"], f"{where}[{i}]")
    elif kind == "object":
        for name in schema.get("required", []):
            if name not in value:
                yield f"{where}: lacks {name}"
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from value_faults(inner, schema["properties"][name], f"{where}.{name}")
            else:
                yield f"{where}: has no {name}"


def tool_faults(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the tools of a row."""
    names = [t.get("name") for t in row["tools"]]
    if not 1 <= len(names) <= 3 or len(set(names)) != len(names):
        yield f"{row['id']}: needs one to three tools of different names; got {names}"
    for tool in row["tools"]:
        if list(tool) != ["name", "description", "parameters"] or not re.fullmatch(r"[a-z][a-z0-9_]*", tool["name"]) or not tool["description"].endswith("."):
            yield f"{row['id']}: {tool!r}"
        elif tool["parameters"].get("type") != "object":
            yield f"{row['id']} {tool['name']}: parameters must be of type object"
        else:
            yield from schema_faults(tool["parameters"], f"{row['id']} {tool['name']}")


def test_faults_are_seen() -> None:
    lamp = {"name": "switch", "description": "Turn a lamp.", "parameters": {"type": "object", "properties": {
        "room": {"type": "string", "enum": ["hall"]}, "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["room"]}}
    assert list(tool_faults({"id": "x", "tools": [lamp]})) == []
    assert list(tool_faults({"id": "x", "tools": [lamp, lamp]})) == ["x: needs one to three tools of different names; got ['switch', 'switch']"]
    schema = lamp["parameters"]
    assert list(value_faults({"room": "hall", "days": [1]}, schema, "f")) == []
    assert list(value_faults({"days": [1, "2", True], "moon": 1}, schema, "f")) == [
        "f: lacks room", "f.days[1]: must be integer; got '2'", "f.days[2]: must be integer; got True", "f: has no moon"]
    assert list(value_faults({"room": "attic"}, schema, "f")) == ["f.room: must be one of ['hall']; got 'attic'"]
    broken = {"type": "object", "properties": {"a": {"type": "text"}, "b": {"type": "string", "enum": [1], "default": ""}}, "required": ["c"]}
    assert list(schema_faults(broken, "t")) == [
        "t: required must be names of properties, each once; got ['c']", "t.a: must be a dict with a known type; got {'type': 'text'}",
        "t.b: unknown keys ['default']", "t.b: enum must hold values of type string; got [1]"]


@pytest.mark.parametrize("path", [p for p in (*PROMPTS, *HELDOUT) if p.stem == "agent"], ids=lambda p: p.parent.name)
def test_tools_are_json_schemas(path: Path) -> None:
    assert [fault for row in rows_of(path) for fault in tool_faults(row)] == []


@pytest.mark.parametrize("row", heldout("agent"), ids=lambda r: r["id"])
def test_heldout_calls_fit_their_tools(row: dict[str, Any]) -> None:
    tools = {t["name"]: t["parameters"] for t in row["tools"]}
    calls = [json.loads(c) for c in CALL.findall(row["response"])]
    assert calls and "\n".join(f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls) == row["response"]   # nothing beside them
    for call in calls:
        assert list(call) == ["name", "arguments"] and call["name"] in tools
        assert list(value_faults(call["arguments"], tools[call["name"]], call["name"])) == []


@pytest.mark.parametrize("row", heldout("math"), ids=lambda r: r["id"])
def test_heldout_sums_are_true(row: dict[str, Any]) -> None:
    *steps, last = row["response"].split("\n")
    sums = [m for step in steps for m in SUM.findall(step)]
    assert sums and sum(step.count("=") for step in steps) == len(sums), "an equation of another form than `a op b = c`"
    for left, sign, right, result in sums:
        a, b = Fraction(left), Fraction(right)
        value = {"+": a + b, "-": a - b, "x": a * b, "*": a * b}[sign] if sign != "/" else a / b
        assert value == Fraction(result), f"{left} {sign} {right} = {result}"
    assert last == f"#### {sums[-1][3]}"


@pytest.mark.parametrize("row", heldout("code"), ids=lambda r: r["id"])
def test_heldout_code_compiles_and_defines_what_was_asked(row: dict[str, Any]) -> None:
    compile(row["response"], row["id"], "exec")
    defined = [n.name for n in ast.parse(row["response"]).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert defined and any(re.search(rf"\b{name}\b", row["prompt"], re.IGNORECASE) for name in defined)   # "a stack class" is Stack
