"""Trees on transformers models whose layers slide: in all layers, in some, in none although the config names a window."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from kilotok.dflash.context import Taps
from kilotok.dflash.hf_target import HFTarget
from kilotok.dflash.tree import ANCHOR, DraftTree, chain

WINDOW, VOCAB = 6, 200
PROMPT = torch.randint(VOCAB, (2 * WINDOW + 3,), generator=torch.Generator().manual_seed(0)).tolist()   # its first tokens are out of every node's sight
ANCHOR_ID = 9
# deep enough that nodes lose sight of the prompt, of the anchor and of their first ancestors, with branches at the top and far down
FORKED = DraftTree(token_ids=(70, 81, 92, 92, 15, 70, 8, 9, 33, 34), parents=(ANCHOR, ANCHOR, 0, 1, 3, 4, 5, 6, 7, 6))
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt-oss: some slide, sinks": (GptOssForCausalLM, GptOssConfig, {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
                                                                     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "mistral: all slide": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "mixtral: all slide": (MixtralForCausalLM, MixtralConfig, {"sliding_window": WINDOW, "num_local_experts": 4}),
    "qwen2: some slide": (Qwen2ForCausalLM, Qwen2Config, {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-moe: none slides, window 0": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {"sliding_window": WINDOW, **EXPERTS}),
}
SLIDING = [name for name in MODELS if "none" not in name]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, config, changes = MODELS[name]
    model: nn.Module = kind(config(**{**SHAPE, **changes}))
    model.set_experts_implementation("eager")   # type: ignore[operator]  # grouped_mm has no float64
    return model.double().eval()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return make(request.param)


@pytest.fixture
def taps(model: nn.Module) -> Iterator[Taps]:
    with Taps(model, layer_ids=(0, 2)) as taps:
        yield taps


def largest_difference(kind: type[HFTarget], model: nn.Module, taps: Taps, tree: DraftTree) -> float:
    """Of the logits of every node, and of what is read after it was kept, from the same tokens in one forward without a cache."""
    target = kind(model, taps=taps, max_length=60)
    target.read(PROMPT)
    largest = 0.0
    for node in range(ANCHOR, len(tree)):
        path = tree.path(node)
        text = [*PROMPT, ANCHOR_ID, *(tree.token_ids[n] for n in path), 8, 9]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        taps.take()
        step = target.read_tree(ANCHOR_ID, tree)
        target.keep(path)
        after = target.read([8, 9])
        assert target.length == len(text)
        largest = max(largest, float((step.logits_TV[node + 1] - expected[-3]).abs().max()), float((after.logits_TV - expected[-2:]).abs().max()))
        target.rewind(len(PROMPT))
    return largest


# transformers' norms and routers round to fp32, so that double precision gives about 1e-7 of logits that are some units large, and mostly much less
BOUND = 1e-5


def test_a_node_is_its_path_read_without_a_tree(model: nn.Module, taps: Taps) -> None:
    assert largest_difference(HFTarget, model, taps, FORKED) < BOUND
    assert largest_difference(HFTarget, model, taps, chain((4, 5, 6, 7, 8, 9, 10))) < BOUND


class NoWindow(HFTarget):
    def _additive(self, visible: Tensor) -> Tensor:
        start = self.length
        everything = torch.cat((visible.new_ones(visible.shape[0], start), visible[:, start:]), dim=1)
        return super()._additive(everything)


class WindowOneShort(HFTarget):
    def _additive(self, visible: Tensor) -> Tensor:
        first = visible.int().argmax(1)
        return super()._additive(visible.scatter(1, first[:, None], False) if bool((first > 0).all()) else visible)


@pytest.mark.parametrize("fault", [NoWindow, WindowOneShort])
@pytest.mark.parametrize("name", SLIDING)
def test_a_wrong_window_is_found(name: str, fault: type[HFTarget]) -> None:
    model = make(name)
    with Taps(model, layer_ids=(0, 2)) as taps:
        assert largest_difference(fault, model, taps, FORKED) > 1000 * BOUND


def test_layers_of_a_third_kind_are_refused() -> None:
    config = Llama4TextConfig(**{**SHAPE, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_hidden_layers": 1})
    model = Llama4ForCausalLM(config)
    with Taps(model, layer_ids=(0,)) as taps, pytest.raises(NotImplementedError, match=r"^target: trees are verified by layers of full or sliding attention; "
                                                            r"Llama4ForCausalLM has 'chunked_attention'\. Measure it with chains\.$"):
        HFTarget(model, taps=taps, max_length=40).read_tree(5, chain((6, 7)))
