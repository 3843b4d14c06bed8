"""Perplexity and KL against a direct computation in float64."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kilotok.quant.archs import load_tokenizer
from kilotok.runtime.validate.prompts import Prompt
from kilotok.runtime.validate.quality import Sums, add, measure_text, measure_texts, render

VOCABULARY = 11


def model(seed: int) -> "TableModel":
    return TableModel(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3)


class TableModel:
    """Logits of the next token from a table by the last one; remembers what it was given."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.calls = table, list[list[int]]()

    def __call__(self, ids: Sequence[int]) -> Tensor:
        self.calls.append(list(ids))
        return self.table[torch.tensor(ids)]


def direct(ids: Sequence[int], table: Tensor, parent: Tensor) -> tuple[float, float, float]:
    """Sums of -log q, -log p and KL(p || q), token by token with math.exp and math.log."""
    ce = parent_ce = kl = 0.0
    for x, y in itertools.pairwise(ids):
        q, p = ([math.exp(v) for v in t[x].tolist()] for t in (table, parent))
        q, p = [v / math.fsum(q) for v in q], [v / math.fsum(p) for v in p]
        ce -= math.log(q[y])
        parent_ce -= math.log(p[y])
        kl += math.fsum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
    return ce, parent_ce, kl


@pytest.mark.parametrize("length", [2, 64, 65, 66, 200])   # around the 64 rows taken at once
def test_sums_are_those_of_a_direct_computation(length: int) -> None:
    ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    target, parent = model(1), model(2)
    sums = measure_text(ids, target=target, parent=parent)
    expected = direct(ids, target.table, parent.table)
    assert sums.tokens == length - 1
    assert (sums.cross_entropy, sums.parent_cross_entropy, sums.kl) == pytest.approx(expected, rel=1e-12)
    assert measure_text(ids, target=target, parent=None) == Sums(tokens=length - 1, cross_entropy=sums.cross_entropy)


def test_a_model_against_itself_has_no_divergence() -> None:
    sums = measure_text([1, 2, 3, 4], target=model(1), parent=model(1))
    assert sums.kl == 0.0 and sums.cross_entropy == sums.parent_cross_entropy


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least two tokens are needed, one to predict; got 1"):
        measure_text([1], target=model(1), parent=None)
    with pytest.raises(ValueError, match=r"one vocabulary; got logits \(2, 4\) and \(2, 11\)"):
        measure_text([1, 2, 3], target=model(1), parent=TableModel(torch.zeros(VOCABULARY, 4)))


def test_json_of_sums() -> None:
    sums = add([Sums(tokens=3, cross_entropy=3 * math.log(2), parent_cross_entropy=0.0, kl=0.5),
                Sums(tokens=1, cross_entropy=math.log(2), parent_cross_entropy=4.0, kl=1.5)])
    assert sums.to_json() == pytest.approx({"tokens": 4, "perplexity": 2.0, "parent_perplexity": math.e, "kl": 0.5})
    assert add([Sums(tokens=2, cross_entropy=0.0)]).to_json() == {"tokens": 2, "perplexity": 1.0}
    assert sums.is_finite and not Sums(tokens=1, cross_entropy=math.nan).is_finite


def test_a_domain_stops_at_its_budget() -> None:
    target = model(1)
    texts = [("code", [1, 2, 3, 4]), ("math", [5, 6]), ("code", [5, 6, 7, 8]), ("code", [1, 2]), ("math", [7])]
    sums = measure_texts(texts, target=target, parent=None, max_tokens=5)
    assert {d: s.tokens for d, s in sums.items()} == {"code": 5, "math": 1}
    assert target.calls == [[1, 2, 3], [5], [5, 6]]   # the second code text is cut, the third is not read
    parts = [measure_text(ids, target=target, parent=None) for ids in ([1, 2, 3, 4], [5, 6, 7])]
    assert sums["code"].cross_entropy == pytest.approx(sum(p.cross_entropy for p in parts), rel=1e-15)


def test_texts_are_what_the_model_sees(pocket: Path) -> None:
    tokenizer = load_tokenizer(pocket)
    tool = {"type": "function", "function": {"name": "tide", "description": "d", "parameters": {}}}
    prompts = [Prompt(id="1", domain="code", prompt="def f(a):", reference="\n    return a"), Prompt(id="2", domain="code", prompt="no reference"),
               Prompt(id="3", domain="agent", messages=({"role": "user", "content": "When is high tide?"},), tools=(tool,), reference="At noon.")]
    (_, plain), (domain, chat) = render(prompts, tokenizer=tokenizer, max_length=500)
    assert tokenizer.decode(plain) == "def f(a):\n    return a"
    text = tokenizer.decode(chat)
    assert domain == "agent" and '"tide"' in text
    assert text.endswith("<|im_start|>user\nWhen is high tide?<|im_end|>\n<|im_start|>assistant\nAt noon.<|im_end|>\n")
    assert [len(ids) for _, ids in render(prompts, tokenizer=tokenizer, max_length=7)] == [min(7, len(plain)), 7]
