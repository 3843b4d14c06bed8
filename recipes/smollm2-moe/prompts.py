"""The prompts that the draft of SmolLM2-MoE is distilled on and measured on, out of the public files that README.md names.

    python recipes/smollm2-moe/prompts.py --data data --out data/prompts

Writes OUT/{code,math,chat,agent}.jsonl and OUT/heldout/{the same}.jsonl, rows {id, prompt}, each prompt once. Evaluation files (HumanEval, the tests of MBPP
and GSM8K, MT-Bench) are held out whole; of the others the rows with sha256(prompt) % 10 == 0. No answers are written: the target gives its own.
Prompts of other scripts are left out, as SmolLM2 writes English. Functions that an agent may call are written into the turn, because SmolLM2's chat
template has no place for them. Code also takes signatures and docstrings of the standard library of the Python that runs.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 1500   # characters; longer turns would leave little room for an answer
HELDOUT_FILES = {"humaneval/humaneval.jsonl", "mbpp/test.jsonl", "gsm8k/test.jsonl", "mt_bench/question.jsonl"}
CALLS = 'Answer with the call or calls to make, as JSON: {"name": ..., "arguments": {...}}. You can call these functions:\n\n'


def code_prompt(row: dict[str, Any]) -> str:
    test = row["test_list"][0]
    return f"{row.get('text') or row['prompt']}\nYour code should pass this test:\n\n{test}"


def completion_prompt(head: str) -> str:
    return f"Complete this Python function.\n\n```python\n{head.rstrip()}\n```"


def stdlib_prompts() -> Iterator[tuple[str, str]]:
    """(id, prompt) of every documented function of the standard library that takes an argument."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("**/*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in ("site-packages", "test", "idlelib", "lib2to3")):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue   # the library has files that are wrong on purpose
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.args.args and len(text := ast.get_docstring(node) or "") >= 40:
                head = f"def {node.name}({ast.unparse(node.args)}):\n    \"\"\"" + text.replace("\n", "\n    ") + '\n    """'
                yield f"{name}:{node.name}", completion_prompt(head)


def agent_prompt(row: dict[str, Any]) -> str:
    functions = "\n".join(json.dumps(f) for f in row["function"])
    question = row["question"][0]
    return f"{CALLS}{functions}\n\n{question[-1]['content'] if isinstance(question, list) else question}"


# domain -> (file, how a row becomes a prompt)
FILES: dict[str, list[tuple[str, Any]]] = {
    "code": [("mbpp/train.jsonl", code_prompt), ("mbpp/test.jsonl", code_prompt),
             ("humaneval/humaneval.jsonl", lambda r: completion_prompt(r["prompt"]))],
    "math": [("gsm8k/train.jsonl", lambda r: r["question"]), ("gsm8k/test.jsonl", lambda r: r["question"]),
             ("svamp/svamp.jsonl", lambda r: f"{r['Body'].rstrip('. ')}. {r['Question']}")],
    "chat": [("self_instruct/seed_tasks.jsonl", lambda r: f"{r['instruction']}\n\n{r['instances'][0]['input']}".strip()),
             ("oasst/oasst_filtered.jsonl", lambda r: r["prompt"]), ("arena_hard_v2/prompts.jsonl", lambda r: r["turns"][0]),
             ("mt_bench/question.jsonl", lambda r: r["turns"][0])],
    "agent": [(f"bfcl/{name}.jsonl", agent_prompt) for name in ("simple_python", "multiple", "parallel", "irrelevance")],
}


def prompts(file: str, make: Any, *, root: Path) -> Iterator[tuple[str, str]]:
    """(id, prompt) of a file's rows that are short enough."""
    with (root / file).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        prompt = make(row).strip()
        if 0 < len(prompt) <= LONGEST and sum(c.isascii() for c in prompt) >= 0.95 * len(prompt):
            yield f"{file.rsplit('/', 1)[-1].removesuffix('.jsonl')}-{number}", prompt


def is_held_out(file: str, prompt: str) -> bool:
    return file in HELDOUT_FILES or int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 10 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of README.md")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    (args.out / "heldout").mkdir(parents=True, exist_ok=True)
    for domain, files in FILES.items():
        seen: set[str] = set()
        parts: dict[bool, list[dict[str, str]]] = {False: [], True: []}
        sources = [(file, prompts(file, make, root=args.data)) for file, make in files]
        if domain == "code":
            sources.append(("stdlib", ((name, p) for name, p in stdlib_prompts() if len(p) <= LONGEST)))
        for file, found in sources:
            for name, prompt in found:
                if prompt not in seen:
                    seen.add(prompt)
                    parts[is_held_out(file, prompt)].append({"id": name, "prompt": prompt})
        for held_out, rows in parts.items():
            path = (args.out / "heldout" if held_out else args.out) / f"{domain}.jsonl"
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
