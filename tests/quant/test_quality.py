"""Perplexity and KL: zero where they must be, large where a model is broken, and torch's own figures in between."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from tolerances import CROSS_ENTROPY_FP32, assert_within
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from kilotok.quant.archs import build_model, find_arch, load_model, load_tokenizer
from kilotok.quant.plan import find_experts
from kilotok.quant.quality import Quality, measure_quality, pool

VOCAB = 96


def tiny_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, intermediate_size=64, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.2,
        pad_token_id=0, eos_token_id=2, bos_token_id=None), device="cpu").eval()


def rows(count: int = 5, *, length: int = 13) -> list[Tensor]:
    return list(torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1)))


def logits(model: nn.Module, text: list[Tensor]) -> Tensor:
    """[rows * T, V] in one go."""
    with torch.no_grad():
        result: Tensor = model(input_ids=torch.stack(text)[:, :-1]).logits
    return result.flatten(0, 1)


def labels(text: list[Tensor]) -> Tensor:
    return torch.stack(text)[:, 1:].flatten()


@pytest.fixture(scope="module")
def pocket_model(pocket: Path) -> nn.Module:
    return load_model(pocket, dtype=torch.float32)


@pytest.fixture(scope="module")
def pocket_rows(pocket: Path) -> list[Tensor]:
    """Four rows of 65 tokens of the pocket's held-out code."""
    tokenizer = load_tokenizer(pocket)
    lines = (pocket.parent / "heldout" / "code.jsonl").read_text().splitlines()
    ids = [i for line in lines for i in tokenizer(json.loads(line)["response"])["input_ids"]]
    return list(torch.tensor(ids[: 4 * 65]).reshape(4, 65))


# --- a trained model ---


def test_a_model_against_itself_has_kl_exactly_zero(pocket_model: nn.Module, pocket_rows: list[Tensor]) -> None:
    for parent in (pocket_model, copy.deepcopy(pocket_model)):
        quality = measure_quality(pocket_model, parent=parent, rows=pocket_rows)
        assert quality.kl == 0.0
        assert quality.perplexity == quality.parent_perplexity
        assert quality.tokens == 4 * 64
        assert 1.5 < quality.perplexity < 60   # a trained model on its own kind of text; of 4096 tokens an untrained one gives thousands


def test_zeroed_experts_move_both_figures_by_a_lot(pocket_model: nn.Module, pocket_rows: list[Tensor]) -> None:
    broken = copy.deepcopy(pocket_model)
    with torch.no_grad():
        for expert in find_experts(broken, arch=find_arch("qwen3_moe", where="test")):
            broken.get_parameter(expert.name).zero_()
    quality = measure_quality(broken, parent=pocket_model, rows=pocket_rows)
    intact = measure_quality(pocket_model, parent=pocket_model, rows=pocket_rows)
    assert quality.kl > 1.0
    assert quality.perplexity > 3 * quality.parent_perplexity
    assert quality.parent_perplexity == intact.perplexity   # the parent's figure does not depend on the model compared
    turned = measure_quality(pocket_model, parent=broken, rows=pocket_rows)
    assert (turned.perplexity, turned.parent_perplexity) == (quality.parent_perplexity, quality.perplexity)
    assert abs(turned.kl - quality.kl) > 0.1   # KL(parent || model) is not symmetric


def test_pocket_perplexity_is_torch_cross_entropy(pocket_model: nn.Module, pocket_rows: list[Tensor]) -> None:
    quality = measure_quality(pocket_model, parent=pocket_model, rows=pocket_rows, chunk_rows=100)
    expected = torch.nn.functional.cross_entropy(logits(pocket_model, pocket_rows), labels(pocket_rows))
    assert_within(torch.tensor(quality.cross_entropy), expected, bound=CROSS_ENTROPY_FP32)
    assert quality.perplexity == math.exp(quality.cross_entropy)


# --- against torch, on random models ---


@pytest.mark.parametrize(("rows_per_batch", "chunk_rows"), [(8, 1024), (2, 7), (1, 1), (5, 60)])
def test_figures_are_torchs_own_whatever_the_batching(rows_per_batch: int, chunk_rows: int) -> None:
    """Five rows: batches of 2 leave a short one, whose tokens must count as much as the others'."""
    model, parent, text = tiny_model(0), tiny_model(1), rows()
    quality = measure_quality(model, parent=parent, rows=text, rows_per_batch=rows_per_batch, chunk_rows=chunk_rows)
    assert quality.tokens == 5 * 12
    got_logits, parent_logits = logits(model, text), logits(parent, text)
    expected = {
        "cross_entropy": torch.nn.functional.cross_entropy(got_logits, labels(text)),
        "parent_cross_entropy": torch.nn.functional.cross_entropy(parent_logits, labels(text)),
        "kl": torch.nn.functional.kl_div(got_logits.log_softmax(-1), parent_logits.log_softmax(-1), log_target=True, reduction="batchmean"),
    }
    for name, value in expected.items():
        assert float(value) > 0.5, name
        assert_within(torch.tensor(getattr(quality, name)), value, bound=CROSS_ENTROPY_FP32, what=name)
    assert quality.perplexity == math.exp(quality.cross_entropy)
    assert quality.parent_perplexity == math.exp(quality.parent_cross_entropy)


def test_autocast_computes_in_bf16() -> None:
    model = tiny_model()
    seen: list[torch.dtype] = []
    model.get_submodule("model.layers.0.self_attn.q_proj").register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    narrow = measure_quality(model, parent=model, rows=rows(), autocast_dtype=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    wide = measure_quality(model, parent=model, rows=rows())
    assert set(seen) == {torch.float32}
    assert narrow.kl == wide.kl == 0.0
    assert narrow.cross_entropy != wide.cross_entropy


def test_nothing_is_trained_or_kept() -> None:
    model, parent = tiny_model(0), tiny_model(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    measure_quality(model, parent=parent, rows=rows())
    assert all(p.grad is None for m in (model, parent) for p in m.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training


def test_no_rows_raises() -> None:
    with pytest.raises(ValueError, match="at least one row is needed"):
        measure_quality(tiny_model(), parent=tiny_model(), rows=[])


# --- pooling ---


def test_pool_is_weighted_by_tokens() -> None:
    parts = [Quality(tokens=1, kl=1.0, cross_entropy=2.0, parent_cross_entropy=0.5), Quality(tokens=3, kl=5.0, cross_entropy=4.0, parent_cross_entropy=1.5)]
    got = pool(parts)
    assert got == Quality(tokens=4, kl=4.0, cross_entropy=3.5, parent_cross_entropy=1.25)
    assert got.perplexity == math.exp(3.5) and got.parent_perplexity == math.exp(1.25)   # of the mean, not the mean of perplexities
    assert pool(parts[::-1]) == got
    assert pool(parts[:1]) == parts[0]


def test_pool_of_halves_is_the_whole() -> None:
    model, parent, text = tiny_model(0), tiny_model(1), rows(5)
    whole = measure_quality(model, parent=parent, rows=text)
    halves = pool([measure_quality(model, parent=parent, rows=text[:1]), measure_quality(model, parent=parent, rows=text[1:])])
    assert halves.tokens == whole.tokens
    for name in ("kl", "cross_entropy", "parent_cross_entropy"):
        assert_within(torch.tensor(getattr(halves, name)), torch.tensor(getattr(whole, name)), bound=CROSS_ENTROPY_FP32, what=name)


def test_json_holds_every_figure() -> None:
    quality = Quality(tokens=7, kl=0.25, cross_entropy=1.0, parent_cross_entropy=0.5)
    assert json.loads(json.dumps(quality.to_json())) == {
        "tokens": 7, "kl": 0.25, "cross_entropy": 1.0, "parent_cross_entropy": 0.5, "perplexity": math.exp(1.0), "parent_perplexity": math.exp(0.5)}
