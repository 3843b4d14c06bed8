"""What `train dflash-distill` refuses in a recipe, at a path and in what is stored, each before a run is made."""

from typing import Any

import pytest

from kilotok.runtime.engine import MAX_TREE_BUDGET as SERVED_TREE_BUDGET
from kilotok.train.config import Source
from kilotok.train.distill_config import MAX_TREE_BUDGET, PromptConfig


@pytest.mark.parametrize(("options", "message"), [
    ({"heldout_tree_budget": 64}, r"^data\.heldout_tree_budget \(null for no trees\): must lie in 1\.\.63, as served; got 64\.$"),
    ({"heldout_tree_budget": 0}, r"must lie in 1\.\.63, as served; got 0\.$"),
    ({"temperatures": [0.0, 5e-7]}, r"^data\.temperatures: needs at least one, each 0 \(greedy\) or in 1e-06\.\.10; got \[0\.0, 5e-07\]\.$"),
    ({"temperatures": [0.5, float("nan")]}, r"each 0 \(greedy\) or in 1e-06\.\.10"),
    ({"temperatures": [0.7, 0.0, 0.7]}, r"^data\.temperatures: the same one twice: \[0\.7, 0\.0, 0\.7\]\. Leave one of them out\.$"),
], ids=["wide", "none", "cold", "nan", "twice"])
def test_options_that_a_server_or_a_sampler_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptConfig(**options)


def test_what_the_server_takes_is_taken() -> None:
    assert MAX_TREE_BUDGET == SERVED_TREE_BUDGET
    assert PromptConfig(heldout_tree_budget=63, temperatures=[0.0, 1e-6, 10.0]).heldout_tree_budget == 63


@pytest.mark.parametrize("domain", ["", "a/b", "..", ".hidden", "/abs", "a\\b", "a\n", "co\nde", " a", "a:b"])
def test_a_domain_is_a_plain_name(domain: str) -> None:
    with pytest.raises(ValueError, match=r"^data source .*: a domain has letters, digits, spaces and - _ \. alone, beginning with no space or dot\."):
        Source(domain=domain, stdlib=True)


@pytest.mark.parametrize("domain", ["code", "math-2.0", "tool use", "数学", "_x"])
def test_plain_names_are_taken(domain: str) -> None:
    assert Source(domain=domain, stdlib=True).domain == domain
