"""The pocket's corpus: documents by domain, the held-out rule, the tokenizer, and token files.

A document is (name, text). Its name decides whether it is held out: sha256(name) % modulus == 0, where the name of a
standard-library module is its path below Lib/ and the name of a dataset row is its prompt. Held-out documents never
reach the tokenizer's training or the model's. Only text that people wrote or that is a reference answer is used: no
assistant turn that another model wrote. The rule is that of train/data.py, written again because the machine that trains the
pocket need not have `datasets` or Lightning; a test holds heldout.json against it.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
# <|mask|> is never in the text: it is the slot a block-diffusion draft head fills.
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, MASK]
TOOL_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# ChatML turns. Tools come as one JSON object a line in a system turn; calls and results between tags.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:
{% for tool in tools %}{{ (tool.function if tool.function is defined else tool) | tojson }}
{% endfor %}<|im_end|>
{% elif messages and messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if not loop.first or message.content else '' }}<tool_call>
{{ {'name': (call.function or call).name, 'arguments': (call.function or call).arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def is_held_out(name: str, *, modulus: int) -> bool:
    """The rule that keeps a document out of training: sha256 of its name, as an integer, divisible by `modulus`."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % modulus == 0


def _turns(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": c.strip()} for i, c in enumerate(contents)]


def _is_mostly_ascii(text: str) -> bool:
    return sum(ord(c) < 128 for c in text) > 0.98 * len(text)


def _bfcl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """A request, its tools and the reference call: the first accepted value of each argument."""
    answers = {}
    for line in path.with_suffix(".answer.jsonl").read_text().rstrip("\n").split("\n"):
        row = json.loads(line)
        answers[row["id"]] = row["ground_truth"]
    for line in path.read_text().rstrip("\n").split("\n"):
        row = json.loads(line)
        prompt = row["question"][0][0]["content"]
        calls = []
        for truth in answers[row["id"]]:
            (function, arguments), = truth.items()
            chosen = {key: values[0] for key, values in arguments.items() if "" not in values}
            calls.append({"name": function, "arguments": chosen})
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "", "tool_calls": calls}]
        yield prompt, {"messages": messages, "tools": row["function"]}


def _jsonl_rows(kind: str, path: Path) -> Iterator[tuple[str, Any]]:
    for line in path.read_text().rstrip("\n").split("\n"):
        row = json.loads(line)
        if kind == "gsm8k":   # the calculator marks <<48/2=24>> are notes for a tool, not working
            yield row["question"], _turns(row["question"], re.sub(r"<<[^>]*>>", "", row["answer"]))
        elif kind == "svamp":
            question = f"{row['Body'].rstrip('.')}. {row['Question']}"
            expression = " ".join(re.sub(r"\.0\b", "", row["Equation"]).split())
            if expression.startswith("( ") and expression.endswith(" )"):
                expression = expression[2:-2]
            yield question, _turns(question, f"{expression} = {row['Answer']:g}\n#### {row['Answer']:g}")
        elif kind == "mbpp":
            code = row["code"].replace("\r\n", "\n").replace("\t", "    ")
            yield row["text"], _turns(row["text"] + "\n" + row["test_list"][0], code)
        elif kind == "quixbugs":
            prompt = f"Fix the bug in this function.\n\n{row['buggy_program']}"
            yield row["name"], _turns(prompt, row["solution"])
        elif kind == "oasst":
            if _is_mostly_ascii(row["prompt"] + row["completion"]):
                yield row["prompt"], _turns(row["prompt"], row["completion"])
        elif kind == "self_instruct":
            for instance in row["instances"]:
                prompt = f"{row['instruction']}\n{instance['input']}"
                yield row["instruction"], _turns(prompt, instance["output"])
        elif kind == "turns":   # real user turns without an answer
            text = "\n".join(row["turns"])
            if _is_mostly_ascii(text):
                yield row["turns"][0], _turns(text)
        else:
            raise ValueError(f"corpus: unknown source kind {kind!r}; add it to _jsonl_rows")


def stdlib_modules(root: Path, *, exclude: list[str]) -> Iterator[tuple[str, str]]:
    """(path below Lib/, source) of every module that parses, in name order; installed packages are left out."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/")) or any(name.startswith(e) for e in exclude):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue   # test fixtures that are broken on purpose
        if source.strip():
            yield name, source


def documents(source: dict[str, Any], *, stdlib: Path, data_root: Path | None) -> Iterator[tuple[str, Any]]:
    """(name, text | turns) of one source of the recipe."""
    if source["kind"] == "stdlib":
        yield from stdlib_modules(stdlib, exclude=source["exclude"])
        return
    if data_root is None:
        raise ValueError(f"corpus: {source['path']} needs --data_root DIR, the folder that holds it")
    path = data_root / source["path"]
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found. Take it from {source['upstream']}")
    yield from _bfcl_rows(path) if source["kind"] == "bfcl" else _jsonl_rows(source["kind"], path)


def train_tokenizer(texts: list[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; every digit is its own token, because that is what makes small models add."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_TAGS), special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_TAGS])
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, mask_token=MASK,
        extra_special_tokens=[TURN_START], model_max_length=max_length, chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False)


def render(tokenizer: PreTrainedTokenizerFast, document: Any) -> str:
    """The text of a document as the model sees it, without the end mark."""
    if isinstance(document, str):
        return document
    messages, tools = (document["messages"], document["tools"]) if isinstance(document, dict) else (document, None)
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def build(recipe: dict[str, Any], *, stdlib: Path, data_root: Path | None, out: Path) -> None:
    """Write tokenizer/, heldout.json, corpus.json and tokens_{train,heldout}_<domain>.npy (uint16) under `out`."""
    by_domain: dict[str, dict[str, list[Any]]] = {}
    held_out_names: dict[str, list[Any]] = {}
    counts: dict[str, Any] = {}
    for domain, group in recipe["corpus"].items():
        split: dict[str, list[Any]] = {"train": [], "heldout": []}
        for source in group["sources"]:
            label = source.get("path", "stdlib")
            modulus = source.get("heldout_modulus", recipe["holdout_modulus"])
            for row, (name, document) in enumerate(documents(source, stdlib=stdlib, data_root=data_root)):
                held_out = is_held_out(name, modulus=modulus)
                split["heldout" if held_out else "train"].append(document)
                if held_out:
                    held_out_names.setdefault(label, []).append(name if label == "stdlib" else row)
        by_domain[domain] = split
    # A plain stand-in with the same template renders the turns before the tokenizer exists.
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    rng = np.random.default_rng(recipe["seed"])
    sample: list[str] = []
    for domain, split in by_domain.items():
        budget = int(8_000_000 * recipe["tokenizer"]["mix"][domain])   # characters
        for index in rng.permutation(len(split["train"])):
            text = render(plain, split["train"][index])
            sample += [piece for piece in re.split(r"<\|im_\w+\|>", text)]
            budget -= len(text)
            if budget < 0:
                break
    max_length = recipe["model"]["max_position_embeddings"]
    tokenizer = train_tokenizer(sample, vocab_size=recipe["tokenizer"]["vocab_size"], max_length=max_length)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out / "tokenizer")
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    for domain, split in by_domain.items():
        counts[domain] = {}
        for part, docs in split.items():
            texts = [render(tokenizer, d) for d in docs]
            ids = [i for t in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in (*t, end)]
            np.save(out / f"tokens_{part}_{domain}.npy", np.asarray(ids, dtype=np.uint16))
            counts[domain][part] = {"documents": len(docs), "bytes": sum(len(t.encode()) for t in texts),
                                    "tokens": len(ids)}
    (out / "heldout.json").write_text(json.dumps(held_out_names, indent=0) + "\n")
    (out / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n")
