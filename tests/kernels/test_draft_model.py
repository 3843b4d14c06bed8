"""A draft head packed for rounds of the resident kernel, and the twin's rounds: the head in torch, plain decoding, and the draft's context."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from step_models import TINY, state_for, tiny_weights
from tolerances import Bound, assert_equal, assert_within
from torch import Tensor

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.drafter import DFlashDrafter
from kilotok.dflash.model import DraftModel
from kilotok.dflash.sampling import Sampling
from kilotok.kernels.persistent import Heads, StepInputs, StepRef, StepShape, unpack_dense
from kilotok.kernels.persistent.draft_model import DraftLayer, DraftShape, DraftState, DraftWeights, split_gate_up
from kilotok.kernels.persistent.draft_ref import DRAFT_PHASES, OBSERVE_PHASES, RoundRef
from kilotok.kernels.persistent.round_inputs import TILE, RoundColumn, RoundInputs, limit_at, verify_length_ref
from kilotok.runtime.draft_weights import draft_weights

BF16 = torch.bfloat16
CONTEXT = 160
TARGET = replace(TINY, max_length=CONTEXT)
DRAFT = DraftShape(hidden_size=64, num_layers=2, heads=Heads(num_heads=4, num_kv_heads=2, head_dim=32, rms_eps=1e-6, window=12), intermediate_size=96,
                   num_taps=2, mask_token_id=7, rms_eps=1e-6, rope_theta=1e4, max_length=CONTEXT)
# The same terms with exp2 for exp, over chunks of the cache; over the seeds tried the largest error was 3e-15.
TWIN_FP64 = Bound(maximum=1e-11, rms=1e-11, reason="both in float64 without a rounding in between, summed in other orders")


def random_head(**options: object) -> DraftModel:
    """Weights that bf16 holds, in float64; sharp attention, and norms that are not ones."""
    config = DraftConfig(**{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                            "head_dim": 32, "vocab_size": TARGET.vocab_size, "target_layer_ids": (0, 1), "num_target_layers": 2, "mask_token_id": 7,
                            "rope_theta": 1e4, "max_position_embeddings": CONTEXT, **options})  # type: ignore[arg-type]
    model, g = DraftModel(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1]**-0.5, generator=g)
            else:
                parameter.uniform_(0.5, 1.5, generator=g)
    return model.to(BF16).double().requires_grad_(False)


@pytest.mark.parametrize(("options", "context"), [
    ({}, 126), ({"sliding_window": 9}, 126), ({"causal": "always"}, 5), ({"causal": "always", "sliding_window": 8, "block_size": 4}, 127),
    ({"block_size": 4, "mask_embedding": True}, 20)], ids=["all", "window", "causal", "causal, window, blocks of 4", "blocks of 4, trained mask"])
def test_the_twin_without_rounding_is_the_head_in_torch(options: dict[str, object], context: int) -> None:
    """Context read a few columns at a time, then the logits of a block that crosses the end of a page."""
    model, target = random_head(**options), tiny_weights_of(TARGET)
    features = torch.randn(context, 2, 64, generator=torch.Generator().manual_seed(4)).to(BF16)
    state = state_for(TARGET, wide=torch.float64)
    state.cache.fill_(torch.nan)
    weights = draft_weights(model, embedding_VD=target.embedding_VD, max_length=CONTEXT)
    drafts = DraftState.of(weights.shape, state, wide=torch.float64, narrow=torch.float64)
    drafts.cache.fill_(torch.nan)
    twin = RoundRef(target, state, weights, drafts, dtype=torch.float64)
    for start in range(0, context, 8):
        inputs = StepInputs.dead(8)
        for c in range(min(8, context - start)):
            inputs.set(c, token_id=0, slot=0, position=start + c)
        state.features_CXD[:min(8, context - start)] = features[start:start + 8]
        twin.observe(inputs)
    state.logits_CV.fill_(torch.nan)
    twin.draft(RoundInputs.of([RoundColumn(token_id=21, slot=0, position=context)]))

    head = unpack_dense(target.head).double()
    drafter = DFlashDrafter(model, embedding_VD=target.embedding_VD.double(), head_VD=head)
    drafter.observe(features.flatten(1).double())
    expected = drafter.logits(21)
    size = len(expected) + 1
    assert_within(state.logits_CV[1:size], expected, bound=TWIN_FP64, what="logits")
    assert bool(state.logits_CV[size:].isnan().all()), "a slot behind the block was computed"
    assert drafts.candidates_C[:size].tolist() == [21, *drafter.propose(21, count=size - 1, sampling=Sampling())]
    assert_within(drafts.confidence_C[1:size], expected.softmax(-1).amax(-1), bound=Bound(maximum=1e-5, rms=1e-5, reason="probabilities in fp32"))


def test_rounded_buffers_change_logits_by_some_bf16_roundings_and_no_more() -> None:
    model, target = random_head(), tiny_weights_of(TARGET)
    weights, logits = draft_weights(model, embedding_VD=target.embedding_VD, max_length=CONTEXT), []
    for wide, narrow in ((torch.float32, BF16), (torch.float64, torch.float64)):
        state = state_for(TARGET, wide=wide)
        twin = RoundRef(target, state, weights, DraftState.of(weights.shape, state, wide=wide, narrow=narrow), dtype=wide)
        state.features_CXD[:8] = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(4)).to(BF16)
        twin.observe(columns_of([(0, 0, p) for p in range(8)]))
        twin.draft(RoundInputs.of([RoundColumn(token_id=21, slot=0, position=8)]))
        logits.append(state.logits_CV[1:8].double())
    # a dozen roundings of 2**-9 one after the other, each of many independent values
    assert_within(logits[0], logits[1], bound=Bound(maximum=0.05, rms=0.02, reason="roundings to bf16 of two layers"))


def tiny_weights_of(shape: StepShape):  # type: ignore[no-untyped-def]
    return replace(tiny_weights(), shape=shape)


def columns_of(live: list[tuple[int, int, int]], *, num_columns: int = 8) -> StepInputs:
    """(id, slot, position) of the first columns."""
    inputs = StepInputs.dead(num_columns)
    for c, (token, slot, position) in enumerate(live):
        inputs.set(c, token_id=token, slot=slot, position=position)
    return inputs


class Scripted(RoundRef):
    """Proposals are what a script says of (sequence, position): the token, and how likely the draft finds it."""

    script: Callable[[int, int], tuple[int, float]] | None = None

    def draft(self, inputs: RoundInputs) -> None:
        super().draft(inputs)
        if self.script is None:
            return
        block = self.block(inputs)
        for c in (block.slots_C >= 0).nonzero().flatten().tolist():
            if c % TILE:
                self.draft_state.candidates_C[c], self.draft_state.confidence_C[c] = self.script(int(block.slots_C[c]), int(block.positions_C[c]))


SEQUENCES = (RoundColumn(token_id=17, slot=1, position=0), RoundColumn(token_id=90, slot=0, position=0, temperature=1.0, seed=2**40 + 3),
             RoundColumn(token_id=5, slot=2, position=CONTEXT - 11))
LENGTH = 12


def plain_text(kept: dict[str, StepRef]) -> tuple[list[list[int]], RoundRef]:
    """Each sequence's tokens behind its first, decoded plainly; and the state that observed them one at a time."""
    if "plain" not in kept:
        kept["plain"] = fresh(3)
        inputs = StepInputs.dead(32)
        for c, one in enumerate(SEQUENCES):
            inputs.set(c, **{name: getattr(one, name) for name in ("token_id", "slot", "position", "temperature", "seed")})
        texts = kept["plain"].run_steps(inputs, LENGTH - 1)[:, :3].T.tolist()
        kept["texts"] = texts
    return kept["texts"], kept["plain"]  # type: ignore[return-value]


def fresh(sequences: int, **change: object) -> Scripted:
    weights = tiny_weights_of(TARGET)
    state = state_for(TARGET, num_columns=32, num_slots=sequences)
    shape = replace(DRAFT, **change)  # type: ignore[arg-type]
    twin = Scripted(weights, state, DraftWeights.random(shape, seed=5, device="cpu"), DraftState.of(shape, state))
    for tensor in (state.cache, state.features_CXD, state.logits_CV, twin.draft_state.cache, twin.draft_state.residual_CD, twin.draft_state.keys_SCA):
        tensor.fill_(torch.nan)
    for cache in (state.cache, twin.draft_state.cache):     # of what the last sequence has read before it comes in
        cache[:, state.pages_SP[-1].long()] = torch.randn(1, 2, 1, 2, 128, 32, generator=torch.Generator().manual_seed(8)).to(BF16)
    return twin


def texts_of(tokens_RC: Tensor, sequences: int) -> list[list[int]]:
    """What every sequence committed, in order; a round's tokens are at the beginning of its tile."""
    tiles = tokens_RC.view(len(tokens_RC), -1, TILE)
    for tile in tiles.flatten(0, 1).tolist():
        assert [t >= 0 for t in tile] == sorted((t >= 0 for t in tile), reverse=True), "a gap among committed tokens"
    return [[t for t in tiles[:, s].flatten().tolist() if t >= 0] for s in range(sequences)]


KEPT: dict[str, StepRef] = {}


@pytest.mark.parametrize(("name", "limits"), [("random", (7, 7, 7)), ("right", (7, 3, 7)), ("wrong", (7, 1, 0)), ("sometimes", (7, 7, 5)),
                                              ("blocks of 4", (7, 2, 7))])
def test_rounds_commit_the_text_of_plain_decoding_and_leave_a_whole_context(name: str, limits: tuple[int, ...]) -> None:
    """Greedy and sampled sequences, one of them up to the end of the context. Whatever is proposed decides how many tokens a round commits, never which."""
    expected, plain = plain_text(KEPT)
    twin = fresh(3, **({"block_size": 4} if name == "blocks of 4" else {}))
    at = {one.slot: (one.position, expected[s]) for s, one in enumerate(SEQUENCES)}

    def script(slot: int, position: int) -> tuple[int, float]:
        start, text = at[slot]
        token = text[position - start - 1] if position - start <= len(text) else 0
        is_right = name in ("right", "blocks of 4") or (name == "sometimes" and position % 3)
        return (token if is_right else (token + 1) % TARGET.vocab_size), 0.5

    twin.script = None if name == "random" else script
    inputs = RoundInputs.of([replace(one, limit=limit) for one, limit in zip(SEQUENCES, limits, strict=True)] + [None])
    rounds = 3 if name == "right" else 4
    tokens, verified = twin.run_rounds(inputs, rounds)
    assert tokens.shape == (rounds, 32) and verified.shape == (rounds, 4)
    found = texts_of(tokens, 4)
    assert found[3] == [] and set(verified[:, 3].tolist()) == {-1}
    for s, one in enumerate(SEQUENCES):
        room = CONTEXT - one.position
        assert found[s][:LENGTH - 1] == expected[s][:len(found[s])]
        counts = (tokens.view(rounds, 4, TILE)[:, s] >= 0).sum(1).tolist()
        limit = min(limits[s], twin.draft_shape.block_size - 1)
        before = 0
        for count, v in zip(counts, verified[:, s].tolist(), strict=True):
            if before < room:
                assert v == limit_at(one.position + before, limit=limit, block_size=8, max_length=CONTEXT) and 1 <= count <= v + 1
                if name in ("right", "blocks of 4") and before + v < LENGTH - 1:
                    assert count == v + 1
                elif name == "wrong":
                    assert count == 1
            else:
                assert (v, count) == (-1, 0)
            before += count
        assert before <= room
        observed = min(before, LENGTH - 1)
        positions = torch.arange(one.position, one.position + observed)
        pages = twin.state.pages_SP[one.slot].long()[positions // 128]
        for mine, its in ((twin.draft_state, plain.draft_state), (twin.state, plain.state)):
            assert_equal(mine.cache[:, pages, :, :, positions % 128], its.cache[:, pages, :, :, positions % 128], bits=True, what=f"cache of sequence {s}")


def test_a_sequence_that_has_filled_its_context_is_dead() -> None:
    twin = fresh(1)
    tokens, verified = twin.run_rounds(RoundInputs.of([RoundColumn(token_id=5, slot=0, position=CONTEXT - 3), None, None, None]), 5)
    assert len(texts_of(tokens, 1)[0]) == 3
    assert verified[0, 0] == 1 and verified[-1].tolist() == [-1] * 4
    assert int((verified[:, 0] >= 0).sum()) in (2, 3) and bool((tokens[verified[:, 0] < 0] == -1).all())


def test_single_phases_are_a_round() -> None:
    one, other = fresh(1), fresh(1)
    inputs = RoundInputs.of([RoundColumn(token_id=5, slot=0, position=0), None, None, None])
    expected = one.round(inputs.clone())
    block = other.block(inputs)
    other.phase(DRAFT_PHASES[0], block)
    for layer in range(2):
        for name in DRAFT_PHASES[1:-2]:
            other.phase(name, block, layer=layer)
    for name in DRAFT_PHASES[-2:]:
        other.phase(name, block)
    columns = other.choose(inputs)
    StepRef.step(other, columns)
    assert_equal(other.accept(inputs), expected)
    for name in OBSERVE_PHASES:
        other.phase(name, other.committed(columns))
    assert_equal(other.draft_state.cache.nan_to_num(), one.draft_state.cache.nan_to_num(), bits=True)
    assert_equal(other.draft_state.candidates_C, one.draft_state.candidates_C)


def test_the_verify_length_is_worth_most_and_the_smallest_of_equals() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        confidence, cost, scale = torch.rand(7, generator=g), torch.rand(8, generator=g) + 0.5, 2 * torch.rand(8, generator=g)
        together = (confidence.double() * scale[1:].double()).clamp(max=1).cumprod(0)
        worth = torch.cat((torch.ones(1), 1 + together.cumsum(0))).double() / cost.double()
        for limit in (0, 3, 7):
            assert verify_length_ref(confidence, cost_8=cost, scale_8=scale, limit=limit) == int(worth[:limit + 1].argmax())
    ones = torch.ones(8)
    assert verify_length_ref(torch.full((7,), 0.5), cost_8=ones, scale_8=ones, limit=5) == 5
    assert verify_length_ref(torch.zeros(7), cost_8=ones, scale_8=ones, limit=7) == 0
    assert verify_length_ref(torch.zeros(7), cost_8=torch.arange(8, 0, -1.0), scale_8=ones, limit=7) == 7     # costs that fall: always the limit
    assert [limit_at(p, limit=7, block_size=8, max_length=20) for p in (0, 11, 12, 18, 19)] == [7, 7, 6, 0, 0]
    assert limit_at(0, limit=7, block_size=4, max_length=20) == 3


def test_packing_a_draft_loses_nothing() -> None:
    g = torch.Generator().manual_seed(6)

    def matrix(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(BF16)

    layers = [DraftLayer(attention_norm=matrix(64), qkv=matrix(256, 64), qk_norm=matrix(6, 32), out=matrix(64, 128), mlp_norm=matrix(64), gate=matrix(96, 64),
                         up=matrix(96, 64), down=matrix(64, 96)) for _ in range(2)]
    ends = {"fc": matrix(64, 128), "hidden_norm_D": matrix(64), "norm_D": matrix(64), "mask_D": matrix(64)}
    weights = DraftWeights.pack(DRAFT, iter(layers), **ends)
    for i, layer in enumerate(layers):
        for name in ("qkv", "out", "down"):
            assert_equal(unpack_dense(getattr(weights, name).matrix(i)), getattr(layer, name), what=name)
        rows = unpack_dense(weights.gate_up.matrix(i))
        gate, up = split_gate_up(rows.T)
        assert_equal(gate.T, layer.gate)
        assert_equal(up.T, layer.up)
        assert_equal(rows[16:24], layer.gate[8:16])
        assert_equal(rows[24:32], layer.up[8:16])
        assert_equal(unpack_dense(weights.keys)[i * 128:(i + 1) * 128], layer.qkv[128:], what="keys and values")
        for name in ("attention_norm", "mlp_norm"):
            assert_equal(getattr(weights, f"{name}_LD")[i], getattr(layer, name))
        assert_equal(weights.qk_norm_LHK[i], layer.qk_norm)
    assert_equal(unpack_dense(weights.fc), ends["fc"])
    for name in ("hidden_norm_D", "norm_D", "mask_D"):
        assert_equal(getattr(weights, name), ends[name])
    with pytest.raises(ValueError, match=r"^DraftWeights: the draft has 2 layers; got 1\.$"):
        DraftWeights.pack(DRAFT, layers[:1], **ends)
    with pytest.raises(ValueError, match=r"^DraftWeights: the draft has 2 layers; got more\.$"):
        DraftWeights.pack(DRAFT, [*layers, layers[0]], **ends)
    with pytest.raises(TypeError, match=r"^DraftWeights: mask must be bf16"):
        DraftWeights.pack(DRAFT, layers, **{**ends, "mask_D": ends["mask_D"].float()})


def test_what_rounds_are_not_built_for_is_refused() -> None:
    for change, error in (({"hidden_size": 72}, "hidden_size must be a multiple of 32"), ({"intermediate_size": 40}, "intermediate_size must be"),
                          ({"block_size": 9}, "built for blocks of 2 to 8 slots"),
                          ({"heads": replace(DRAFT.heads, rms_eps=None)}, "built for drafts with norms")):
        with pytest.raises(NotImplementedError, match=f"^DraftShape: {error}"):
            replace(DRAFT, **change)  # type: ignore[arg-type]
    for change, error in (({"num_taps": 3}, "taps must be the target's, 2; got 3"), ({"max_length": 99}, "max_length must be"),
                          ({"mask_token_id": 300}, r"mask_token_id must be a token of the target, 0\.\.299")):
        with pytest.raises(ValueError, match=f"^DraftShape: {error}"):
            replace(DRAFT, **change).require_target(TARGET)  # type: ignore[arg-type]
    anchor = RoundColumn(token_id=1, slot=0, position=0)
    for one in (replace(anchor, temperature=1.0, top_p=0.9), replace(anchor, temperature=1.0, top_k=5)):
        with pytest.raises(NotImplementedError, match=r"^RoundInputs: rounds pick greedily or by temperature alone"):
            RoundInputs.of([one])
    with pytest.raises(ValueError, match=r"^RoundInputs: limit counts the proposals that are verified, 0\.\.7; got 8"):
        RoundInputs.of([replace(anchor, limit=8)])
    with pytest.raises(ValueError, match=r"^RoundInputs: a sequence has one tile; got slots \[0, 0\]"):
        RoundInputs.of([anchor, anchor])
