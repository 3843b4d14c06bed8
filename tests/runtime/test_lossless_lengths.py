"""Drafting is invisible in the text whatever is drafted, as chain or tree, at fixed and adaptive lengths: few short prompts through the engine.

The claim in full, 100 prompts of 128 tokens on any executor, is tests/benchmarks/bench_lossless.py.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import POCKET, ROOT, export_experts
from lossless_cases import DRAFTERS, SAMPLINGS, SHAPES, drafter_factory, how_to_draft, requests_for, run_all
from step_models import TINY, twin_executor

from kilotok.dflash.checkpoint import read_draft
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Drafter
from kilotok.dflash.model import DraftModel
from kilotok.quant.archs import load_tokenizer
from kilotok.runtime.pacing import AUTO, DraftLength
from kilotok.runtime.reference import ReferenceExecutor
from kilotok.runtime.weights import load_executor

pytestmark = pytest.mark.xdist_group("lossless_lengths")
TAPS = (2, 4, 5)     # those of the shipped draft
SIZE = (4, 16)       # prompts and tokens of each


def pocket_prompts(count: int) -> list[tuple[int, ...]]:
    """The shortest of four domains, in turns."""
    tokenizer = load_tokenizer(POCKET)
    of_domain = []
    for domain in ("code", "math", "chat", "agent"):
        rows = [json.loads(line)["prompt"] for line in (ROOT / "recipes" / "prompts" / f"{domain}.jsonl").read_text().splitlines()]
        of_domain.append(sorted((tuple(tokenizer(row, add_special_tokens=False)["input_ids"]) for row in rows), key=len))
    return [ids for together in zip(*of_domain, strict=False) for ids in together][:count]


@dataclass(frozen=True, eq=False)
class Pocket:
    """The pocket on the reference executor, and its draft heads."""

    executor: ReferenceExecutor
    heads: dict[str, Callable[[], Drafter]]

    @functools.cache
    def plain(self, sampling: str, prompts: int, tokens: int) -> list[list[int]]:
        return run_all(self.executor, requests_for(pocket_prompts(prompts), sampling=sampling, max_tokens=tokens), make_drafter=None, max_running=4)[0]


@pytest.fixture(scope="module")
def pocket_model(tmp_path_factory: pytest.TempPathFactory) -> Pocket:
    executor = load_executor(export_experts(POCKET, tmp_path_factory.mktemp("pocket") / "out"), device="cpu", dtype=torch.float32, taps=TAPS)
    g = executor.graph
    config = DraftConfig(hidden_size=g.hidden_size, intermediate_size=128, num_hidden_layers=2, num_attention_heads=g.num_heads,
                         num_key_value_heads=g.num_kv_heads, head_dim=g.head_dim, vocab_size=g.vocab_size, target_layer_ids=TAPS,
                         num_target_layers=g.num_layers, mask_token_id=3, sliding_window=64)
    random = DraftModel(config).eval()
    random.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=executor.weights.norm)
    trained = read_draft(ROOT / "recipes" / "pocket" / "draft", dtype=torch.float32)

    def head(model: DraftModel) -> Callable[[], Drafter]:
        return lambda: DFlashDrafter(model, embedding_VD=executor.embedding_VD, head_VD=executor.head_VD)

    return Pocket(executor, {"trained": head(trained), "random": head(random)})


# the full length: test_lossless.py and test_tree_lossless.py; every pair: tests/benchmarks/bench_lossless.py
@pytest.mark.parametrize(("sampling", "length"), [("greedy", 3), ("sampled", AUTO)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_the_one_without_a_draft(drafter: str, shape: str, length: DraftLength, sampling: str, pocket_model: Pocket) -> None:
    num_prompts, max_tokens = SIZE
    prompts, texts = pocket_prompts(num_prompts), pocket_model.plain(sampling, *SIZE)
    make = drafter_factory(drafter, prompts=prompts, texts=texts, vocab_size=4096, heads=pocket_model.heads)
    asked = requests_for(prompts, sampling=sampling, max_tokens=max_tokens, **how_to_draft(shape, length))
    got, rounds, state = run_all(pocket_model.executor, asked, make_drafter=make, max_running=num_prompts)
    assert got == texts
    drafted = [r for of_text in rounds for r in of_text if r.num_drafted]
    assert state.rounds_drafted >= len(drafted) > 0   # something was drafted, so that the claim is one
    if drafter == "right":
        assert any(r.num_accepted for r in drafted)
    if drafter == "wrong":
        assert not any(r.num_accepted for r in drafted)
    if length == 3:
        assert max(r.max_accepted for r in drafted) == 3


@pytest.mark.parametrize("drafter", ["wrong", "right"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_that_share_steps_have_the_text_they_have_alone_at_adaptive_lengths(shape: str, drafter: str) -> None:
    """On the twin of the persistent step, five requests together; where drafts are wrong, drafting is switched off on the way."""
    vocab_size = TINY.vocab_size
    prompts = [tuple(torch.randint(vocab_size, (3 + 4 * n,), generator=torch.Generator().manual_seed(n)).tolist()) for n in range(5)]
    for sampling in SAMPLINGS:
        texts, _, _ = run_all(twin_executor(num_columns=64)[0], requests_for(prompts, sampling=sampling, max_tokens=24), make_drafter=None, max_running=5)
        asked: list[Any] = requests_for(prompts, sampling=sampling, max_tokens=24, **how_to_draft(shape, AUTO))
        make = drafter_factory(drafter, prompts=prompts, texts=texts, vocab_size=vocab_size, heads={})
        got, _, state = run_all(twin_executor(num_columns=64)[0], asked, make_drafter=make, max_running=5)
        assert got == texts and state.rounds_drafted > 10
        assert any(together > 1 for _, together in state.costs_s)
        if drafter == "wrong" and shape == "chain":
            assert not state.gates["all", False].is_open and state.switched_off == 1
