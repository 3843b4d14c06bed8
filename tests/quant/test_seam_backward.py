"""The seam in backward: `keep`, `recompute` and gradient checkpointing give the same bits, and hold or free what they say."""

from collections import Counter

import pytest
import torch
from seam import BACKWARDS, CASES, Recorder, assert_same_gradients, attached, gradients, logits, loss, model_of, overlays, plan_of, replaced, tokens
from tolerances import assert_equal

from kilotok.quant.experts import Backward, attach_fake_quant

# --- the numbers ---


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_are_those_of_replaced_weights_however_backward_goes(case: str) -> None:
    reference = replaced(case)
    loss(reference, tokens()).backward()
    expected_logits, expected = logits(reference, tokens()).detach(), gradients(reference)
    planned = {w.name for w in plan_of(case).weights}
    assert all(expected[n] is not None and float(expected[n].abs().max()) > 0 for n in planned if "shared_expert_gate" not in n)   # type: ignore[union-attr]
    for backward, checkpointed in BACKWARDS:
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)
        assert_equal(logits(model, tokens()).detach(), expected_logits)
        quant.begin_step()
        loss(model, tokens()).backward()
        quant.end_step()
        assert_same_gradients(gradients(model), expected)
        assert overlays(model) == []


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe-everything"])
def test_bf16_autocast_gives_the_same_bits_however_backward_goes(case: str) -> None:
    found = []
    for backward, checkpointed in BACKWARDS:
        model, _ = attached(case, backward=backward, checkpointed=checkpointed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = loss(model, tokens())
        result.backward()
        found.append((result.detach(), gradients(model)))
    for result, got in found[1:]:
        assert_equal(result, found[0][0], bits=True)
        assert_same_gradients(got, found[0][1])
    assert all(g is None or (g.dtype == torch.float32 and bool(torch.isfinite(g).all())) for g in found[0][1].values())


@pytest.mark.parametrize(("backward", "checkpointed"), BACKWARDS)
def test_gradients_of_two_micro_batches_add_up(backward: Backward, checkpointed: bool) -> None:
    reference = replaced("qwen2_moe-everything")
    model, quant = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
    for seed in (1, 2):
        loss(reference, tokens(seed)).backward()
        quant.begin_step()
        loss(model, tokens(seed)).backward()
        quant.end_step()
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.parametrize(("backward", "checkpointed"), BACKWARDS)
def test_two_forwards_before_their_backwards(backward: Backward, checkpointed: bool) -> None:
    reference = replaced("qwen3_moe")
    model, _ = attached("qwen3_moe", backward=backward, checkpointed=checkpointed)
    for m in (reference, model):
        first, second = loss(m, tokens(1)), loss(m, tokens(2))
        second.backward()
        first.backward()
    assert_same_gradients(gradients(model), gradients(reference))


@pytest.mark.parametrize(("backward", "checkpointed"), BACKWARDS)
def test_a_step_of_the_optimizer_is_seen_by_the_next_step(backward: Backward, checkpointed: bool) -> None:
    """Nothing of a step's values is left for the next, whose masters differ."""
    model, _ = attached("qwen3_moe", backward=backward, checkpointed=checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss(model, tokens(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    fresh = model_of("qwen3_moe")
    fresh.load_state_dict(model.state_dict())
    attach_fake_quant(fresh, plan=plan_of("qwen3_moe"))
    for m in (model, fresh):
        loss(m, tokens(2)).backward()
    assert_same_gradients(gradients(model), gradients(fresh))


# --- how often, and what is held ---


@pytest.mark.parametrize("case", CASES)
def test_one_fake_quantization_a_weight_a_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    names = Counter(w.name for w in plan_of(case).weights)
    for backward, checkpointed in BACKWARDS:
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)
        recorder.names.clear()
        recorder.values.clear()
        loss(model, tokens())
        assert recorder.counts == names == quant.calls
        with torch.no_grad():
            logits(model, tokens())
        assert recorder.counts == names + names == quant.calls
        quant.begin_step()
        assert not quant.calls


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe-everything", "gpt_oss", "llama4"])
@pytest.mark.parametrize(("backward", "checkpointed", "times"), [("keep", False, 1), ("keep", True, 1), ("recompute", False, 2), ("recompute", True, 2)])
def test_quantizations_of_a_whole_step(case: str, backward: Backward, checkpointed: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    model, _ = attached(case, backward=backward, checkpointed=checkpointed)
    model.get_input_embeddings().weight.requires_grad_(True)   # type: ignore[operator]
    loss(model, tokens()).backward()
    counts = recorder.counts
    assert set(counts) == {w.name for w in plan_of(case).weights}
    for name, n in counts.items():
        assert n == times, f"{name}: {n}"


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_moe-eager", "qwen2_moe-everything", "gpt_oss", "llama4"])
def test_what_autograd_holds_after_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep: every quantized weight, until backward. recompute: none. Checkpointed: none in `recompute`; `keep` hands them to the second run."""
    recorder = Recorder(monkeypatch)
    planned = sorted(w.name for w in plan_of(case).weights)
    for backward, checkpointed, held in (("keep", False, planned), ("recompute", False, []), ("keep", True, planned), ("recompute", True, [])):
        recorder.names.clear()
        recorder.values.clear()
        model, quant = attached(case, backward=backward, checkpointed=checkpointed)   # type: ignore[arg-type]
        result = loss(model, tokens())
        assert sorted(recorder.alive) == held, (backward, checkpointed)
        result.backward()
        del result
        quant.begin_step()
        assert recorder.alive == [], (backward, checkpointed)


def test_without_gradients_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for backward, checkpointed in BACKWARDS:
        model, _ = attached("qwen2_moe-everything", backward=backward, checkpointed=checkpointed)
        with torch.no_grad():
            result = logits(model, tokens())
        assert recorder.alive == [] and not result.requires_grad
