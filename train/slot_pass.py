"""One pass of target and draft over packed rows: what training optimizes and held-out accuracy measures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..dflash.anchors import draw_anchors, valid_anchors
from ..dflash.context import Taps
from ..dflash.loss import SlotSums, slot_sums, slot_targets
from ..dflash.model import DraftModel, draft_blocks
from ..quant.quality import head_weight
from .distill_config import SlotLossConfig
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED


def slot_pass(
    draft: DraftModel, target: nn.Module, batch_B4S: Tensor, *, loss: SlotLossConfig, generator: torch.Generator,
    blocks: Callable[..., Tensor] = draft_blocks,
) -> SlotSums:
    """One forward of target and draft over packed rows: loss and accuracy of the slots of randomly drawn blocks.

    Shapes: batch_B4S as `pack_row` makes it. blocks: `draft_blocks`, or a sharded draft's `DraftPass`.
    """
    ids, documents, positions = batch_B4S[:, IDS], batch_B4S[:, DOCUMENTS], batch_B4S[:, POSITIONS]
    supervised = batch_B4S[:, SUPERVISED].bool()
    features, hidden = run_target(target, ids, documents_BS=documents, positions_BS=positions, layer_ids=draft.config.target_layer_ids)
    valid = valid_anchors(documents, supervised_BS=supervised, positions_BS=positions)
    index, is_valid = draw_anchors(valid, num_anchors=loss.anchors, generator=generator)
    embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[operator]
    slots = blocks(draft, features_BSF=features, positions_BS=positions, documents_BS=documents, anchor_index_BA=index,
                   anchor_ids_BA=ids.gather(1, index), embedding_VD=embedding)
    targets = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=is_valid,
                           block_size=draft.config.block_size)
    return slot_sums(slots, targets=targets, head_VD=head_weight(target), target_hidden_BSD=hidden, kind=loss.kind, gamma=loss.decay_gamma,
                     chunk_rows=loss.chunk_rows)


@torch.no_grad()
def run_target(target: nn.Module, ids_BS: Tensor, *, documents_BS: Tensor, positions_BS: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(tapped features [B, S, F], states after the final norm [B, S, D]) of packed rows, each document on its own.

    The mask is written out: transformers guesses packing from the positions only where it can.
    """
    length = ids_BS.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids_BS.device).tril()
    mask = causal & (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1))
    dtype = next(target.parameters()).dtype
    additive = torch.zeros(mask.shape, dtype=dtype, device=ids_BS.device).masked_fill(~mask, torch.finfo(dtype).min).unsqueeze(1)
    with Taps(target, layer_ids=layer_ids) as taps:
        output = target.model(input_ids=ids_BS, attention_mask=additive, position_ids=positions_BS, use_cache=False)  # type: ignore[operator, union-attr]
        return taps.take(), output.last_hidden_state
