"""One pass of target and draft over packed rows: what training optimizes and held-out accuracy measures."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..dflash.anchors import draw_anchors, valid_anchors
from ..dflash.context import Taps
from ..dflash.loss import SlotSums, slot_sums, slot_targets
from ..dflash.model import Blocks, DraftModel
from ..kernels.attention import TILE, padded_anchors
from ..quant.quality import head_weight
from .distill_config import SlotLossConfig
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED


def slot_pass(draft: DraftModel, target: nn.Module, batch_B4S: Tensor, *, loss: SlotLossConfig, generator: torch.Generator, flex: bool = False) -> SlotSums:
    """One forward of target and draft over packed rows: loss and accuracy of the slots of randomly drawn blocks.

    Shapes: batch_B4S as `pack_row` makes it. flex: attention by block mask on a GPU; rows and anchors are filled up to whole tiles for it.
    """
    if flex:
        batch_B4S = _whole_tiles(batch_B4S)
    ids, documents, positions = batch_B4S[:, IDS], batch_B4S[:, DOCUMENTS], batch_B4S[:, POSITIONS]
    supervised = batch_B4S[:, SUPERVISED].bool()
    features, hidden = run_target(target, ids, documents_BS=documents, positions_BS=positions, layer_ids=draft.config.target_layer_ids)
    valid = valid_anchors(documents, supervised_BS=supervised, positions_BS=positions)
    index, is_valid = draw_anchors(valid, num_anchors=loss.anchors, generator=generator, documents_BS=documents if loss.anchors_by == "document" else None)
    if flex:   # whole tiles; what is added counts for nothing
        more = padded_anchors(index.shape[1], block_size=draft.config.block_size) - index.shape[1]
        index, is_valid = F.pad(index, (0, more)), F.pad(is_valid, (0, more))
    embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[operator]
    slots = draft(features, blocks=Blocks(anchors_BA=index, ids_BA=ids.gather(1, index), positions_BS=positions), embedding_VD=embedding, flex=flex)
    targets = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=is_valid,
                           block_size=draft.config.block_size)
    return slot_sums(slots, targets=targets, head_VD=draft.head_rows(head_weight(target)), target_hidden_BSD=hidden, options=loss,
                     draft_ids_U=draft.draft_ids, multiplier=draft.config.output_multiplier, softcap=draft.config.logit_softcap,
                     target_softcap=getattr(target.config, "final_logit_softcapping", None))


def _whole_tiles(batch_B4S: Tensor) -> Tensor:
    """Rows with padding up to a multiple of the block mask's tile."""
    more = -batch_B4S.shape[2] % TILE
    if not more:
        return batch_B4S
    padded = F.pad(batch_B4S, (0, more))
    padded[:, DOCUMENTS, -more:] = -1
    return padded


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
