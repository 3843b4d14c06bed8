"""A transformers model that verifies a tree in a single step, in float64: there a step of many tokens and steps of one differ too little to change a pick."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import exact_moe
from torch import Tensor, nn
from tree_drafters import TREE_KINDS, TreeOracle

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Drafter, TargetStep, generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.dflash.tree import ANCHOR, DraftTree, build_tree, chain

BUDGETS = (1, 7, 15)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return exact_moe(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def taps(model: nn.Module) -> Iterator[Taps]:
    with Taps(model, layer_ids=(0, 1)) as taps:
        yield taps


class VisibleSiblings(HFTarget):
    def _tree_mask(self, tree: DraftTree, *, positions_T: Tensor) -> Any:
        return super()._tree_mask(chain(tree.token_ids), positions_T=positions_T)


class PositionsInOrder(HFTarget):
    """A node at the position of its place in the step, not of its depth."""

    def _forward(self, ids: Sequence[int], **options: Any) -> TargetStep:
        if "position_ids" in options:
            first = int(options["position_ids"][0, 0])
            options["position_ids"] = torch.arange(first, first + len(ids))[None]
        return super()._forward(ids, **options)


class FirstNodesKept(HFTarget):
    """As many rows as the path is long, but the first ones of the tree."""

    def keep(self, path: Sequence[int]) -> None:
        super().keep(range(len(path)))


class BlindToItself(HFTarget):
    def _tree_mask(self, tree: DraftTree, *, positions_T: Tensor) -> Any:
        mask = super()._tree_mask(tree, positions_T=positions_T)
        mask[..., -len(tree):] = mask[..., -len(tree):].masked_fill(torch.eye(1 + len(tree), dtype=torch.bool)[:, 1:], torch.finfo(mask.dtype).min)
        return mask


FAULTS = (VisibleSiblings, PositionsInOrder, FirstNodesKept, BlindToItself)
FORKED = DraftTree(token_ids=(70, 81, 92, 92, 15, 70), parents=(ANCHOR, ANCHOR, 0, 1, 3, 4))


LONG = torch.randint(4096, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def check_step(kind: type[HFTarget], model: nn.Module, taps: Taps, *, tree: DraftTree = FORKED) -> None:
    """Every node's row is that of its path read alone, and what is kept reads on like it."""
    prompt, anchor = [100, 7, 2000, 33, 5, 6], 9
    target = kind(model, taps=taps, max_length=40)
    target.read(prompt)
    for node in range(ANCHOR, len(tree)):
        path = tree.path(node)
        alone = HFTarget(model, taps=taps, max_length=40)
        alone.read(prompt)
        expected = alone.read([anchor, *(tree.token_ids[n] for n in path)])
        step = target.read_tree(anchor, tree)
        assert target.length == len(prompt)
        for got, want in zip(step[:2], expected[:2], strict=True):
            torch.testing.assert_close(got[node + 1], want[-1], rtol=1e-9, atol=1e-9)
        target.keep(path)
        assert target.length == alone.length == len(prompt) + 1 + len(path)
        for got, want in zip(target.read([8, 9])[:2], alone.read([8, 9])[:2], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        target.rewind(len(prompt))


def text_of(target: HFTarget, *, drafter: Drafter | None, sampling: Sampling, count: int, budget: int | None) -> list[int]:
    rounds = generate(target, prompt=LONG, drafter=drafter, sampling=sampling, max_tokens=count, eos_ids=(), tree_budget=budget)
    return [t for r in rounds for t in r.tokens]


def test_a_node_of_a_step_is_its_path_read_alone(model: nn.Module, taps: Taps) -> None:
    check_step(HFTarget, model, taps)
    check_step(HFTarget, model, taps, tree=chain((4, 5, 6)))
    check_step(HFTarget, model, taps, tree=build_tree(3 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(2)), budget=12))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_step_is_found(model: nn.Module, taps: Taps, fault: type[HFTarget]) -> None:
    with pytest.raises(AssertionError):
        check_step(fault, model, taps)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=4)], ids=["greedy", "sampled"])
def test_transformers_with_trees_says_what_it_says_alone(model: nn.Module, taps: Taps, sampling: Sampling, budget: int) -> None:
    embedding = model.get_input_embeddings().weight.detach()   # type: ignore[operator]
    config = DraftConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
                         target_layer_ids=(0, 1), num_target_layers=2, mask_token_id=4090, sliding_window=8)
    draft = DraftModel(config)
    draft.initialize(generator=torch.Generator().manual_seed(3), final_norm_D=model.model.norm.weight)   # type: ignore[union-attr, arg-type]
    text = text_of(HFTarget(model, taps=taps, max_length=100), drafter=None, sampling=sampling, count=31, budget=None)
    assert len(set(text)) > (3 if sampling.temperature == 0 else 8)
    oracles = [TreeOracle(text, prompt_length=len(LONG), kind=kind, vocab_size=4096) for kind in TREE_KINDS]
    for drafter in (DFlashDrafter(draft.double(), embedding_VD=embedding, head_VD=embedding), *oracles):
        assert text_of(HFTarget(model, taps=taps, max_length=100), drafter=drafter, sampling=sampling, count=31, budget=budget) == text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_step_changes_the_text(model: nn.Module, taps: Taps, fault: type[HFTarget]) -> None:
    changed = 0
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        text = text_of(HFTarget(model, taps=taps, max_length=100), drafter=None, sampling=sampling, count=31, budget=None)
        for kind in ("right", "misplaced"):
            oracle = TreeOracle(text, prompt_length=len(LONG), kind=kind, vocab_size=4096)
            try:
                changed += text_of(fault(model, taps=taps, max_length=100), drafter=oracle, sampling=sampling, count=31, budget=15) != text
            except AssertionError:   # the oracle finds itself beside the text
                changed += 1
    assert changed


def test_a_tree_beyond_the_context_is_refused(model: nn.Module, taps: Taps) -> None:
    target = HFTarget(model, taps=taps, max_length=8)
    target.read([1, 2, 3, 4])
    target.read_tree(5, DraftTree(token_ids=(1, 2, 3, 4, 5, 6), parents=(ANCHOR, 0, 1, 0, 0, ANCHOR)))   # four deep with the anchor, however wide
    target.keep([])
    with pytest.raises(ValueError, match=r"^target: 5 \+ 4 tokens exceed its context of 8"):
        target.read_tree(5, chain((1, 2, 3)))
