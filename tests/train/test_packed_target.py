"""How the target reads a packed row: document by document, in forwards no larger than the rows, and with no mask of its own size."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_moe

from kilotok.dflash.context import Taps
from kilotok.quant.archs import load_model
from kilotok.train.distill_data import DOCUMENTS, IDS, POSITIONS, pack_row
from kilotok.train.responses import Response
from kilotok.train.slot_pass import _parts, run_target

PAD = 1


def documents(sizes: Sequence[tuple[int, int]]) -> list[Response]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [Response(**{k: tuple(torch.randint(4, 4000, (n,), generator=generator).tolist()) for k, n in zip(("prompt", "response"), size, strict=True)})
            for size in sizes]


@pytest.mark.parametrize("limit", [1, 96, 10_000])
def test_no_forward_has_more_tokens_than_the_rows_and_the_longest_come_first(limit: int) -> None:
    lengths = [50, 40, 23, 23, 22, 9, 4, 4, 1]
    parts = list(_parts(lengths, limit=limit))
    assert [i for start, end, _ in parts for i in range(start, end)] == list(range(9))
    assert all(longest == lengths[start] and ((end - start) * longest <= limit or end - start == 1) for start, end, longest in parts)
    assert len(parts) == {1: 9, 96: 4, 10_000: 1}[limit]


@pytest.mark.parametrize("sliding", [False, True])
def test_documents_side_by_side_are_what_a_mask_over_the_row_gives(sliding: bool, tmp_path: Path) -> None:
    """In float64 within 1e-10, against the row under a dense mask of its documents; the windows of a target's own are in both."""
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0} if sliding else {}
    model = load_model(save_tiny_moe(tmp_path / "tiny", **window), dtype=torch.float64)
    model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped_mm has no float64
    layouts = (((9, 14), (1, 2), (20, 3), (5, 24)), ((30, 40), (1, 1)), ((2, 3),) * 9)
    rows = torch.stack([pack_row(documents(sizes), length=96, pad_id=PAD) for sizes in layouts])
    features, hidden = run_target(model, rows[:, IDS], documents_BS=rows[:, DOCUMENTS], positions_BS=rows[:, POSITIONS], layer_ids=(0, 1))
    distance = torch.arange(96)[:, None] - torch.arange(96)
    mask = (distance >= 0) & (distance < (6 if sliding else 96)) & (rows[:, DOCUMENTS].unsqueeze(2) == rows[:, DOCUMENTS].unsqueeze(1))
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min).unsqueeze(1)
    with Taps(model, layer_ids=(0, 1)) as taps, torch.no_grad():
        dense = model.model(input_ids=rows[:, IDS], attention_mask=additive, position_ids=rows[:, POSITIONS], use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
        expected = taps.take()
    real = rows[:, DOCUMENTS] >= 0
    assert float((features - expected)[real].abs().max()) < 1e-10 and float((hidden - dense)[real].abs().max()) < 1e-10
    assert not features[~real].any() and not hidden[~real].any()
