"""The check before the first step: it passes where training computes what serving does, and names each fault that is planted in one of the two."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import save_tiny_moe
from torch import Tensor

from kilotok.dflash import model as draft_model
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.model import Blocks, DraftModel
from kilotok.kernels.attention import block_plan
from kilotok.quant.archs import load_model
from kilotok.train import parity
from kilotok.train.distill_data import pack_row
from kilotok.train.parity import FEATURES_BOUND, LOGITS_BOUND, Parity, measure_parity
from kilotok.train.responses import Response
from kilotok.train.slot_pass import run_target

MASK, WINDOW = 3, 12


@dataclasses.dataclass(frozen=True)
class Lab:
    """A target of three layers, a draft with a short window, a packed row of two prompts with the target's own answers."""

    target: Any
    draft: DraftModel
    row_4S: Tensor

    def measure(self) -> Parity:
        return measure_parity(self.draft, self.target, self.row_4S, max_length=512, autocast=None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    target: Any = load_model(save_tiny_moe(tmp_path_factory.mktemp("parity") / "tiny", num_hidden_layers=3, seed=4), dtype=torch.float32)
    draft = DraftModel(DraftConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
        target_layer_ids=(0, 1), num_target_layers=3, mask_token_id=MASK, block_size=5, sliding_window=WINDOW))
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=target.model.norm.weight)
    documents = []
    for seed, (size, count) in enumerate(((7, 12), (21, 40))):
        prompt = torch.randint(4, 4000, (1, size), generator=torch.Generator().manual_seed(seed))
        answer = target.generate(prompt, do_sample=False, max_new_tokens=count, eos_token_id=None)[0, size:]
        documents.append(Response(prompt=tuple(prompt[0].tolist()), response=tuple(answer.tolist())))
    text = documents[1].response
    assert sum(a != b for a, b in itertools.pairwise(text)) > 3, text   # a text of one token would look right shifted too
    return Lab(target, draft, pack_row(documents, length=96, pad_id=0))


def test_training_and_serving_agree(lab: Lab) -> None:
    """SpecForge#533: a draft that is right in training and refused in serving."""
    found = lab.measure()
    found.require()
    assert found.features < 1e-5 and found.logits < 1e-5 and found.block_mask is None and found.features_bound == FEATURES_BOUND[torch.float32]
    assert found.labels == 1.0 and max(found.labels_before, found.labels_after) < 1.0
    assert found.to_json() == dataclasses.asdict(found) and "the target's own choice" in str(found)


def test_the_draft_is_left_as_it_was(lab: Lab) -> None:
    before = {n: p.clone() for n, p in lab.draft.named_parameters()}
    lab.measure()
    assert all(torch.equal(p, before[n]) and p.dtype == torch.float32 for n, p in lab.draft.named_parameters())


def shifted_taps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parity, "run_target", lambda *a, layer_ids, **how: run_target(*a, layer_ids=tuple(i + 1 for i in layer_ids), **how))


def shifted_serving_taps(patch: pytest.MonkeyPatch) -> None:
    real = parity.Taps
    patch.setattr(parity, "Taps", lambda model, layer_ids: real(model, layer_ids=tuple(i + 1 for i in layer_ids)))


def shifted_hidden_states(patch: pytest.MonkeyPatch) -> None:
    def rolled(*a: Any, **how: Any) -> tuple[Tensor, Tensor]:
        features, hidden = run_target(*a, **how)
        return features, hidden.roll(1, dims=1)

    patch.setattr(parity, "run_target", rolled)


def drafter_one_position_late(patch: pytest.MonkeyPatch) -> None:
    class Late(DFlashDrafter):
        def logits(self, anchor: int) -> Tensor:
            self._observed += 1
            try:
                return super().logits(anchor)
            finally:
                self._observed -= 1

    patch.setattr(parity, "DFlashDrafter", Late)


def wider_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_model, "block_plan", lambda *a, window, **how: block_plan(*a, window=window + 1, **how))


def blocks_that_see_their_anchor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(draft_model, "block_plan", lambda anchors_BA, **how: block_plan(anchors_BA + 1, **how))


def mask_token_in_the_anchor_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parity, "Blocks", lambda *, ids_BA, **how: Blocks(ids_BA=torch.full_like(ids_BA, MASK), **how))


def rejected_tokens_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HFTarget, "rewind", lambda self, length: None)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (shifted_taps, "tapped features"), (shifted_serving_taps, "tapped features"), (rejected_tokens_stay_in_the_cache, "tapped features"),
    (drafter_one_position_late, "draft logits"), (wider_window, "draft logits"), (blocks_that_see_their_anchor, "draft logits"),
    (mask_token_in_the_anchor_slot, "draft logits"), (shifted_hidden_states, "the labels are the target's choice")]


@pytest.mark.parametrize(("plant", "named"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_planted_fault_is_named(plant: Callable[[pytest.MonkeyPatch], None], named: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM#40727, SpecForge#470, SpecForge#471, TorchSpec#87, hipfire#483: one side is off by one, and nothing else."""
    with monkeypatch.context() as patch:
        plant(patch)
        found = lab.measure()
    with pytest.raises(ValueError, match=rf"^train dflash-distill: {named}"):
        found.require()
    others = {"tapped features": found.features, "draft logits": found.logits}
    if named == "draft logits":
        assert others["tapped features"] <= found.features_bound and found.logits > 10 * LOGITS_BOUND
    lab.measure().require()


def test_a_distance_that_is_no_number_is_a_fault(lab: Lab) -> None:
    good = lab.measure()
    for name in ("features", "logits", "block_mask"):
        with pytest.raises(ValueError, match=r"is nan from the serving form"):
            dataclasses.replace(good, **{name: float("nan")}).require()


# --- labels ---


def answered(lab: Lab, *temperatures: float, sharper: float = 1.0, count: int = 40) -> list[Response]:
    """The target's answers to one prompt, at each temperature of logits that are `sharper` times its own."""
    prompt = torch.randint(4, 4000, (1, 21), generator=torch.Generator().manual_seed(7))
    answers = []
    for seed, t in enumerate(temperatures):
        torch.manual_seed(seed)
        how = {"do_sample": False} if t == 0 else {"do_sample": True, "temperature": t / sharper, "top_k": 0, "top_p": 1.0}
        text = lab.target.generate(prompt, max_new_tokens=count, eos_token_id=None, **how)[0, 21:]
        answers.append(Response(prompt=tuple(prompt[0].tolist()), response=tuple(text.tolist())))
    return answers


def foreign(seed: int, *, count: int = 40) -> Response:
    """Text that the target never wrote, after a prompt."""
    tokens = torch.randint(4, 4000, (21 + count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Response(prompt=tuple(tokens[:21]), response=tuple(tokens[21:]))


def measure(lab: Lab, *rows: list[Response], temperatures: tuple[float, ...]) -> Parity:
    first, *more = (pack_row(documents, length=160, pad_id=0) for documents in rows)
    return measure_parity(lab.draft, lab.target, first, max_length=512, autocast=None, temperatures=temperatures, more_rows=more)


@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0), (3.0, 0.0)])
def test_answers_that_the_target_never_gave_are_refused(temperatures: tuple[float, ...], lab: Lab) -> None:
    found = measure(lab, [foreign(1), foreign(2)], [foreign(3)], temperatures=temperatures)
    assert found.is_greedy and found.labels < 0.1
    with pytest.raises(ValueError, match=r"^train dflash-distill: the labels should be greedy answers.* bound 50 %: another model wrote them\. "):
        found.require()


def test_greedy_answers_speak_for_a_run_with_hot_ones_too(lab: Lab) -> None:
    """In whatever row they are, and however long the others are; a shift is still seen."""
    hot, (greedy,) = answered(lab, 3.0, 5.0, 10.0, count=50), answered(lab, 0.0, count=20)
    found = measure(lab, hot[:2], [hot[2], greedy], temperatures=(0.0, 3.0, 5.0, 10.0))
    found.require()
    assert found.labels == 1.0 and found.is_greedy and found.surprise is None
    assert measure(lab, hot[:2], [hot[2]], temperatures=(0.0, 3.0, 5.0, 10.0)).labels < 0.5   # without it


def test_a_shift_is_named_beside_hot_answers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    hot, (greedy,) = answered(lab, 3.0, 5.0, 10.0, count=50), answered(lab, 0.0)
    shifted_hidden_states(monkeypatch)
    with pytest.raises(ValueError, match=r"^train dflash-distill: the labels are the target's choice in .* shifted by one token in 9\d\."):
        measure(lab, hot[:2], [hot[2], greedy], temperatures=(0.0, 3.0, 5.0, 10.0)).require()


@pytest.mark.parametrize("sharper", [1.0, 8.0])
@pytest.mark.parametrize("temperatures", [(0.05,), (1.0,), (3.0,), (10.0,), (0.7, 3.0, 5.0)])
def test_sampled_answers_stop_no_sound_run(temperatures: tuple[float, ...], sharper: float, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a high temperature the likeliest token, or the one before, is often more probable to the target than the label is."""
    monkeypatch.setattr(parity, "head_weight", lambda target: sharper * target.lm_head.weight.detach())
    texts = answered(lab, *(temperatures * 3)[:3], sharper=sharper, count=30)
    for some in ([texts[0]], texts[1:], texts):
        found = measure(lab, some, temperatures=temperatures)
        found.require()
        assert not found.is_greedy and found.surprise is not None and "nats from the target's own samples" in str(found)


@pytest.mark.parametrize(("temperatures", "plant"), [((1.0,), True), ((2.0,), True), ((1.0,), False), ((0.7, 2.0), False)])
def test_sampled_answers_that_are_shifted_or_foreign_are_named(temperatures: tuple[float, ...], plant: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a target that prefers some tokens, as trained ones do."""
    monkeypatch.setattr(parity, "head_weight", lambda target: 8.0 * target.lm_head.weight.detach())
    if plant:
        shifted_hidden_states(monkeypatch)
    texts = answered(lab, *temperatures, sharper=8.0) if plant else [foreign(1), foreign(2)]
    with pytest.raises(ValueError, match=r"^train dflash-distill: the labels are sampled answers, and .* another model wrote them, or hidden"):
        measure(lab, texts, temperatures=temperatures).require()
