"""Rows that a draft is trained on: whole documents side by side, each read by the target as if it were alone; and what a recipe becomes."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import POCKET, save_tiny_moe
from tolerances import FP32_EPS, Bound, assert_equal, assert_within
from torch import Tensor, nn
from transformers import AutoTokenizer

from kilotok.dflash.anchors import anchor_generator
from kilotok.dflash.config import DraftConfig
from kilotok.dflash.generate import Round
from kilotok.dflash.model import DraftModel
from kilotok.quant.archs import load_model
from kilotok.train import acceptance
from kilotok.train.cli import main as train
from kilotok.train.config import Source
from kilotok.train.distill_config import DistillRecipe, DraftShape, PromptConfig, SlotLossConfig, default_recipe
from kilotok.train.distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED, PromptData, RowData, pack_row, packed_rows
from kilotok.train.draft_shape import resolve_shape
from kilotok.train.packing import pick_row
from kilotok.train.prompts import Prompt
from kilotok.train.recipe import RecipeError, option_names, to_yaml
from kilotok.train.responses import Response
from kilotok.train.slot_pass import run_target, slot_pass

PAD = 1
# A row of 96 adds in another order than a document of ten: attention, router and experts, two layers deep. The largest of 12 models
# and texts: 8 eps (maximum) and 6 eps (RMS) for states, 6.5 and 3 for gradients, 1 for the loss.
PACKED_FP32 = Bound(maximum=32 * FP32_EPS, rms=24 * FP32_EPS, reason="the same fp32 terms, summed beside masked ones, through two layers")
PACKED_GRADIENT = Bound(maximum=32 * FP32_EPS, rms=12 * FP32_EPS, reason="sums of the same fp32 terms over documents in another order")


def response(prompt: Sequence[int], answer: Sequence[int]) -> Response:
    return Response(prompt=tuple(prompt), response=tuple(answer))


def random_responses(sizes: Sequence[tuple[int, int]], *, seed: int = 0) -> list[Response]:
    """(prompt tokens, response tokens) each; no token is PAD."""
    generator = torch.Generator().manual_seed(seed)
    return [response(*(torch.randint(4, 4000, (n,), generator=generator).tolist() for n in size)) for size in sizes]


def test_a_row_by_hand() -> None:
    row = pack_row([response([11, 12, 13], [14, 15]), response([21], [22, 23, 24])], length=12, pad_id=PAD)
    assert row.dtype == torch.int64 and (IDS, DOCUMENTS, POSITIONS, SUPERVISED) == (0, 1, 2, 3)
    assert row.tolist() == [
        [11, 12, 13, 14, 15, 21, 22, 23, 24, PAD, PAD, PAD],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1],
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]]


def test_a_full_row_and_an_empty_one() -> None:
    assert pack_row([response([5], [6, 7])], length=3, pad_id=PAD).tolist() == [[5, 6, 7], [0, 0, 0], [0, 1, 2], [0, 1, 1]]
    assert pack_row([], length=2, pad_id=PAD).tolist() == [[PAD, PAD], [-1, -1], [0, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_every_usable_response_once_and_whole(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(int(p), int(r)) for p, r in zip(torch.randint(1, 40, (60,), generator=generator), torch.randint(0, 40, (60,), generator=generator), strict=True)]
    sizes += [(30, 18), (30, 19), (1, 2), (1, 1), (1, 0)]
    responses = random_responses(sizes, seed=seed)
    rows, left_out = packed_rows(responses, length=48, pad_id=PAD)
    usable = [r for r in responses if len(r.response) >= 2 and len(r.prompt) + len(r.response) <= 48]
    assert left_out == len(responses) - len(usable) > 0
    found = []
    for row in rows:
        assert row.shape == (4, 48)
        numbers = row[DOCUMENTS].tolist()
        assert numbers == sorted(n for n in numbers if n >= 0) + [-1] * numbers.count(-1)   # one after the other, padding last
        for number in range(max(numbers) + 1):
            inside = row[DOCUMENTS] == number
            ids, supervised = row[IDS][inside].tolist(), row[SUPERVISED][inside].tolist()
            assert row[POSITIONS][inside].tolist() == list(range(len(ids)))
            prompt = supervised.count(0)
            assert supervised == [0] * prompt + [1] * (len(ids) - prompt)
            found.append(response(ids[:prompt], ids[prompt:]))
        padding = row[:, row[DOCUMENTS] == -1]
        assert padding.tolist() == [[v] * padding.shape[1] for v in (PAD, -1, 0, 0)]
    assert sorted(found, key=str) == sorted(usable, key=str)


def test_no_usable_response_gives_no_row() -> None:
    assert packed_rows(random_responses([(3, 1), (3, 0), (40, 10)]), length=48, pad_id=PAD) == ([], 3)


def test_loader_reads_rows_by_seed_step_and_rank() -> None:
    sources = [[torch.full((4, 8), 10 * s + r) for r in range(5)] for s in range(2)]
    settings: dict[str, Any] = {"weights": [0.7, 0.3], "seed": 3, "batch_size": 2, "accumulate": 2, "max_steps": 4}

    def batches(*, step: int, rank: int) -> list[Tensor]:
        data = RowData(sources, **settings)
        data.trainer = SimpleNamespace(strategy=None, global_step=step, world_size=2, global_rank=rank)  # type: ignore[assignment]
        return list(data.train_dataloader())

    by_rank = [batches(step=0, rank=rank) for rank in (0, 1)]
    assert [[b.shape for b in some] for some in by_rank] == [[(2, 4, 8)] * 8] * 2
    picked = [pick_row(i, seed=3, weights=[0.7, 0.3], num_rows=[5, 5]) for i in range(32)]
    order = [b for step in range(4) for some in by_rank for b in some[2 * step:2 * step + 2]]   # step, rank, micro-batch, row
    assert [int(row[0, 0]) for b in order for row in b] == [10 * s + r for s, r in picked]
    assert torch.equal(torch.stack(batches(step=3, rank=1)), torch.stack(by_rank[1][6:]))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    model = load_model(save_tiny_moe(tmp_path_factory.mktemp("model") / "tiny"), dtype=torch.float32)
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model.requires_grad_(False)


SIZES = ((9, 14), (1, 2), (20, 3), (5, 24))   # 78 tokens: a row of 96 has padding


def test_each_document_of_a_packed_row_is_read_as_if_it_were_alone(tiny_model: nn.Module) -> None:
    documents = random_responses(SIZES)
    rows = torch.stack([pack_row(documents, length=96, pad_id=PAD), pack_row(documents[:1], length=96, pad_id=PAD)])
    features, hidden = run_target(tiny_model, rows[:, IDS], documents_BS=rows[:, DOCUMENTS], positions_BS=rows[:, POSITIONS], layer_ids=(1, 0))
    assert features.shape == (2, 96, 128) and hidden.shape == (2, 96, 64)
    assert bool(torch.isfinite(features).all()) and bool(torch.isfinite(hidden).all())   # padding included
    for row, number, document in [(0, i, d) for i, d in enumerate(documents)] + [(1, 0, documents[0])]:
        inside = rows[row, DOCUMENTS] == number
        with torch.no_grad():
            alone = tiny_model.model(input_ids=torch.tensor([[*document.prompt, *document.response]]), output_hidden_states=True)  # type: ignore[operator]
        states = alone.hidden_states   # of layer i at i + 1, but the last one is behind the final norm
        what = f"document {number} of row {row}"
        assert_within(hidden[row, inside], alone.last_hidden_state[0], bound=PACKED_FP32, what=f"{what}, final states")
        assert_within(features[row, inside, 64:], states[1][0], bound=PACKED_FP32, what=f"{what}, output of layer 0")
        assert_within(tiny_model.model.norm(features[row, inside, :64]), states[2][0], bound=PACKED_FP32, what=f"{what}, output of layer 1")  # type: ignore[operator, union-attr]


def test_what_is_beside_a_document_does_not_matter(tiny_model: nn.Module) -> None:
    """Other neighbours and other padding at the same places. The experts get other tokens beside mine, so a product may be tiled otherwise."""
    documents = random_responses(SIZES)
    rows = torch.stack([pack_row(documents, length=96, pad_id=PAD)] * 2)
    mine = rows[0, DOCUMENTS] == 2
    other = rows[1, IDS]
    other[~mine] = torch.arange(4, 4 + int((~mine).sum()))
    features, hidden = run_target(tiny_model, rows[:, IDS], documents_BS=rows[:, DOCUMENTS], positions_BS=rows[:, POSITIONS], layer_ids=(0, 1))
    assert not torch.equal(features[0, ~mine], features[1, ~mine])
    for got in (features, hidden):
        assert_within(got[1, mine], got[0, mine], bound=PACKED_FP32)


def draft_config(**changed: Any) -> DraftConfig:
    return DraftConfig(**{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                          "head_dim": 16, "vocab_size": 4096, "target_layer_ids": (0, 1), "num_target_layers": 2, "mask_token_id": 3,
                          "sliding_window": 12, **changed})


@pytest.mark.parametrize("options", [{}, {"ce_weight": 0.0, "kl_weight": 1.0}, {"weighting": "dpace"}], ids=["ce", "kl", "dpace"])
def test_a_packed_row_trains_like_its_documents_in_rows_of_their_own(tiny_model: nn.Module, options: dict[str, Any]) -> None:
    """With more anchors than tokens every block there is counts, so the sums do not depend on the drawing."""
    documents = random_responses(SIZES)
    draft = DraftModel(draft_config())
    draft.initialize(generator=torch.Generator().manual_seed(1), final_norm_D=torch.ones(64))

    def sums(rows: Sequence[Tensor]) -> Any:
        draft.zero_grad()
        found = slot_pass(draft, tiny_model, torch.stack(list(rows)), loss=SlotLossConfig(anchors=200, **options),
                          generator=anchor_generator(seed=0, rank=0, index=0, device=torch.device("cpu")))
        found.loss.backward()
        return found, {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}

    packed, gradients = sums([pack_row(documents, length=96, pad_id=PAD)])
    alone, expected = sums([pack_row([d], length=44, pad_id=PAD) for d in documents])
    slots = [sum(max(0, len(d.response) - n) for d in documents) for n in range(1, 8)]   # an anchor a token that has n behind it
    assert packed.count_N.tolist() == [0, *slots]
    assert_equal(packed.count_N, alone.count_N)
    assert_equal(packed.correct_N, alone.correct_N)
    assert_within(packed.weight, alone.weight, bound=PACKED_FP32)
    assert_within(packed.loss, alone.loss, bound=PACKED_FP32)
    assert gradients.keys() == expected.keys() == dict(draft.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert_within(gradient, expected[name], bound=PACKED_GRADIENT, what=name)


@pytest.mark.parametrize(("sizes", "slots"), [
    (((3, 4),), [3, 2, 1, 0, 0, 0, 0]),                 # shorter than a block of eight
    (((3, 1),), [0] * 7),                               # one token: an anchor and nothing to predict
    (((3, 4), (1, 30)), [32, 30, 28, 26, 25, 24, 23]),  # blocks at the end of the first do not go on into the second
], ids=["short", "one_token", "two_documents"])
def test_labels_stop_at_the_end_of_their_document(tiny_model: nn.Module, sizes: Sequence[tuple[int, int]], slots: list[int]) -> None:
    draft = DraftModel(draft_config())
    draft.initialize(generator=torch.Generator().manual_seed(1), final_norm_D=torch.ones(64))
    row = pack_row(random_responses(sizes), length=48, pad_id=PAD)
    sums = slot_pass(draft, tiny_model, row[None], loss=SlotLossConfig(anchors=100), generator=anchor_generator(seed=0, rank=0, index=0,
                                                                                                              device=torch.device("cpu")))
    assert sums.count_N.tolist() == [0, *slots]
    sums.loss.backward()   # also with nothing to learn
    assert bool(torch.isfinite(sums.loss)) and all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in draft.parameters())


def test_the_weights_are_the_sources_shares_of_the_rows() -> None:
    """However many rows they have; a domain may have several sources. 4000 draws: six standard deviations are 0.05."""
    sources = [[torch.full((4, 8), s)] * n for s, n in enumerate((1, 50, 7))]
    data = RowData(sources, weights=[2.0, 1.0, 1.0], seed=0, batch_size=1, accumulate=1, max_steps=4000)
    data.trainer = SimpleNamespace(strategy=None, global_step=0, world_size=1, global_rank=0)  # type: ignore[assignment]
    drawn = [int(batch[0, 0, 0]) for batch in data.train_dataloader()]
    assert [drawn.count(s) / 4000 for s in range(3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.05)


def test_figures_are_pooled_over_rounds_and_loops_are_cut_text_by_text(tiny_model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times one text is no loop; a text of one token over and over keeps two tokens."""
    def rounds(tokens: Sequence[int], size: int) -> list[Round]:
        rest = [tuple(tokens[i:i + size]) for i in range(1, len(tokens), size)]
        first = Round(tokens=(tokens[0],), num_drafted=0, num_accepted=0, is_prefill=True)
        return [first, *(Round(tokens=t, num_drafted=7, num_accepted=len(t) - 1) for t in rest)]

    line = list(range(100, 113))
    texts = {1: rounds(line, 4), 2: rounds(line, 4), 3: rounds(line, 1), 4: rounds([7] * 13, 4)}
    monkeypatch.setattr(acceptance, "generate", lambda target, *, prompt, **how: iter(texts[prompt[0]]))
    prompts = {d: [Prompt(domain=d, ids=(i, 50), row={}) for i in some] for d, some in (("a", (1, 2)), ("b", (3, 4)))}
    measured = acceptance.measure_acceptance(DraftModel(draft_config()), tiny_model, prompts, max_tokens=13, eos_ids={2}, max_length=512)
    figures = {d: [m["acceptance_length"], m["acceptance_length_repeats_cut"], m["rounds"], m["tokens"]] for d, m in measured.items()}
    assert figures == {"a": [4.0, 4.0, 6, 26], "b": [24 / 15, 13 / 13, 15, 26], "all": [48 / 21, 37 / 19, 21, 52]}
    for domain, share in (("a", 1.0), ("b", 3 / 15), ("all", 9 / 21)):
        assert measured[domain]["acceptance_by_position"] == [share] * 3 + [0.0] * 4
    assert acceptance.acceptance_figures(measured) == {"a": 4.0, "b": 1.0, "all": 37 / 19}
    assert "tree" not in acceptance.acceptance_table(measured) and "tree" not in measured["all"]


def test_trees_are_measured_beside_the_chain(tiny_model: nn.Module) -> None:
    """On a real target: as many tokens of text, in a column of their own."""
    prompts = {"a": (Prompt(domain="a", ids=(5, 6, 7), row={}),)}
    how = {"max_tokens": 9, "eos_ids": set(), "max_length": 64}
    draft = DraftModel(draft_config())
    draft.initialize(generator=torch.Generator().manual_seed(0), final_norm_D=torch.ones(draft.config.hidden_size))
    chain, both = (acceptance.measure_acceptance(draft, tiny_model, prompts, tree_budget=budget, **how) for budget in (None, 7))
    assert {**both["all"], "tree": None} == {**chain["all"], "tree": None}
    tree = both["all"]["tree"]
    assert tree["budget"] == 7 and 1 <= tree["acceptance_length_repeats_cut"] <= 8
    table = acceptance.acceptance_table(both, before=chain)
    assert "| tree (no loops) | before" in table and f"| {tree['acceptance_length_repeats_cut']:>15.3f} | " in table and "7 proposals a round" in table


def write_prompts(path: Path, prompts: Sequence[str]) -> Source:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return Source(domain=path.stem, path=str(path), prompt="prompt")


def prompt_data(
        tmp_path: Path, *, train: Sequence[str] = ("one", "two"), heldout: Sequence[str] = ("three",), vocab_size: int = 4096, **changed: Any) -> PromptData:
    config = PromptConfig(**{"train": [write_prompts(tmp_path / "a.jsonl", train)], "heldout": [write_prompts(tmp_path / "b.jsonl", heldout)],
                             "sequence_length": 32, "heldout_prompts": 2, **changed})
    return PromptData(config, tokenizer=AutoTokenizer.from_pretrained(POCKET), vocab_size=vocab_size, max_length=2048)


def test_prompts_by_source_and_held_out_by_domain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = write_prompts(tmp_path / "c.jsonl", ["four", "five", "six"])
    source = write_prompts(tmp_path / "b.jsonl", ["three"])
    data = prompt_data(tmp_path, heldout=["three"], train=["one", "word " * 40, "two"])
    assert [[p.row["id"] for p in some] for some in data.train] == [["one", "two"]]   # too long for a row
    assert data.too_long == [1] and "a: 1 of 3 prompts left out: longer than data.sequence_length - 2 (30 tokens)\n" in capsys.readouterr().out
    both = prompt_data(tmp_path, heldout=["three"], train=["one", "two"])
    assert both.sha256 == data.sha256
    pooled = Source(domain="b", path=str(tmp_path / "c.jsonl"), prompt="prompt")
    data = PromptData(PromptConfig(train=[write_prompts(tmp_path / "a.jsonl", ["one"])], heldout=[source, pooled, more], heldout_prompts=2, sequence_length=32),
                      tokenizer=AutoTokenizer.from_pretrained(POCKET), vocab_size=4096, max_length=2048)
    assert {d: [p.row["id"] for p in some] for d, some in data.heldout.items()} == {"b": ["three", "five"], "c": ["four", "five"]}
    assert {d: [p.row["id"] for p in some] for d, some in data.heldout_file.items()} == {"b": ["three", "four", "five", "six"], "c": ["four", "five", "six"]}


def test_a_prompt_is_answered_once_by_the_first_source_that_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_prompts(tmp_path / "a.jsonl", ["one", "two", "one"]), write_prompts(tmp_path / "c.jsonl", ["two", "four", "two", "five"])
    again = Source(domain="a", path=str(tmp_path / "c.jsonl"), prompt="prompt")
    config = {"heldout": [write_prompts(tmp_path / "b.jsonl", ["three"])], "sequence_length": 32}
    how: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(POCKET), "vocab_size": 4096, "max_length": 2048}
    data = PromptData(PromptConfig(train=[first, second], **config), **how)
    assert [[p.row["id"] for p in some] for some in data.train] == [["one", "two"], ["four", "five"]] and data.duplicates == [1, 2]
    said = capsys.readouterr().out
    assert "a: 1 of 3 prompts left out: the same are before them" in said and "c: 2 of 4 prompts left out" in said
    with pytest.raises(ValueError, match=r"^data source 'a': every prompt is in an earlier source too\. Leave the source out"):
        PromptData(PromptConfig(train=[second, again], **config), **how)


@pytest.mark.parametrize("rendered", ["whole", "other_system"])
def test_a_prompt_that_was_rendered_before_is_refused(rendered: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Add two numbers."}], tokenize=False, add_generation_prompt=True)
    text = whole if rendered == "whole" else whole[:whole.index("Add")].strip() + "Something else"
    with pytest.raises(ValueError, match=r"^data source 'a', prompt '.*': begins with '.*', as the chat template's own text does: it was rendered before\."):
        prompt_data(tmp_path, train=["one", text], sequence_length=96)
    prompt_data(tmp_path, train=["one", f"What does {whole} mean?"], sequence_length=96)   # a prompt about templates


@pytest.mark.parametrize("changed", [{"train": ["one", "TWO"]}, {"train": ["two", "one"]}, {"heldout": ["THREE"]}, {"heldout": ["three", "four"]}], ids=str)
def test_other_prompts_have_another_hash(changed: dict[str, Any], tmp_path: Path) -> None:
    assert prompt_data(tmp_path).sha256 == prompt_data(tmp_path).sha256 != prompt_data(tmp_path, **changed).sha256


@pytest.mark.parametrize(("changed", "message"), [
    ({"train": ["one", "three"]}, "data: 1 held-out prompts are also trained on, such as 'three'. Use part: train and part: heldout."),
    ({"train": ["word " * 40]}, r"data source 'a': every prompt is longer than data.sequence_length - 2 \(30 tokens\). Raise it."),
    ({"vocab_size": 300}, "tokenizer: gives token [0-9]+, but the target's vocab_size is 300. They do not belong together."),
], ids=["trained_on", "long", "vocabulary"])
def test_prompts_that_cannot_be_used(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        prompt_data(tmp_path, **changed)


@pytest.mark.parametrize("missing", ["train", "heldout"])
def test_both_kinds_of_source_are_needed(missing: str, tmp_path: Path) -> None:
    config = {"train": [write_prompts(tmp_path / "a.jsonl", ["one"])], "heldout": [write_prompts(tmp_path / "b.jsonl", ["two"])], missing: []}
    with pytest.raises(ValueError, match="need at least one source each"):
        PromptData(PromptConfig(**config), tokenizer=AutoTokenizer.from_pretrained(POCKET), vocab_size=4096, max_length=2048)


def target_config(**changed: Any) -> Any:
    return SimpleNamespace(**{"hidden_size": 64, "vocab_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
                              "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, **changed})


TOKENIZER = SimpleNamespace(mask_token_id=3)


def test_what_a_recipe_leaves_out_is_the_target_s() -> None:
    shape, origin = resolve_shape(DraftShape(), config=target_config(), tokenizer=TOKENIZER)
    assert origin == "random weights"
    assert shape == DraftConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=4096,
        target_layer_ids=(1, 12, 23, 34, 45), num_target_layers=48, mask_token_id=3, block_size=8, sliding_window=1024, rope_theta=10000.0, rms_norm_eps=1e-5,
        max_position_embeddings=512)


def test_what_a_recipe_names_is_taken() -> None:
    named = DraftShape(num_hidden_layers=3, intermediate_size=40, num_attention_heads=6, num_key_value_heads=3, head_dim=10, target_layer_ids=[7, 2],
                       mask_token_id=9, block_size=4, sliding_window=None, rope_theta=5.0)
    shape, _ = resolve_shape(named, config=target_config(), tokenizer=TOKENIZER)
    assert (shape.num_hidden_layers, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.target_layer_ids,
            shape.mask_token_id, shape.block_size, shape.sliding_window, shape.rope_theta) == (3, 40, 6, 3, 10, (7, 2), 9, 4, None, 5.0)


@pytest.mark.parametrize(("target_layers", "draft_layers", "taps"), [
    (48, 5, (1, 12, 23, 34, 45)), (48, 1, (24,)), (6, 5, (1, 2, 3)), (6, 3, (1, 2, 3)), (4, 5, (2,)), (2, 5, (1,)), (1, 2, (0,))])
def test_taps_follow_the_published_rule_as_far_as_they_differ(target_layers: int, draft_layers: int, taps: tuple[int, ...]) -> None:
    shape, _ = resolve_shape(DraftShape(num_hidden_layers=draft_layers), config=target_config(num_hidden_layers=target_layers), tokenizer=TOKENIZER)
    assert shape.target_layer_ids == taps


def test_head_dim_of_a_target_that_names_none() -> None:
    shape, _ = resolve_shape(DraftShape(), config=target_config(head_dim=None), tokenizer=TOKENIZER)
    assert shape.head_dim == 16


def test_a_tokenizer_without_a_mask_token_needs_a_row_named() -> None:
    class NoMask:
        mask_token_id = None

        def __len__(self) -> int:
            return 4092

    with pytest.raises(RecipeError, match=r"^draft\.mask_token_id: .* \(4092, if it is below the vocab_size of 4096\)\.$"):
        resolve_shape(DraftShape(), config=target_config(), tokenizer=NoMask())
    shape, _ = resolve_shape(DraftShape(mask_token_id=4093), config=target_config(), tokenizer=NoMask())
    assert shape.mask_token_id == 4093


def test_without_a_recipe_the_default_one_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(["dflash-distill", "--print_config"]) == 0
    assert capsys.readouterr().out == to_yaml(default_recipe())
    assert train(["dflash-distill", "--trainer.max_steps", "3", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed.pop("trainer")["max_steps"] == 3 and printed == {k: v for k, v in yaml.safe_load(to_yaml(default_recipe())).items() if k != "trainer"}
    assert list(tmp_path.iterdir()) == []
    data = default_recipe().data
    assert [s.domain for s in data.train] == ["code", "code", "math", "chat", "agent"] and [s.domain for s in data.heldout] == ["code", "math", "chat", "agent"]
    assert [(s.domain, s.part) for s in (*data.train, *data.heldout) if s.stdlib] == [("code", "train"), ("code", "heldout")]
    assert all(Path(s.path).is_absolute() and Path(s.path).is_file() for s in (*data.train, *data.heldout) if s.path is not None)


def test_every_option_of_a_recipe_is_named() -> None:
    """Frozen: a renamed option breaks recipes and command lines that people have."""
    assert list(option_names(DistillRecipe)) == [
        "target", "run", "out", "features_from",
        "draft", *(f"draft.{n}" for n in ("init_from", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                                          "target_layer_ids", "mask_token_id", "block_size", "sliding_window", "full_attention_layers", "causal", "rope_theta",
                                          "partial_rotary_factor", "rope_scaling", "attention_sinks", "attention_value_scale", "mask_embedding",
                                          "draft_vocab_size", "output_multiplier", "logit_softcap")),
        "loss", *(f"loss.{n}" for n in ("ce_weight", "kl_weight", "z_weight", "weighting", "decay_gamma", "dpace_alpha", "chunk_rows", "anchors",
                                        "anchors_by")),
        "optim", *(f"optim.{n}" for n in ("kind", "muon_lr", "adamw_lr", "muon_weight_decay", "adamw_weight_decay", "momentum", "betas", "schedule",
                                          "warmup_steps", "warmup_ratio", "decay_share", "final_lr_ratio", "max_grad_norm")),
        "data", *(f"data.{n}" for n in ("train", "heldout", "sequence_length", "prompt_tokens", "prompts_per_document", "max_new_tokens", "temperatures",
                                        "generation_batch", "responses", "endpoint", "endpoint_model", "endpoint_concurrency", "shard", "features",
                                        "heldout_prompts", "heldout_new_tokens", "heldout_texts", "heldout_tree_budget")),
        "trainer", *(f"trainer.{n}" for n in ("max_steps", "batch_size", "accumulate_grad_batches", "precision", "accelerator", "devices",
                                              "checkpoint_every_steps", "log_every_steps", "val_every_steps", "wandb_project", "seed", "strategy",
                                              "num_nodes"))]
