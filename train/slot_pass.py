"""One pass of target and draft over packed rows: what training optimizes and held-out accuracy measures."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..dflash.anchors import draw_anchors, fill_tiles, valid_anchors
from ..dflash.context import Taps
from ..dflash.loss import SlotSums, slot_sums, slot_targets
from ..dflash.model import Blocks, DraftModel
from ..kernels.attention import TILE
from ..quant.quality import head_weight
from .distill_config import SlotLossConfig
from .distill_data import DOCUMENTS, IDS, POSITIONS, SUPERVISED


def slot_pass(
    draft: DraftModel, target: nn.Module, batch: Tensor | Sequence[Tensor], *, loss: SlotLossConfig, generator: torch.Generator, flex: bool = False,
) -> SlotSums:
    """One forward of target and draft over packed rows: loss and accuracy of the slots of randomly drawn blocks.

    Shapes: batch: rows [B, 4, S] as `pack_row` makes them, alone or with their stored features and final states (`features_of`).
    flex: attention by block mask on a GPU; rows and anchors are filled up to whole tiles for it.
    """
    batch_B4S, features, hidden = features_of(target, batch, layer_ids=draft.config.target_layer_ids)
    if flex and (more := -batch_B4S.shape[2] % TILE):
        batch_B4S = whole_tiles(batch_B4S)
        features, hidden = F.pad(features, (0, 0, 0, more)), F.pad(hidden, (0, 0, 0, more))
    ids, documents, positions = batch_B4S[:, IDS], batch_B4S[:, DOCUMENTS], batch_B4S[:, POSITIONS]
    supervised = batch_B4S[:, SUPERVISED].bool()
    valid = valid_anchors(documents, supervised_BS=supervised, positions_BS=positions)
    index, is_valid = draw_anchors(valid, num_anchors=loss.anchors, generator=generator, documents_BS=documents if loss.anchors_by == "document" else None)
    if flex:
        index, is_valid = fill_tiles(index, is_valid, block_size=draft.config.block_size)
    embedding: Tensor = target.get_input_embeddings().weight  # type: ignore[operator]
    slots = draft(features, blocks=Blocks(anchors_BA=index, ids_BA=ids.gather(1, index), positions_BS=positions), embedding_VD=embedding, flex=flex)
    targets = slot_targets(ids, documents_BS=documents, supervised_BS=supervised, anchor_index_BA=index, anchor_valid_BA=is_valid,
                           block_size=draft.config.block_size)
    head = head_weight(target)
    rows = None if draft.own_head is None else head if draft.draft_ids is None else head[draft.draft_ids]
    return slot_sums(slots, targets=targets, head_VD=draft.head_rows(head), target_head_VD=rows, target_hidden_BSD=hidden, options=loss,
                     draft_ids_U=draft.draft_ids, multiplier=draft.config.output_multiplier, softcap=draft.config.logit_softcap,
                     target_softcap=getattr(target.config, "final_logit_softcapping", None))


def whole_tiles(batch_B4S: Tensor) -> Tensor:
    """Rows with padding up to a multiple of the block mask's tile."""
    more = -batch_B4S.shape[2] % TILE
    if not more:
        return batch_B4S
    padded = F.pad(batch_B4S, (0, more))
    padded[:, DOCUMENTS, -more:] = -1
    return padded


def features_of(target: nn.Module, batch: Tensor | Sequence[Tensor], *, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [B, 4, S], tapped features [B, S, F], final states [B, S, D]): from the batch when it brings them, else the target reads the rows."""
    if isinstance(batch, Tensor):
        documents, positions = batch[:, DOCUMENTS], batch[:, POSITIONS]
        return batch, *run_target(target, batch[:, IDS], documents_BS=documents, positions_BS=positions, layer_ids=layer_ids)
    rows_B4S, features_BSF, hidden_BSD = batch
    return rows_B4S, features_BSF, hidden_BSD


@torch.no_grad()
def run_target(target: nn.Module, ids_BS: Tensor, *, documents_BS: Tensor, positions_BS: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(tapped features [B, S, F], states after the final norm [B, S, D]) of packed rows, each document on its own; zeros at padding.

    The documents are laid side by side, one a row, and padded on the right: under causal attention no token sees what comes after it, so
    the target needs no mask of ours, its own sliding windows hold, and no attention is computed between documents. Longest first, cut so
    that no forward has more tokens than the packed rows (T: those of all documents).
    """
    place_T = (documents_BS >= 0).flatten().nonzero().squeeze(1)   # in the rows, which lie one behind the other
    ids_T, position_T = ids_BS.flatten()[place_T], positions_BS.flatten()[place_T]
    document_T = (position_T == 0).cumsum(0) - 1                   # a document begins at position 0
    lengths, order = torch.bincount(document_T).sort(descending=True, stable=True)
    rank_T = order.argsort()[document_T]
    found: list[Tensor] = []
    with Taps(target, layer_ids=layer_ids) as taps:
        for start, end, longest in _parts(lengths.tolist(), limit=2 * ids_BS.numel()):
            mine = ((rank_T >= start) & (rank_T < end)).nonzero().squeeze(1)
            row, column = rank_T[mine] - start, position_T[mine]
            padded = ids_BS.new_zeros(end - start, longest)
            padded[row, column] = ids_T[mine]
            hidden = target.model(input_ids=padded, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
            states = (taps.take(), hidden)
            if not found:
                found = [s.new_zeros(ids_BS.numel(), s.shape[-1]) for s in states]
            for all_of_it, part in zip(found, states, strict=True):
                all_of_it[place_T[mine]] = part[row, column]
    features, hidden = (f.unflatten(0, ids_BS.shape) for f in found)
    return features, hidden


def _parts(lengths: Sequence[int], *, limit: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, longest) of consecutive documents, longest first, that have at most `limit` tokens once padded to the longest of them."""
    start = 0
    while start < len(lengths):
        end = min(len(lengths), start + max(1, limit // lengths[start]))
        yield start, end, lengths[start]
        start = end
