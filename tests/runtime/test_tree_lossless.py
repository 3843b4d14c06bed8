"""Trees on the reference executor: a node's numbers are, bit for bit, those of plain decoding, and so is the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import save_tiny_moe
from tree_drafters import TREE_KINDS, TreeOracle

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Drafter, Round, TargetStep, generate
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.dflash.tree import ANCHOR, DraftTree, build_tree, chain
from kilotok.runtime.reference import KV_CHUNK, Placement, ReferenceExecutor, ReferenceSequence
from kilotok.runtime.weights import load_executor

pytestmark = pytest.mark.xdist_group("tree_lossless")   # texts without a draft are decoded once
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=3)}
PROMPT = tuple(torch.randint(4096, (KV_CHUNK - 6,), generator=torch.Generator().manual_seed(0)).tolist())   # trees cross into the second chunk
ANCHOR_ID, COUNT = 77, 28
FORKED = DraftTree(token_ids=(70, 81, 92, 92, 15, 70, 8, 9), parents=(ANCHOR, ANCHOR, 0, 1, 3, 4, 5, 5))


@pytest.fixture(scope="module", params=get_args(Placement))
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReferenceExecutor:
    """With tokens in any column where this machine allows it, and in the column of their position."""
    directory: Path = save_tiny_moe(tmp_path_factory.mktemp("target") / "tiny")
    found = load_executor(directory, device="cpu", dtype=torch.float32, taps=(0, 1))
    if request.param == "free":
        if found.placement != "free":
            pytest.skip("the rows of a product differ on this machine")
        return found
    return ReferenceExecutor(found.graph, found.weights, taps=(0, 1), placement="aligned")


class FreshSequence(ReferenceSequence):
    def __init__(self, executor: ReferenceExecutor) -> None:
        super().__init__(executor, one_column=False)


class SiblingSeen(FreshSequence):
    """Branches are read where the others end, so they see them and stand too far on."""

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        return super().read_tree(anchor, chain(tree.token_ids))


class OnePositionOn(FreshSequence):
    """A branch is read a position behind its parent's child."""

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        if self._tree is None and self.length > len(PROMPT) and not last_logits_only:
            self.length += 1
        return super().read(ids, last_logits_only=last_logits_only)


class FirstNodesKept(FreshSequence):
    def keep(self, path: Sequence[int]) -> None:
        super().keep(range(len(path)))


class NothingMoved(FreshSequence):
    """The rows of the branch that was read last stay where they are."""

    def keep(self, path: Sequence[int]) -> None:
        self.length, self._tree = self.length + 1 + len(path), None


FAULTS = (SiblingSeen, OnePositionOn, FirstNodesKept, NothingMoved)


def check_tree(sequence: ReferenceSequence, executor: ReferenceExecutor, tree: DraftTree) -> None:
    """For every node: its logits and features, what is kept of its path, and what is read after it, against tokens read one by one."""
    sequence.read(PROMPT, last_logits_only=True)
    for node in range(ANCHOR, len(tree)):
        path, plain = tree.path(node), FreshSequence(executor)
        plain.read(PROMPT, last_logits_only=True)
        for token in (ANCHOR_ID, *(tree.token_ids[n] for n in path)):
            expected = plain.read([token])
        step = sequence.read_tree(ANCHOR_ID, tree)
        assert step.logits_TV.shape[0] == step.features_TF.shape[0] == 1 + len(tree) and sequence.length == len(PROMPT)
        assert torch.equal(step.logits_TV[node + 1], expected.logits_TV[0]) and torch.equal(step.features_TF[node + 1], expected.features_TF[0])
        sequence.keep(path)
        assert sequence.length == plain.length
        assert torch.equal(sequence._cache[:, :, :, :sequence.length], plain._cache[:, :, :, :plain.length])
        after, alone = sequence.read([5, 6]), plain.read([5, 6])
        assert torch.equal(after.logits_TV, alone.logits_TV) and torch.equal(after.features_TF, alone.features_TF)
        sequence.rewind(len(PROMPT))


def tokens_of(sequence: ReferenceSequence, *, drafter: Drafter | None, sampling: Sampling, budget: int | None, eos_ids: frozenset[int] = frozenset(),
              max_tokens: int = COUNT) -> tuple[list[int], list[Round]]:
    rounds = list(generate(sequence, prompt=PROMPT, drafter=drafter, sampling=sampling, max_tokens=max_tokens, eos_ids=eos_ids, tree_budget=budget))
    return [t for r in rounds for t in r.tokens], rounds


@pytest.fixture(scope="module")
def plain(executor: ReferenceExecutor) -> dict[str, list[int]]:
    texts = {name: tokens_of(FreshSequence(executor), drafter=None, sampling=s, budget=None)[0] for name, s in SAMPLINGS.items()}
    assert all(len(set(text)) > 8 for text in texts.values())
    return texts


@pytest.mark.parametrize("tree", [FORKED, chain((4, 5, 6, 7, 8, 9, 10)), chain((3,))], ids=["forked", "chain", "one"])
def test_a_node_has_the_bits_of_plain_decoding(executor: ReferenceExecutor, tree: DraftTree) -> None:
    check_tree(FreshSequence(executor), executor, tree)


def test_a_wide_tree_has_the_bits_of_plain_decoding(executor: ReferenceExecutor) -> None:
    tree = build_tree(5 * torch.randn(7, 4096, generator=torch.Generator().manual_seed(1)), budget=15)
    assert len(set(tree.parents)) > 3
    check_tree(FreshSequence(executor), executor, tree)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_reading_a_tree_is_found(executor: ReferenceExecutor, fault: type[FreshSequence]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_tree(fault(executor), executor, FORKED)


@pytest.mark.parametrize("budget", [1, 7, 15])
@pytest.mark.parametrize("mode", SAMPLINGS)
@pytest.mark.parametrize("kind", (*TREE_KINDS, "dflash"))
def test_the_text_is_the_one_without_a_draft(kind: str, mode: str, budget: int, executor: ReferenceExecutor, plain: dict[str, list[int]]) -> None:
    text, rounds = tokens_of(FreshSequence(executor), drafter=drafter_of(kind, plain[mode], executor), sampling=SAMPLINGS[mode], budget=budget)
    assert text == plain[mode]
    assert all(1 <= r.num_drafted <= budget for r in rounds[1:-1])
    if kind == "right":
        assert max(r.num_accepted for r in rounds) == max(1, budget // 2)


def drafter_of(kind: str, text: Sequence[int], executor: ReferenceExecutor) -> Drafter:
    if kind != "dflash":
        return TreeOracle(text, prompt_length=len(PROMPT), kind=kind, vocab_size=4096)
    g = executor.graph
    config = DraftConfig(hidden_size=g.hidden_size, intermediate_size=96, num_hidden_layers=1, num_attention_heads=g.num_heads,
                         num_key_value_heads=g.num_kv_heads, head_dim=g.head_dim, vocab_size=g.vocab_size, target_layer_ids=(0, 1),
                         num_target_layers=g.num_layers, mask_token_id=3, sliding_window=64)
    draft = DraftModel(config).eval()
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=executor.weights.norm)
    return DFlashDrafter(draft, embedding_VD=executor.embedding_VD, head_VD=executor.head_VD)


def test_an_end_token_in_a_tree_and_the_end_of_the_context(executor: ReferenceExecutor, plain: dict[str, list[int]]) -> None:
    text = plain["greedy"]
    eos = text[9]
    cut = text[:text.index(eos) + 1]
    for kind in TREE_KINDS:
        got, rounds = tokens_of(FreshSequence(executor), drafter=drafter_of(kind, text, executor), sampling=Sampling(), budget=15, eos_ids=frozenset({eos}))
        assert got == cut and rounds[-1].stopped
        short = FreshSequence(executor)
        short.max_length = len(PROMPT) + 12
        got, rounds = tokens_of(short, drafter=drafter_of(kind, text, executor), sampling=Sampling(), budget=15, max_tokens=1000)
        assert got == text[:12] and short.length == short.max_length - 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_reading_a_tree_changes_the_text(executor: ReferenceExecutor, fault: type[FreshSequence], plain: dict[str, list[int]]) -> None:
    changed = 0
    for mode, sampling in SAMPLINGS.items():
        for kind in ("right", "misplaced"):
            try:
                text, _ = tokens_of(fault(executor), drafter=drafter_of(kind, plain[mode], executor), sampling=sampling, budget=15)
                changed += text != plain[mode]
            except (AssertionError, RuntimeError):   # the oracle finds itself beside the text
                changed += 1
    assert changed
