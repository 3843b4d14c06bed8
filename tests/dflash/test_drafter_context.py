"""A drafter at work: its place in the text is its own, counted on without an end, and nothing of another text reaches it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.model import DraftModel

VOCAB, FEATURES = 50, 64


def draft_of(**changes: Any) -> DraftModel:
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCAB, "target_layer_ids": (0, 2), "num_target_layers": 4, "mask_token_id": 3, "block_size": 5}
    draft = DraftModel(DraftConfig(**{**shape, **changes})).double()
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=torch.ones(32))
    return draft


def table(seed: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drafter_of(draft: DraftModel) -> DFlashDrafter:
    return DFlashDrafter(draft, embedding_VD=table(1, VOCAB, 32), head_VD=table(2, VOCAB, 32))


@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
def test_a_text_longer_than_max_position_embeddings_is_drafted_on(window: int | None) -> None:
    """vLLM#57941, vLLM#57964, vLLM#55279, buun-llama#32: angles are computed, not looked up in a table that ends."""
    features = table(3, 5000, FEATURES)
    got = []
    for limit in (8, 100_000):
        drafter = drafter_of(draft_of(max_position_embeddings=limit, sliding_window=window))
        drafter.observe(features)
        got.append(drafter.logits(7))
    assert bool(torch.isfinite(got[0]).all()) and torch.equal(got[0], got[1])


def test_a_text_of_thousands_of_tokens_drafts_like_its_last_window() -> None:
    """buun-llama#32: past position 4096 as before it; only distances count. Within 1e-9 in float64."""
    features = table(4, 6000, FEATURES)
    draft = draft_of(sliding_window=16)
    draft.layers = draft.layers[:1]   # of one layer, so that the window is all there is
    draft.config = draft_of(sliding_window=16, num_hidden_layers=1).config
    late, early = drafter_of(draft), drafter_of(draft)
    late.observe(features)
    early.observe(features[-40:])
    assert float((late.logits(7) - early.logits(7)).abs().max()) < 1e-9


def test_the_base_of_the_rotation_is_the_drafts_own() -> None:
    """lucebox#284: a rope_theta written into the code would make these alike."""
    got = []
    for theta in (1e4, 5e6):
        drafter = drafter_of(draft_of(rope_theta=theta))
        drafter.observe(table(3, 30, FEATURES))
        got.append(drafter.logits(7))
    assert float((got[0] - got[1]).abs().max()) > 1e-3


def test_texts_of_one_draft_do_not_meet() -> None:
    """llama.cpp#22105: two texts drafted in turn by one model get what each gets alone."""
    draft = draft_of(sliding_window=16)
    parts = {name: table(seed, 40, FEATURES).split(8) for name, seed in (("a", 5), ("b", 6))}
    alone = {}
    for name, some in parts.items():
        drafter = drafter_of(draft)
        alone[name] = [(drafter.observe(p), drafter.logits(9))[1] for p in some]
    in_turn = {name: drafter_of(draft) for name in parts}
    for n in range(5):
        for name, some in parts.items():
            in_turn[name].observe(some[n])
            assert torch.equal(in_turn[name].logits(9), alone[name][n]), (name, n)
    assert not torch.equal(alone["a"][-1], alone["b"][-1])
