"""z-lab's own package reads what we write: dflash 0.1.0 of PyPI, unmodified, under the transformers that is pinned here.

Loading is that of its benchmark.py (`load_transformers_models`), drafting that of its `dflash_generate`: the embedding scale is applied by the caller, the
output multiplier and the softcap in `compute_logits`, and the cache is cut back after every block. Windows and causality need no judgement: its masks are
those of our config in every form that it has. In two conventions it differs, and both are held here: the state it takes for a tap on the target's last layer
is the one after the final norm, and it has no sinks, value scale, partial rotary, trained mask vector or reduced vocabulary.

There is no importorskip: a machine without the package fails here (`make test` installs it).
"""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import POCKET, ROOT
from draft_forms import CHUNKS, LENGTHS, WINDOW, deviation, embedding_of, ids_of, make_draft, make_target, serve_form, train_form
from tolerances import Bound, assert_within
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dflash
from dflash import model as zlab
from kilotok.dflash.checkpoint import read_draft, write_draft
from kilotok.dflash.context import Taps
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.generate import Round, generate
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling

MIXED = {"sliding_window": WINDOW, "full_attention_layers": (1,)}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0}
FORMS: dict[str, dict[str, Any]] = {
    "full attention": {}, "sliding": {"sliding_window": WINDOW}, "window of the block": {"sliding_window": 8}, "mixed layers": MIXED,
    "causal": {"causal": "always"},
    "causal and sliding": {"causal": "always", "sliding_window": WINDOW}, "causal where it slides": {**MIXED, "causal": "sliding"},
    "multiplier and softcap": {"output_multiplier": 0.2, "logit_softcap": 20.0}, "embedding scale": {"input_embedding_scale": 8.0},
    "yarn": {"rope_scaling": YARN},
    "blocks of 16": {"block_size": 16}, "blocks of 16, sliding": {"block_size": 16, "sliding_window": 17}}
# The largest difference seen was 1.1e-6.
FP32 = Bound(maximum=1e-5, rms=1e-5, reason="the same fp32 terms in another order, and angles in fp32 at positions up to 46, through two sharp layers")


def load_theirs(directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """As its benchmark.py loads a draft, which must find every tensor and know all of them."""
    assert "DFlash2DraftModel" not in AutoConfig.from_pretrained(directory).architectures   # by which it chooses the class
    draft, info = zlab.DFlashDraftModel.from_pretrained(directory, attn_implementation="sdpa", dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return draft.eval()


def blocks_of(theirs: Any, target: nn.Module, anchor: int) -> Tensor:
    """Embeddings of [anchor, MASK, ..., MASK] as its loop makes them."""
    ids = torch.tensor([[anchor, *[theirs.mask_token_id] * (theirs.block_size - 1)]])
    embedded: Tensor = zlab._raw_input_embeddings(target, ids, float(zlab._draft_value(theirs.config, "input_embedding_scale", 1.0)))
    return embedded


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return make_target(tmp_path_factory.mktemp("target") / "tiny", dtype=torch.float32)


def exported(directory: Path, draft: DraftModel, *, head_VD: Tensor | None = None) -> Path:
    write_draft(directory, draft, metadata={"target": {}}, head_VD=head_VD)
    return directory


def test_the_package_is_theirs_and_its_version_is_the_one_compared() -> None:
    """Our dflash/ folder has no __init__.py: an installed package of that name wins even where the repository root comes first on the path."""
    assert importlib.metadata.version("dflash") == "0.1.0"
    assert dflash.__file__ is not None and not Path(dflash.__file__).resolve().is_relative_to(ROOT / "dflash")


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_hidden_states_and_logits_are_theirs(target: nn.Module, form: str, tmp_path: Path) -> None:
    """Every anchor of a text of 31 tokens: the block with all of its context at once, and round by round with their cache, against both of our forms."""
    exported(tmp_path, make_draft(target, **{"window": None, **FORMS[form]}))   # type: ignore[arg-type]
    theirs, ours, head, ids = load_theirs(tmp_path), read_draft(tmp_path, dtype=torch.float32), embedding_of(target), ids_of(3)
    assert theirs.block_size == ours.config.block_size and theirs.mask_token_id == ours.config.mask_token_id
    assert tuple(theirs.target_layer_ids) == ours.config.target_layer_ids
    n, features = theirs.block_size, zlab.extract_context_feature(target(torch.tensor([ids]), output_hidden_states=True).hidden_states, theirs.target_layer_ids)
    trained = train_form(ours, target, [(0, 3)], length=60)   # behind another document, many blocks at once
    working: list[Tensor] = []
    ours.norm.register_forward_hook(lambda module, inputs, output: working.append(output[0, 0, 1:]))
    served = serve_form(ours, target, 3, head_VD=head)
    assert set(served) == set(range(1, LENGTHS[3])) and len(working) == len(served)

    def compare(hidden: Tensor, position: int, what: str) -> None:
        logits = theirs.compute_logits(hidden, zlab._output_head(target))
        where = f"{form}, {what}, anchor at {position}"
        assert_within(trained[0, 3, position], hidden[0], bound=FP32, what=f"{where}: training, hidden states")
        assert_within(working[position - 1], hidden[0], bound=FP32, what=f"{where}: drafting, hidden states")
        assert_within(ours.logits(trained[0, 3, position], head_UD=ours.head_rows(head)), logits[0], bound=FP32, what=f"{where}: training, logits")
        assert_within(served[position], logits[0], bound=FP32, what=f"{where}: drafting, logits")

    for position in served:
        compare(theirs(target_hidden=features[:, :position], noise_embedding=blocks_of(theirs, target, ids[position]),
                       position_ids=torch.arange(position + n)[None])[:, 1 - n:], position, "at once")
    cache, start = zlab._make_cache(theirs.config), 0
    for size in CHUNKS["rounds"]:   # the first longer than the window, the others within it, cut back to what was committed
        new, start = features[:, start:start + size], start + size
        compare(theirs(target_hidden=new, noise_embedding=blocks_of(theirs, target, ids[start]), position_ids=torch.arange(start - size, start + n)[None],
                       past_key_values=cache, use_cache=True)[:, 1 - n:], start, "with its cache")
        zlab._crop_to(cache, start)


def test_the_comparison_can_fail(target: nn.Module, tmp_path: Path) -> None:
    """One convention of our config.json changed, and the hidden states are others; what says nothing about them changes nothing."""
    (tmp_path / "a").mkdir()
    config = make_draft(target, window=None).config
    exported(tmp_path / "a", make_draft(target, window=None))
    features = torch.randn(1, 20, config.num_features, generator=torch.Generator().manual_seed(0))

    def hidden(directory: Path) -> Tensor:
        theirs = load_theirs(directory)
        with torch.no_grad():
            return theirs(target_hidden=features, noise_embedding=blocks_of(theirs, target, 5), position_ids=torch.arange(28)[None])[:, 1:]   # type: ignore[no-any-return]

    whole = hidden(tmp_path / "a")
    for number, (name, changed) in enumerate({"window": {"sliding_window": WINDOW}, "causality": {"causal": "always"}, "theta": {"rope_theta": 1e3},
                                              "nothing": {"num_target_layers": 5}}.items()):
        (tmp_path / str(number)).mkdir()
        exported(tmp_path / str(number), make_draft(target, **{"window": None, **changed}))   # type: ignore[arg-type]
        assert (deviation(hidden(tmp_path / str(number)), whole) > 1000 * FP32.maximum) == (name != "nothing"), name


# what it has no word for: (option, the tensors that it does not know, whether the tokens it shares with us have our logits)
UNKNOWN = {
    "sinks": ({"attention_sinks": True}, {f"layers.{n}.self_attn.attention_sink_bias" for n in range(2)}, False),
    "value scale": ({"attention_value_scale": 0.612}, set(), False), "partial rotary": ({"partial_rotary_factor": 0.5}, set(), False),
    "mask vector": ({"mask_embedding": True}, set(), False), "reduced vocabulary": ({"draft_vocab_size": 500}, {"d2t", "t2d", "lm_head.weight"}, True)}


@pytest.mark.parametrize("option", UNKNOWN)
@torch.no_grad()
def test_options_that_it_does_not_have_are_ignored_without_an_error(target: nn.Module, option: str, tmp_path: Path) -> None:
    """So a draft with one of them is for vLLM and SGLang (README, Limits). With a reduced vocabulary it proposes from all tokens, by the target's head."""
    options, unknown, is_same = UNKNOWN[option]
    head, ids = embedding_of(target), ids_of(3)
    exported(tmp_path, make_draft(target, window=None, **options), head_VD=head)   # type: ignore[arg-type]
    theirs, info = zlab.DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="sdpa", dtype=torch.float32, output_loading_info=True)
    assert set(info["unexpected_keys"]) == unknown and not info["missing_keys"]
    features = zlab.extract_context_feature(target(torch.tensor([ids]), output_hidden_states=True).hidden_states, theirs.target_layer_ids)
    hidden = theirs.eval()(target_hidden=features[:, :20], noise_embedding=blocks_of(theirs, target, ids[20]), position_ids=torch.arange(28)[None])[:, 1:]
    ours = serve_form(read_draft(tmp_path, dtype=torch.float32), target, 3, head_VD=head)[20]
    drafted = ours[0].isfinite()
    assert (deviation(ours[:, drafted], theirs.compute_logits(hidden, zlab._output_head(target))[0][:, drafted]) < FP32.maximum) == is_same


# --- taps ---


@pytest.mark.parametrize("taps", [(0,), (2, 0), (0, 1, 2)])
@torch.no_grad()
def test_features_are_theirs(target: nn.Module, taps: tuple[int, ...]) -> None:
    with Taps(target, layer_ids=taps) as entered:
        states = target(torch.tensor([ids_of(3)]), output_hidden_states=True).hidden_states
        assert torch.equal(entered.take(), zlab.extract_context_feature(states, list(taps)))


@torch.no_grad()
def test_a_tap_on_the_last_layer_is_before_the_norm_here_and_after_it_there(target: nn.Module) -> None:
    """transformers gives the last layer's states only after the final norm. The published rule never taps it, so the paper's drafts do not
    tell; MiMo's do tap it (69 of 70), and vLLM takes the residual stream behind a layer, before any norm, as we do. For z-lab's loop leave it out."""
    with Taps(target, layer_ids=(3,)) as entered:
        states = target(torch.tensor([ids_of(3)]), output_hidden_states=True).hidden_states
        ours = entered.take()
    theirs = zlab.extract_context_feature(states, [3])
    assert deviation(ours, theirs) > 0.1
    assert torch.equal(target.model.norm(ours), theirs)   # type: ignore[union-attr, operator]


# --- the whole loop, on the pocket and its trained draft, so that rounds of every length occur ---

MAX_TOKENS = 90
TEXT = "What is 7 + 8?"
LOOPS: dict[str, dict[str, Any]] = {
    "sliding": {"sliding_window": 32}, "full attention": {"sliding_window": None},
    "causal where it slides": {"sliding_window": 32, "full_attention_layers": (2,), "causal": "sliding"}, "blocks of 16": {"block_size": 16}}


class BeforeTheNorm(nn.Module):
    """The pocket with the last layer's states as its hooks give them, in the place where transformers has normed ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config, self.device = model, model.config, torch.device("cpu")

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()   # type: ignore[operator, no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()   # type: ignore[operator, no-any-return]

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with Taps(self.model, layer_ids=(self.config.num_hidden_layers - 1,)) as last:   # type: ignore[union-attr, operator]
            output = self.model(*arguments, **options)
            if output.hidden_states is not None:
                output.hidden_states = (*output.hidden_states[:-1], last.take())
        return output


@pytest.fixture(scope="module")
def pocket_target() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(POCKET, attn_implementation="sdpa", dtype=torch.float32).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(POCKET)(TEXT * 6).input_ids
    assert len(ids) > 32   # longer than the window
    return ids


def their_text(theirs: Any, target: nn.Module, prompt: list[int], monkeypatch: pytest.MonkeyPatch, *,
               stop: list[int] | None = None) -> tuple[list[int], list[int]]:
    """(tokens, accepted lengths) of its loop. Its statistics are behind a timer that synchronizes a GPU; there is none to wait for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = zlab.dflash_generate(theirs, target, torch.tensor([prompt]), MAX_TOKENS, stop, return_stats=True)
    return found.output_ids[0, len(prompt):].tolist(), found.acceptance_lengths


def our_rounds(ours: DraftModel, target: nn.Module, prompt: list[int], *, stop: tuple[int, ...] = ()) -> list[Round]:
    with Taps(target, layer_ids=ours.config.target_layer_ids) as taps:
        drafter = DFlashDrafter(ours, embedding_VD=embedding_of(target), head_VD=target.lm_head.weight.detach())   # type: ignore[union-attr, arg-type]
        return list(generate(HFTarget(target, taps=taps, max_length=512), prompt=prompt, drafter=drafter, sampling=Sampling(), max_tokens=MAX_TOKENS,
                             eos_ids=stop))


def whole_blocks(lengths: list[int], *, block_size: int) -> list[int]:
    """Accepted lengths of the rounds that are a whole block away from the last token.

    After them its loop shortens the block that the draft sees, and a slot that sees the slots behind it then says something else. Here, as in vLLM, the
    block stays as long as it was in training, and what could not be used is left out afterwards.
    """
    done = [1 + sum(lengths[:n]) for n in range(len(lengths))]
    return [length for length, before in zip(lengths, done, strict=True) if MAX_TOKENS + 1 - before >= block_size]


def assert_same_decoding(rounds: list[Round], theirs: tuple[list[int], list[int]], *, block_size: int) -> list[int]:
    """The accepted lengths compared."""
    text, lengths = theirs
    assert [t for r in rounds for t in r.tokens] == text
    ours = whole_blocks([len(r.tokens) for r in rounds[1:]], block_size=block_size)
    assert ours == whole_blocks(lengths, block_size=block_size)
    return ours


@pytest.mark.parametrize("form", LOOPS)
def test_their_loop_says_and_accepts_what_ours_does(pocket_target: nn.Module, prompt: list[int], form: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    trained = read_draft(POCKET.parent / "draft", dtype=torch.float32)
    moved = DraftModel(dataclasses.replace(trained.config, target_layer_ids=(2, 4, 3), **LOOPS[form]))   # 3 in the place of the last, 5: see above
    moved.load_state_dict(trained.state_dict())
    exported(tmp_path, moved)
    theirs, ours, size = load_theirs(tmp_path), read_draft(tmp_path, dtype=torch.float32), moved.config.block_size
    rounds = our_rounds(ours, pocket_target, prompt)
    lengths = assert_same_decoding(rounds, their_text(theirs, pocket_target, prompt, monkeypatch), block_size=size)
    assert {1, 2, 3} <= set(lengths) and max(lengths) >= 7, lengths   # of every kind, else this says little
    stop = [t for r in rounds for t in r.tokens][MAX_TOKENS // 2]
    stopped = our_rounds(ours, pocket_target, prompt, stop=(stop,))
    assert stopped[-1].tokens[-1] == stop
    assert_same_decoding(stopped, their_text(theirs, pocket_target, prompt, monkeypatch, stop=[stop]), block_size=size)


def test_the_pocket_s_draft_taps_the_last_layer_and_needs_it_before_the_norm(pocket_target: nn.Module, prompt: list[int],
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the target's either way; with the normed states fewer proposals are accepted."""
    directory = POCKET.parent / "draft"
    theirs, rounds = load_theirs(directory), our_rounds(read_draft(directory, dtype=torch.float32), pocket_target, prompt)
    assert_same_decoding(rounds, their_text(theirs, BeforeTheNorm(pocket_target), prompt, monkeypatch), block_size=8)
    text, lengths = their_text(theirs, pocket_target, prompt, monkeypatch)
    assert text == [t for r in rounds for t in r.tokens] and len(lengths) > len(rounds[1:])
