"""A transformers causal model as a Target: what distillation measures acceptance on.

Its logits may differ in the last bits with the number of tokens a step reads, as transformers' do; the runtime's executors
are the ones that keep a column's operations fixed.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .context import Taps
from .generate import TargetStep
from .tree import ANCHOR, DraftTree

FULL, SLIDING = "full_attention", "sliding_attention"   # what transformers calls the kinds of layers


class HFTarget:
    """One sequence on a transformers model; its taps must be entered by the owner."""

    def __init__(self, model: nn.Module, *, taps: Taps, max_length: int) -> None:
        self.model, self.taps, self.max_length = model, taps, max_length
        self._cache: Any = DynamicCache()
        self._before_tree: int | None = None   # tokens read before the tree whose nodes lie in the cache
        self._device = next(model.parameters()).device
        # transformers renamed the argument in 5.2x
        self._cache_argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length()) if self._before_tree is None else self._before_tree

    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        """Errors: ValueError beyond max_length."""
        self._require_room(len(ids))
        return self._forward(ids, logits_to_keep=1 if last_logits_only else 0)

    def rewind(self, length: int) -> None:
        assert self._before_tree is None, "keep must follow read_tree"
        if length < self.length:
            self._cache.crop(length - self.length)   # negative: how many to remove, the form that all versions know

    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        """One step with a mask of its own. Errors: ValueError beyond max_length, NotImplementedError for layers that are neither full nor sliding attention."""
        self._require_room(1 + max(tree.depths, default=0))
        start = self.length
        positions_T = torch.tensor([start, *(start + depth for depth in tree.depths)], device=self._device)
        step = self._forward((anchor, *tree.token_ids), position_ids=positions_T.unsqueeze(0), attention_mask=self._tree_mask(tree, positions_T=positions_T))
        self._before_tree = start
        return step

    def keep(self, path: Sequence[int]) -> None:
        assert self._before_tree is not None, "keep needs a tree that was read"
        rows = torch.tensor([*range(self._before_tree + 1), *(self._before_tree + 1 + node for node in path)], device=self._device)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        self._before_tree = None

    def _tree_mask(self, tree: DraftTree, *, positions_T: Tensor) -> Tensor | dict[str, Tensor]:
        """Added to the scores, [1, 1, T, S + T]: S cached tokens, then anchor and nodes. One a kind of layer where a model has several."""
        start, config = self.length, self.model.config
        ancestors_TT = torch.eye(1 + len(tree), dtype=torch.bool, device=self._device)
        for node, parent in enumerate(tree.parents):
            ancestors_TT[node + 1] |= ancestors_TT[parent - ANCHOR]
        visible = torch.cat((ancestors_TT.new_ones(1 + len(tree), start), ancestors_TT), dim=1)
        window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
        if unknown := sorted(kinds - {FULL, SLIDING}):
            raise NotImplementedError(f"target: trees are verified by layers of full or sliding attention; {type(self.model).__name__} has {unknown[0]!r}. "
                                      "Measure it with chains.")
        if window is None or kinds == {FULL}:
            return self._additive(visible)
        key_positions = torch.cat((torch.arange(start, device=self._device), positions_T))
        near = visible & (positions_T.unsqueeze(1) - key_positions < window)
        return {FULL: self._additive(visible), SLIDING: self._additive(near)} if FULL in kinds else self._additive(near)

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]

    @torch.no_grad()
    def _forward(self, ids: Sequence[int], **options: Any) -> TargetStep:
        ids_BT = torch.tensor([list(ids)], device=self._device)
        output = self.model(input_ids=ids_BT, use_cache=True, **{self._cache_argument: self._cache}, **options)
        return TargetStep(logits_TV=output.logits[0], features_TF=self.taps.take()[0])

    def _require_room(self, count: int) -> None:
        assert self._before_tree is None, "keep must follow read_tree"
        if self.length + count > self.max_length:
            raise ValueError(f"target: {self.length} + {count} tokens exceed its context of {self.max_length}. Shorten the text.")
