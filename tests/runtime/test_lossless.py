"""Drafting is invisible in the text: whatever the drafter proposes, greedy and seeded, on prompts of four domains."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import POCKET, ROOT
from torch import Tensor

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Drafter, Round, TargetStep, generate
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.quant.archs import load_model, load_tokenizer
from kilotok.quant.checkpoint import export_run, sha256_of_weights
from kilotok.runtime.reference import ReferenceExecutor, ReferenceSequence
from kilotok.runtime.weights import load_executor

DOMAINS = ("code", "math", "chat", "agent")
PER_DOMAIN = 13
MAX_TOKENS = 32
NUM_DRAFTS = 7
TAPS = (1, 3, 5)
MODES = ("greedy", "seeded")


def sampling_of(mode: str, number: int) -> Sampling:
    return Sampling() if mode == "greedy" else Sampling(temperature=0.8, top_p=0.95, seed=number)


@dataclass
class Prompt:
    """A prompt that was read once: a decoding that starts from it rewinds the sequence, whose cache holds the others' leavings."""

    domain: str
    ids: tuple[int, ...]
    sequence: ReferenceSequence
    step: TargetStep     # of reading `ids`


class Resumed:
    """A Target that gives the stored step for the prompt and then goes on with the sequence."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.max_length, self._begun = prompt, prompt.sequence.max_length, False

    @property
    def length(self) -> int:
        return self.prompt.sequence.length if self._begun else 0

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        if self._begun:
            return self.prompt.sequence.read(ids, last_logits_only=last_logits_only)
        assert tuple(ids) == self.prompt.ids and last_logits_only
        self._begun = True
        self.prompt.sequence.rewind(len(ids))
        return self.prompt.step

    def rewind(self, length: int) -> None:
        self.prompt.sequence.rewind(length)


class Oracle:
    """Knows the text; `right(position)` says how many proposals after an anchor there are the text's, the next is none of it."""

    num_drafts = NUM_DRAFTS

    def __init__(self, prompt: Prompt, text: Sequence[int], *, right: Callable[[int], int]) -> None:
        self.text, self.right, self.prompt_length = text, right, len(prompt.ids)
        self.position = 0

    def observe(self, features_TF: Tensor) -> None:
        self.position += features_TF.shape[0]

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        done = self.position - self.prompt_length + 1   # tokens of the text up to the anchor
        right = self.right(self.position)
        assert self.text[done - 1] == anchor
        following = self.text[done:done + count]
        return [t if i < right else (t + 1 + i) % 4096 for i, t in enumerate(following)]


def write_run(directory: Path, parent: Path) -> Path:
    """A finished run whose trained experts are the parent's."""
    experts = {f"student.{n}": w.detach() for n, w in load_model(parent, dtype=torch.float32).named_parameters() if ".mlp.experts." in n}
    (directory / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": experts}, directory / "checkpoints" / "step-00000001.ckpt")
    meta = {"kind": "qat", "status": "complete", "max_steps": 1, "parent": {"path": str(parent), "sha256": sha256_of_weights(parent)}, "versions": {},
            "quant": {"format": "mxfp4", "scale_mode": "even", "source_dtype": "bfloat16", "trainable": "experts"}}
    (directory / "meta.json").write_text(json.dumps(meta))
    return directory


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ReferenceExecutor:
    """On the pocket, exported."""
    root = tmp_path_factory.mktemp("pocket")
    export_run(write_run(root / "run", POCKET), root / "out")
    return load_executor(root / "out", device="cpu", dtype=torch.float32, taps=TAPS)


@pytest.fixture(scope="session")
def random_draft(executor: ReferenceExecutor) -> DraftModel:
    """Untrained, so hardly ever right; what it proposes depends on the features."""
    g = executor.graph
    config = DraftConfig(hidden_size=g.hidden_size, intermediate_size=128, num_hidden_layers=2, num_attention_heads=g.num_heads, num_key_value_heads=g.num_kv_heads,
                         head_dim=g.head_dim, vocab_size=g.vocab_size, target_layer_ids=TAPS, num_target_layers=g.num_layers, mask_token_id=3, sliding_window=64)
    draft = DraftModel(config).eval()
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=executor.weights.norm)
    return draft


@pytest.fixture(scope="session")
def prompts(executor: ReferenceExecutor) -> list[Prompt]:
    """The shortest of each domain: code as a text to continue, the rest as a chat's first turn."""
    tokenizer = load_tokenizer(POCKET)
    found = []
    for domain in DOMAINS:
        texts = []
        for line in (ROOT / "recipes" / "prompts" / f"{domain}.jsonl").read_text().splitlines():
            row = json.loads(line)
            tools = [{"type": "function", "function": t} for t in row.get("tools") or []] or None
            turn = [{"role": "user", "content": row["prompt"]}]
            texts.append(row["prompt"] if domain == "code" else tokenizer.apply_chat_template(turn, tools=tools, tokenize=False, add_generation_prompt=True))
        encoded = sorted((tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts), key=len)
        for ids in encoded[:PER_DOMAIN]:
            sequence = executor.open()
            found.append(Prompt(domain=domain, ids=ids, sequence=sequence, step=sequence.read(ids, last_logits_only=True)))
    return found


def decode(prompt: Prompt, *, drafter: Drafter | None, sampling: Sampling, eos_ids: frozenset[int] = frozenset()) -> list[Round]:
    return list(generate(Resumed(prompt), prompt=prompt.ids, drafter=drafter, sampling=sampling, max_tokens=MAX_TOKENS, eos_ids=eos_ids))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [t for r in rounds for t in r.tokens]


@pytest.fixture(scope="session")
def plain(prompts: list[Prompt]) -> dict[tuple[str, int], list[int]]:
    """The text of every prompt without a draft, by mode and number."""
    return {(mode, n): tokens_of(decode(p, drafter=None, sampling=sampling_of(mode, n))) for mode in MODES for n, p in enumerate(prompts)}


class Stand:
    """What a drafter is made from."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["wrong", "right", "sometimes", "random"])
def test_tmp(name: str, mode: str, executor: Any, prompts: Any, plain: Any, random_draft: Any) -> None:
    n = acc = 0
    R = {"wrong": lambda p: 0, "right": lambda p: 7, "sometimes": lambda p: p * 5 % 8}
    for i, p in enumerate(prompts):
        text = plain[mode, i]
        d = DFlashDrafter(random_draft, embedding_VD=executor.embedding_VD, head_VD=executor.head_VD) if name == "random" else Oracle(p, text, right=R[name])
        r = decode(p, drafter=d, sampling=sampling_of(mode, i))
        assert tokens_of(r) == text and len(text) == 32
        n += len(r) - 1
        acc += 31
    print("ACC", name, mode, acc / n)
