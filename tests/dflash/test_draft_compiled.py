"""The draft head trained with block masks, dense and compiled, computes one thing; on a CPU the mask path runs uncompiled."""

import copy

import pytest
import torch
from tolerances import Bound, assert_within
from torch import Tensor

from kilotok.dflash.config import DraftConfig
from kilotok.dflash.model import Blocks, DraftModel

LENGTH, ANCHORS, VOCAB = 512, 64, 1000
CONFIG = DraftConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=VOCAB,
                     target_layer_ids=(0, 1), num_target_layers=4, mask_token_id=VOCAB - 1, sliding_window=128, full_attention_layers=(2,), causal="sliding",
                     attention_sinks=True, attention_value_scale=0.6, partial_rotary_factor=0.5, mask_embedding=True)
FP32 = Bound(maximum=1e-4, rms=1e-4, reason="fp32 products without TF32, summed in another order through three layers")
BF16 = Bound(maximum=6e-2, rms=2e-2, reason="bf16 activations through three layers, rounded at other places when compiled")


def make(device: str, dtype: torch.dtype) -> tuple[DraftModel, Tensor, Blocks, Tensor]:
    """(draft, features, blocks, embedding): two rows, one packed, one with invalid anchors."""
    generator = torch.Generator().manual_seed(0)
    draft = DraftModel(CONFIG)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    positions = torch.stack([torch.arange(LENGTH), torch.cat((torch.arange(200), torch.arange(LENGTH - 200)))])
    anchors = torch.stack([torch.randperm(LENGTH, generator=generator)[:ANCHORS].sort().values for _ in range(2)])
    anchors[0, -7:] = 0
    ids = torch.randint(VOCAB, (2, ANCHORS), generator=generator)
    features, embedding = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((2, LENGTH, 512), (VOCAB, 256)))
    blocks = Blocks(*(t.to(device) for t in (anchors, ids, positions)))
    return draft.to(device, dtype), features, blocks, embedding


def outcome(draft: DraftModel, features: Tensor, blocks: Blocks, embedding: Tensor, *, flex: bool) -> dict[str, Tensor]:
    """Hidden states and every gradient."""
    hidden = draft(features, blocks=blocks, embedding_VD=embedding, flex=flex)
    draft.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=hidden.device, dtype=hidden.dtype).view_as(hidden)).sum().backward()
    return {"hidden states": hidden.detach(), **{f"gradient of {n}": p.grad for n, p in draft.named_parameters() if p.grad is not None}}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_path_computes_what_the_dense_one_does(flex_on_cpu: None) -> None:
    draft, features, blocks, embedding = make("cpu", torch.float32)
    with_mask, dense = (outcome(draft, features, blocks, embedding, flex=flex) for flex in (True, False))
    assert len(dense) == 1 + len(list(draft.parameters()))
    for name, expected in dense.items():
        assert_within(with_mask[name], expected, bound=FP32, what=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FP32), (torch.bfloat16, BF16)], ids=["fp32", "bf16"])
def test_compiled_layers_compute_what_the_dense_ones_do(dtype: torch.dtype, bound: Bound) -> None:
    torch.set_float32_matmul_precision("highest")
    draft, features, blocks, embedding = make("cuda", dtype)
    compiled = copy.deepcopy(draft)
    compiled.compile_layers()
    got = outcome(compiled, features, blocks, embedding, flex=True)
    wide = draft.float()   # the same weights; in bf16 neither path is nearer the truth than the other
    expected = outcome(wide, features.float(), blocks, embedding.float(), flex=False)
    assert_within(got["hidden states"], expected["hidden states"], bound=bound, what="hidden states")
    if dtype == torch.float32:
        for name, gradient in expected.items():
            assert_within(got[name], gradient, bound=bound, what=name)
