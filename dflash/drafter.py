"""A DraftModel at work on one sequence: the Drafter that the draft-verify loop talks to."""

import torch
from torch import Tensor

from ..kernels.attention import BlockPlan
from .model import Context, DraftModel
from .sampling import Sampling, candidate_scores, choose_tokens, confidences
from .tree import DraftTree, build_tree, chain


class DFlashDrafter:
    """Keeps the context's keys and values of one sequence and proposes from them.

    embedding_VD, head_VD: the target's. If all layers slide, only the newest `window` context tokens are kept.
    """

    def __init__(self, model: DraftModel, *, embedding_VD: Tensor, head_VD: Tensor) -> None:
        self.model, self.embedding_VD, self.head_UD = model, embedding_VD, model.head_rows(head_VD)
        self.num_drafts = model.config.num_drafts
        c = model.config
        empty = model.fc.weight.new_zeros(1, c.num_key_value_heads, 0, c.head_dim)
        self._contexts = [Context(empty, empty) for _ in range(c.num_hidden_layers)]
        self._observed = 0

    @torch.no_grad()
    def observe(self, features_TF: Tensor) -> None:
        """Take the target's features of the next committed positions, [T, F]."""
        window = self.model.config.context_window
        if window is not None and features_TF.shape[0] > window:   # what a long prompt pushes out at once is never looked at
            self._observed += features_TF.shape[0] - window
            features_TF = features_TF[-window:]
        dtype = self.model.fc.weight.dtype
        positions = torch.arange(self._observed, self._observed + features_TF.shape[0], device=features_TF.device)
        new = self.model.context(features_TF.to(dtype).unsqueeze(0), positions_BS=positions.unsqueeze(0))
        keep = slice(None) if window is None else slice(-window, None)
        self._contexts = [Context(torch.cat((old.keys, n.keys), dim=2)[:, :, keep], torch.cat((old.values, n.values), dim=2)[:, :, keep])
                          for old, n in zip(self._contexts, new, strict=True)]
        self._observed += features_TF.shape[0]

    @torch.no_grad()
    def logits(self, anchor: int) -> Tensor:
        """Logits of the masked slots, [N - 1, V]; the anchor sits at the next unobserved position. Tokens outside a reduced vocabulary have -inf."""
        device, c = self.head_UD.device, self.model.config
        kept = self._contexts[0].keys.shape[2]
        anchor_at, first = torch.full((1, 1), kept, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
        plans = [BlockPlan(anchors_BA=anchor_at, firsts_BA=first, block_size=c.block_size, window=c.window_of(i), causal=c.is_causal(i))
                 for i in range(c.num_hidden_layers)]
        block = self.model.embed(torch.tensor([[anchor]], device=device), embedding_VD=self.embedding_VD).to(self.model.fc.weight.dtype)
        hidden = self.model.block(block, contexts=self._contexts, plans=plans, positions_BA=torch.tensor([[self._observed]], device=device))
        logits = self.model.logits(hidden[0, 0, 1:], head_UD=self.head_UD)
        if self.model.draft_ids is None:
            return logits
        return logits.new_full((logits.shape[0], self.embedding_VD.shape[0]), -torch.inf).index_copy_(1, self.model.draft_ids, logits)

    def propose(self, anchor: int, *, count: int, sampling: Sampling) -> list[int]:
        """The first `count` slots' tokens, picked with the noise the target will use at those positions."""
        self._require_slots(count)
        return choose_tokens(self.logits(anchor)[:count], first_position=self._observed + 1, sampling=sampling)

    def propose_chain(self, anchor: int, *, count: int, sampling: Sampling) -> DraftTree:
        """What `propose` gives, with the confidence of every slot."""
        self._require_slots(count)
        logits_TV = self.logits(anchor)[:count]
        tokens = choose_tokens(logits_TV, first_position=self._observed + 1, sampling=sampling)
        return chain(tokens, confidences=confidences(logits_TV, tokens, sampling=sampling))

    def propose_tree(self, anchor: int, *, count: int, budget: int, sampling: Sampling) -> DraftTree:
        """The likeliest `budget` nodes of the first `count` slots; sampled text is ranked with the noise of the positions."""
        self._require_slots(count)
        return build_tree(candidate_scores(self.logits(anchor)[:count], first_position=self._observed + 1, sampling=sampling), budget=budget)

    def _require_slots(self, count: int) -> None:
        if not 0 <= count <= self.num_drafts:
            raise ValueError(f"propose: a block of {self.num_drafts + 1} gives at most {self.num_drafts} drafts; got count {count}.")
