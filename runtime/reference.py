"""The reference executor: a decoder step in plain torch, and the rule that makes drafting invisible in the text.

The column rule. Matrix products of other shapes run other code and give other last bits, on CPUs too; a token computed alone
and the same token computed beside seven drafts would differ, and near a tie so would the text. So every step runs in tiles
of 8 token columns, whatever is live in them: all products have the same shape, attention walks the cache in absolute chunks
of 128 positions in order, experts add up in order of their ids, and what a column does not take part in adds an exact zero:

  - a masked key has weight exp(-inf) = 0, and a chunk that is masked as a whole leaves maximum, sum and mixture as they were;
  - an expert that only a neighbour chose is multiplied by a router weight of 0;
  - dead columns choose no expert, and their keys are not stored.

What is left is that a product may treat the 8 rows of a tile differently by their place. Whether it does on this machine is
measured when the executor starts: one text is read a tile at a time and a token at a time, and logits compared bit for bit.
If they differ, tokens are put into the column of their position modulo 8, where every token always has the same place; a step
that crosses a multiple of 8 then costs two tiles, and `description` says so.

A tree is read path by path, depth first, each branch over the rows of the one before: every node's step is the very step that
plain decoding would take, so the rule holds for nodes too, at a tile for every leaf instead of one for 8 nodes. That is an oracle's
price, and the times of trees on this executor say nothing of trees elsewhere; how many nodes are verified is what is counted.

The price of the rule is the dead columns: `open(one_column=True)` gives it up and runs exactly the rows it is asked for.

Legend: R rows (columns of the tile), D hidden, H query heads, G key/value heads, K head dimension, E experts, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dflash.generate import TargetStep
from ..dflash.tree import ANCHOR, DraftTree
from .graph import ModelGraph, ModelWeights

TILE = 8
KV_CHUNK = 128
ONE_PASS = 512          # rows a step without the column rule takes at once
Placement = Literal["free", "aligned"]


class ReferenceExecutor:
    """Weights and how to run them; sequences come from `open`."""

    def __init__(self, graph: ModelGraph, weights: ModelWeights, *, taps: tuple[int, ...] = (), placement: Placement | None = None) -> None:
        self.graph, self.weights, self.taps = graph, weights, taps
        self.max_length = graph.max_length
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        # transformers computes angles in fp32, and that is what models are trained with
        frequencies = 1.0 / (graph.rope_theta ** (torch.arange(0, graph.head_dim, 2, dtype=torch.int64).float() / graph.head_dim))
        angles = torch.arange(graph.max_length).float().unsqueeze(1) * frequencies
        self.cos, self.sin = angles.cos().to(self.device, self.dtype), angles.sin().to(self.device, self.dtype)
        self.placement: Placement = placement or "free"
        if placement is None and not self._rows_are_alike():
            self.placement = "aligned"
            if not self._rows_are_alike():
                raise RuntimeError("executor: this machine's matrix products do not repeat themselves, so text with and without a draft could differ. "
                                   "Try another number of threads or another torch build.")

    @property
    def embedding_VD(self) -> Tensor:
        return self.weights.embedding

    @property
    def head_VD(self) -> Tensor:
        return self.weights.head

    @property
    def description(self) -> dict[str, str]:
        place = "in any column" if self.placement == "free" else "in the column of its position modulo 8 (rows of a product differ on this machine)"
        return {"executor": "reference (plain torch)", "device": str(self.device), "dtype": str(self.dtype).removeprefix("torch."),
                "column_rule": f"tiles of {TILE} columns, cache chunks of {KV_CHUNK}, a token {place}"}

    def open(self, *, one_column: bool = False) -> "ReferenceSequence":
        return ReferenceSequence(self, one_column=one_column)

    @torch.inference_mode()
    def _rows_are_alike(self) -> bool:
        """Whether tokens read one by one give the bits of tokens read a tile at a time, over more than one cache chunk."""
        length = min(self.max_length - 1, KV_CHUNK + 2 * TILE)
        ids = torch.randint(self.graph.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        together, apart = self.open(), self.open()
        head = max(0, length - 3 * TILE)
        together.read(ids[:head + 3])
        apart.read(ids[:head + 3])
        first = together.read(ids[head + 3:])
        single = [apart.read([i]) for i in ids[head + 3:]]
        return (torch.equal(first.logits_TV, torch.cat([s.logits_TV for s in single]))
                and torch.equal(first.features_TF, torch.cat([s.features_TF for s in single])))


class ReferenceSequence:
    """One sequence with its key/value cache: a Target of the draft-verify loop."""

    def __init__(self, executor: ReferenceExecutor, *, one_column: bool) -> None:
        self.executor, self.one_column = executor, one_column
        self.max_length = executor.max_length
        self.length = 0
        g = executor.graph
        self._cache = torch.zeros(g.num_layers, 2, g.num_kv_heads, 0, g.head_dim, device=executor.device, dtype=executor.dtype)
        self._tree: Tensor | None = None    # keys and values of the anchor and the nodes of the tree just read, as in the cache

    def rewind(self, length: int) -> None:
        """Forget the tokens at positions >= length. Errors: ValueError for a length that is not there."""
        if not 0 <= length <= self.length:
            raise ValueError(f"rewind: must be to 0..{self.length}, the tokens read; got {length}.")
        self.length, self._tree = length, None

    @torch.inference_mode()
    def read_tree(self, anchor: int, tree: DraftTree) -> TargetStep:
        """Read an anchor and the nodes below it; `keep` then says which were accepted. Errors: as `read`."""
        start = self.length
        logits: dict[int, Tensor] = {}
        features: dict[int, Tensor] = {}
        rows: dict[int, Tensor] = {}
        for run in tree.runs():
            self.length = first = start + (0 if run[0] == ANCHOR else tree.depths[run[0]])
            step = self.read([anchor if node == ANCHOR else tree.token_ids[node] for node in run])
            for t, node in enumerate(run):
                logits[node], features[node] = step.logits_TV[t], step.features_TF[t]
                rows[node] = self._cache[:, :, :, first + t].clone()   # the next branch takes its place
        self.length = start
        nodes = range(ANCHOR, len(tree))
        self._tree = torch.stack([rows[node] for node in nodes], dim=3)
        return TargetStep(logits_TV=torch.stack([logits[node] for node in nodes]), features_TF=torch.stack([features[node] for node in nodes]))

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Of the tree just read, keep the anchor and these nodes: the rows of plain decoding, put where plain decoding has them."""
        assert self._tree is not None, "keep needs a tree that was read"
        stop = self.length + 1 + len(path)
        self._cache[:, :, :, self.length:stop] = self._tree[:, :, :, [0, *(node + 1 for node in path)]]
        self.length, self._tree = stop, None

    @torch.inference_mode()
    def read(self, ids: Sequence[int], *, last_logits_only: bool = False) -> TargetStep:
        """Read tokens at the next positions. Errors: ValueError beyond the context, or for no token."""
        if any(not 0 <= i < self.executor.graph.vocab_size for i in ids):
            raise ValueError(f"read: token ids lie in 0..{self.executor.graph.vocab_size - 1}; got {list(ids)}.")
        if not ids or self.length + len(ids) > self.max_length:
            raise ValueError(f"read: takes 1 to {self.max_length - self.length} tokens more (context {self.max_length}); got {len(ids)}.")
        self._tree = None
        self._reserve(self.length + len(ids))
        logits, features = [], []
        for start, stop in self._tiles(len(ids)):
            last = not last_logits_only or stop == len(ids)
            tile_logits, tile_features = self._tile(ids[start:stop], with_logits=last)
            features.append(tile_features)
            if tile_logits is not None:
                logits.append(tile_logits)
            self.length += stop - start
        logits_TV = torch.cat(logits)
        return TargetStep(logits_TV=logits_TV[-1:] if last_logits_only else logits_TV, features_TF=torch.cat(features))

    def _tiles(self, count: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the tokens that run together."""
        width = ONE_PASS if self.one_column else TILE
        start = 0
        while start < count:
            room = width
            if not self.one_column and self.executor.placement == "aligned":
                room = TILE - (self.length % TILE)   # length is kept up to date by the reader
            yield start, min(count, start + room)
            start += room

    def _reserve(self, length: int) -> None:
        """Room for `length` tokens, in whole chunks of zeros; doubled so that growing costs little."""
        allocated = self._cache.shape[3]
        if length > allocated:
            wanted = max(length, min(2 * allocated, self.max_length))
            more = -(-wanted // KV_CHUNK) * KV_CHUNK - allocated
            self._cache = F.pad(self._cache, (0, 0, 0, more))

    def _tile(self, ids: Sequence[int], *, with_logits: bool) -> tuple[Tensor | None, Tensor]:
        """(logits, features) of the live columns."""
        ex = self.executor
        count = len(ids)
        rows = count if self.one_column else TILE
        offset = self.length % TILE if not self.one_column and ex.placement == "aligned" else 0
        live = slice(offset, offset + count)
        ids_R, positions_R = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), self.length)
        ids_R[live] = torch.tensor(ids)
        positions_R[live] = torch.arange(self.length, self.length + count)
        ids_R, positions_R = ids_R.to(ex.device), positions_R.to(ex.device)
        step = _Step(ex, positions_R=positions_R, live=live, start=self.length, count=count)
        x = ex.weights.embedding[ids_R]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(ex.weights.layers):
            h = rms_norm(x, layer.attention_norm, ex.graph.rms_eps)
            x = x + F.linear(self._attention(h, index, step), layer.out)
            h = rms_norm(x, layer.experts_norm, ex.graph.rms_eps)
            x = x + self._experts(h, index, step)
            if index in ex.taps:
                tapped[index] = x[live]
        features = torch.cat([tapped[i] for i in ex.taps], dim=-1) if ex.taps else x.new_zeros(count, 0)
        if not with_logits:
            return None, features
        return F.linear(rms_norm(x, ex.weights.norm, ex.graph.rms_eps), ex.weights.head)[live], features

    def _attention(self, h: Tensor, index: int, step: "_Step") -> Tensor:
        """Softmax over the cache, chunk after chunk, with a running maximum (Milakov and Gimelshein 2018)."""
        g, layer = self.executor.graph, self.executor.weights.layers[index]
        rows, groups, repeat, k = h.shape[0], g.num_kv_heads, g.num_heads // g.num_kv_heads, g.head_dim
        query_key, value = F.linear(h, layer.qkv).view(rows, g.num_heads + 2 * groups, k).split((g.num_heads + groups, groups), dim=1)
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, g.rms_eps)
        query, key = rotate(query_key, step).split((g.num_heads, groups), dim=1)
        keys, values = self._cache[index]
        keys[:, step.start:step.start + step.count] = key[step.live].transpose(0, 1)
        values[:, step.start:step.start + step.count] = value[step.live].transpose(0, 1)
        query = query.reshape(rows, groups, repeat, k).transpose(0, 1).reshape(groups, rows * repeat, k) * k**-0.5
        largest = query.new_full((groups, rows * repeat, 1), -torch.inf)
        total, mixed = torch.zeros_like(largest), torch.zeros_like(query)
        for chunk, hidden in step.chunks:
            scores = query @ keys[:, chunk].mT
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            kept, weights = (largest - new).exp(), (scores - new).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            mixed = mixed * kept + weights @ values[:, chunk]
            largest = new
        return (mixed / total).view(groups, rows, repeat, k).transpose(0, 1).reshape(rows, -1)

    def _experts(self, h: Tensor, index: int, step: "_Step") -> Tensor:
        g, layer = self.executor.graph, self.executor.weights.layers[index]
        wide = torch.promote_types(h.dtype, torch.float32)
        probabilities = F.linear(h, layer.router).to(wide).softmax(-1)
        top, experts = probabilities.sort(dim=-1, descending=True, stable=True)   # stable: of equal experts the lowest id is taken
        top, experts = top[:, :g.experts_per_token], experts[:, :g.experts_per_token]
        if g.normalize_router_weights:
            top = top / top.sum(-1, keepdim=True)
        weights_RE = torch.zeros_like(probabilities).scatter_(1, experts, top)
        weights_RE = weights_RE.masked_fill_(step.dead, 0).to(h.dtype)
        output = torch.zeros_like(h)
        for e in sorted(set(experts[step.live].flatten().tolist())):
            gate, up = F.linear(h, layer.gate_up[e]).chunk(2, dim=-1)
            output = output + F.linear(F.silu(gate) * up, layer.down[e]) * weights_RE[:, e:e + 1]
        return output


class _Step:
    """What all layers of one tile share."""

    def __init__(self, executor: ReferenceExecutor, *, positions_R: Tensor, live: slice, start: int, count: int) -> None:
        self.live, self.start, self.count = live, start, count
        self.cos, self.sin = executor.cos[positions_R].unsqueeze(1), executor.sin[positions_R].unsqueeze(1)
        self.dead = torch.ones(len(positions_R), 1, dtype=torch.bool, device=positions_R.device)
        self.dead[live] = False
        g = executor.graph
        position = positions_R.repeat_interleave(g.num_heads // g.num_kv_heads).unsqueeze(1)
        # (chunk of the cache, which of its keys a row must not see); no mask where every row sees all of it: the same bits either way
        self.chunks: list[tuple[slice, Tensor | None]] = []
        for first in range(0, start + count, KV_CHUNK):
            is_visible = first + KV_CHUNK <= start
            hidden = None if is_visible else torch.arange(first, first + KV_CHUNK, device=positions_R.device) > position
            self.chunks.append((slice(first, first + KV_CHUNK), hidden))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean in fp32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, step: _Step) -> Tensor:
    """Rotary position embedding, halves layout. Shapes: x [R, heads, K]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * step.cos - b * step.sin, b * step.cos + a * step.sin), dim=-1)
