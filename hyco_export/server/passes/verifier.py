"""The verifier as `interfaces.VerifierModels`: a transformers Gemma 4 text model with tree attention over slot caches.

It decides positions, masks, which rows to keep and what a hand-off is made of. The rows of
several sessions go through the model in one pass, one behind the other; they part in the attention alone. What a
session computes beside others differs from what it computes alone by float rounding at most: the matrix products have
more rows. One thread at a time works here.

Legend: L committed positions, R rows of a session's part of a pass (root first), N nodes, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.numerics import NODE_LIMIT
from hyco_export.models.families.gemma4 import ScaledEmbedding
from hyco_export.models.families.slm_family import ATTENTION_NAMES
from hyco_export.models.fused_layers import FusedStack, fits
from hyco_export.models.generation_rules import suppressed_ids
from hyco_export.models.process_group import HeadShares
from hyco_export.models.verifier import handoff_layers
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Judged, Query
from hyco_export.server.interfaces import Chain, Check, Prefill
from hyco_export.server.passes import attention as slot_attention
from hyco_export.server.passes.attention import PackedAttention, Seen, attention_mask, prompt_rows, tree_rows
from hyco_export.server.passes.cache import HandoffEncoder, PackedCache, SlotCache, cache_layout
from hyco_export.server.passes.head_drafter import ChainDrafter, Root
from hyco_export.server.passes.judgement import PassLogits, look

PREFILL_ROWS = 256  # of one pass over a prompt: bounds its mask at 256 x (L + 256) values, and what others wait for it


class Verifier:
    """The models behind a server, shared by its sessions.

    Args:
        model: Gemma 4 causal language model in evaluation mode; its attention becomes `slot_attention`.
        drafter: the server's own head, for sessions that draft on the server.
        encoder: grids of the head artifact, for sessions whose device runs the head.
        restricted_drafter: the same head over the head artifact's keep set and window.
        prefill_rows: rows of a prompt in one pass, at most.
        node_limit: nodes of a tree, at most.
        fused: compute the layers with `models.fused_layers` where the model fits.
        compiled: let torch's compiler make the fused layers.
        heads: of a sharded model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: ChainDrafter | None = None,
        encoder: HandoffEncoder | None = None,
        restricted_drafter: ChainDrafter | None = None,
        prefill_rows: int = PREFILL_ROWS,
        node_limit: int = NODE_LIMIT,
        fused: bool = True,
        compiled: bool = False,
        heads: HeadShares | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self.drafter = drafter
        self.restricted_drafter = restricted_drafter
        self.encoder = encoder
        self.handoff_layers = handoff_layers(config)
        read_back = max(
            (drafter.span("sliding") or 0) if drafter else 0,
            encoder.spec.window if encoder else 0,
        )
        sliding = self.handoff_layers["sliding"]
        self.layout = cache_layout(config, prefill_rows, node_limit + 1, {sliding: read_back}, heads)
        self.prefill_rows = prefill_rows
        self.context_limit = config.max_position_embeddings
        self.device = model.device
        self.dtype = model.dtype
        model.set_attn_implementation(slot_attention.NAME)
        self._model = model
        self._heads = heads
        self._backbone = model.get_decoder()
        self._stack = FusedStack(self._backbone, compiled) if fused and fits(self._backbone) else None
        self._table = _table_of(model.get_input_embeddings())
        self._soft_cap = config.final_logit_softcapping
        self._suppressed = list(suppressed_ids(model))
        self._windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        # transformers cuts rows before KV-shared layers when this is an integer, and fails without per-layer embeddings
        self._all_rows = torch.tensor(0)

    def open(self) -> "TorchVerifierSession":
        """An empty session."""
        return TorchVerifierSession(self)

    def cache_bytes(self, positions: int) -> int:
        """interfaces.VerifierModels: memory of a session's K/V, from the model's config."""
        return self.layout.size_bytes(positions, self.dtype.itemsize)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> input embeddings [..., H] with their factor."""
        if self._table is None:
            embedded: torch.Tensor = self._model.get_input_embeddings()(ids)
            return embedded
        weight, factor = self._table
        return functional.embedding(ids, weight) * factor

    @torch.inference_mode()
    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        """interfaces.VerifierModels: the server's own head, one step of all sessions at a time."""
        drafted: dict[int, tuple[int, ...]] = {}
        for restricted in {chain.restricted for chain in chains}:
            group = {place: chain for place, chain in enumerate(chains) if chain.restricted == restricted}
            drafter = self.drafter_of(restricted)
            roots = [_torch_session(chain).chain_root(chain.root, drafter) for chain in group.values()]
            texts = drafter.chains(self.embed, roots, max(chain.steps for chain in group.values()))
            drafted |= dict(zip(group, texts, strict=True))
        return [drafted[place][: chain.steps] for place, chain in enumerate(chains)]

    def drafter_of(self, restricted: bool) -> ChainDrafter:
        """The server's own head over everything, or over the head artifact's keep set and window."""
        drafter = self.restricted_drafter if restricted else self.drafter
        if drafter is None:
            raise RuntimeError("draft needs a head and a primed session")
        return drafter

    @torch.inference_mode()
    def forward(self, parts: Sequence[Prefill | Check]) -> list[PassLogits]:
        """interfaces.VerifierModels: one pass of all parts, whose K/V rows are written behind the committed ones."""
        wanted = self.advance(parts)
        logits = self._model.get_output_embeddings()(wanted[0] if len(wanted) == 1 else torch.cat(wanted))
        logits[:, self._suppressed] = -torch.inf
        ends = np.cumsum([len(rows) for rows in wanted]).tolist()
        return [
            PassLogits(logits, self._soft_cap, end - len(rows), end) for rows, end in zip(wanted, ends, strict=True)
        ]

    def look(self, queries: Sequence[Query]) -> list[Judged | ValueError]:
        """interfaces.VerifierModels: on the verifier's device."""
        return look(queries)

    @torch.inference_mode()
    def advance(self, parts: Sequence[Prefill | Check]) -> list[torch.Tensor]:
        """What `forward` does to the sessions; the states [n, H] of the rows whose logits it returns, by part."""
        blocks = [prompt_rows(part.rows) if isinstance(part, Prefill) else tree_rows(part.parents) for part in parts]
        sessions = [_torch_session(part) for part in parts]
        caches = [session.cache for session in sessions]
        for part, cache in zip(parts, caches, strict=True):
            cache.make_room(part.rows)
        after, handed = self._pass(
            self._to_device(np.concatenate([_ids(part) for part in parts])),
            self._to_device(
                np.concatenate(
                    [cache.length + row_depths for cache, (row_depths, _) in zip(caches, blocks, strict=True)]
                )
            ),
            {name: self._seen(caches, blocks, window) for name, window in self._windows.items()},
            PackedCache([(cache, part.rows) for cache, part in zip(caches, parts, strict=True)], self._heads),
        )
        ends = np.cumsum([part.rows for part in parts]).tolist()
        wanted = []
        for part, session, end in zip(parts, sessions, ends, strict=True):
            start = end - part.rows
            if isinstance(part, Prefill):
                session.extend(part.rows, after[end - 1], handed[end - 1])
                wanted.append(after[end - 1 : end])
            else:
                session.hold(after[start:end], handed[start:end])
                wanted.append(after[start:end])
        return wanted

    def _seen(
        self, caches: Sequence[SlotCache], blocks: Sequence[tuple[np.ndarray, np.ndarray]], window: int | None
    ) -> list[Seen]:
        """The masks of one layer type, by session."""
        return [
            Seen(
                len(block),
                attention_mask(
                    block, row_depths, cache.length, cache.first_visible(window), window, self.dtype, self.device
                ),
            )
            for cache, (row_depths, block) in zip(caches, blocks, strict=True)
        ]

    def _pass(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: dict[str, list[Seen]], cache: PackedCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [sum of R, H] after the final norm, and those a hand-off sends (`hidden_norm`)."""
        after, before = (
            self._fused(ids, positions, seen, cache) if self._stack else self._plain(ids, positions, seen, cache)
        )
        handed_before = self.encoder is not None and self.encoder.spec.hidden_norm == "pre"
        return after, before if handed_before else after

    def _fused(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: dict[str, list[Seen]], cache: PackedCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused layers: states after the final norm and before it."""
        assert self._stack is not None
        embedded = self.embed(ids)
        per_layer = self._stack.per_layer_inputs(ids, embedded)
        attention = PackedAttention(seen, cache.update)
        return self._stack.run(embedded, self._stack.rotations(positions), attention, per_layer)

    def _plain(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: dict[str, list[Seen]], cache: PackedCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' own forward, for models that cannot be fused: the same two states."""
        before: list[torch.Tensor] = []
        handle = self._backbone.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0][0]))
        try:
            after = self._backbone(
                input_ids=ids[None],
                attention_mask=seen,
                position_ids=positions[None],
                cache=cache,
                use_cache=True,
                logits_to_keep=self._all_rows,
            ).last_hidden_state[0]
        finally:
            handle.remove()
        return after, before[0]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class TorchVerifierSession:
    """interfaces.VerifierSession: one session's committed positions."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._cache: SlotCache | None = None
        self._pass: tuple[torch.Tensor, torch.Tensor] | None = None  # states of the last verify, [R, H] each
        self._state: torch.Tensor | None = None  # [H] of the newest committed position, after the final norm
        self._handed: torch.Tensor | None = None  # [H] as the hand-off sends it

    @property
    def length(self) -> int:
        """L."""
        return self._cache.length if self._cache is not None else 0

    @property
    def cache(self) -> SlotCache:
        """This session's K/V; taken for the model's whole context where nothing was reserved."""
        if self._cache is None:
            self.reserve(self._verifier.context_limit)
        assert self._cache is not None
        return self._cache

    def reserve(self, positions: int) -> None:
        """Take the memory of a session that commits at most this many positions."""
        self._cache = SlotCache(self._verifier.layout, positions, self._verifier.dtype, self._verifier.device)

    def prime(self, ids: np.ndarray) -> np.ndarray:
        """Prefill ids [n] in passes; logits [V] float32 of the last one."""
        rows = self._verifier.prefill_rows
        for start in range(0, len(ids), rows):
            (logits,) = self._verifier.forward([Prefill(self, ids[start : start + rows])])
        last: np.ndarray = logits.numpy()[0]
        return last

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Forward the root and the tree's nodes tokens [N], parents [N]."""
        (logits,) = self._verifier.forward([Check(self, root, tokens, parents)])
        return logits.numpy()

    @torch.inference_mode()
    def commit(self, accepted: tuple[int, ...]) -> None:
        """Keep the root and these nodes (a path, depth order) of the last `verify`."""
        if self._pass is None:
            raise RuntimeError("commit without verify")
        rows = [0, *(node + 1 for node in accepted)]
        self.cache.keep(rows)
        after, handed = self._pass
        self._remember(after[rows[-1]], handed[rows[-1]])
        self._pass = None

    def draft(self, root: int, steps: int, restricted: bool = False) -> tuple[int, ...]:
        """The server's own head: top-1 tokens after `root`."""
        return self._verifier.draft([Chain(self, root, steps, restricted)])[0]

    @torch.inference_mode()
    def handoff(self, root: int, count: int) -> wire.Handoff:
        """e(root), h of the newest committed position, K/V of the `count` newest ones, in 8 bits."""
        encoder = self._verifier.encoder
        if encoder is None or self._handed is None:
            raise RuntimeError("handoff needs a head artifact and a primed session")
        rows = {name: self.cache.committed(self._verifier.handoff_layers[name], count) for name in LAYER_TYPES}
        e = self._verifier.embed(torch.tensor(root, device=self._verifier.device))
        return encoder.encode(e, self._handed, rows, max(0, self.length - count))

    def chain_root(self, root: int, drafter: ChainDrafter) -> Root:
        """What the server's head starts from."""
        if self._state is None:
            raise RuntimeError("draft needs a head and a primed session")
        keys_values = {
            ATTENTION_NAMES[layer_type]: self.cache.committed(index, drafter.span(layer_type))
            for layer_type, index in self._verifier.handoff_layers.items()
        }
        return Root(root, self.length, self._state, keys_values)

    def extend(self, rows: int, after: torch.Tensor, handed: torch.Tensor) -> None:
        """All rows of the pass were a prompt's: they are committed; states [H] of the last one."""
        self.cache.keep(range(rows))
        self._remember(after, handed)

    def hold(self, after: torch.Tensor, handed: torch.Tensor) -> None:
        """States [R, H] of a root and its tree, until `commit`."""
        self._pass = after, handed

    def _remember(self, after: torch.Tensor, handed: torch.Tensor) -> None:
        """The states [H] of the newest committed position; copies, as views would keep the whole pass alive."""
        self._state, self._handed = after.clone(), handed.clone()

    def close(self) -> None:
        """Free the cache."""
        self._cache = self._pass = self._state = self._handed = None


def _torch_session(part: Prefill | Check | Chain) -> TorchVerifierSession:
    """The session of a part; only this module makes sessions for these models."""
    assert isinstance(part.session, TorchVerifierSession)
    return part.session


def _table_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The embedding's rows [V, H] and their factor, where it is plain: a lookup without a module's call."""
    if type(module) is not ScaledEmbedding or type(module.weight) is not nn.Parameter:
        return None
    return module.weight, module.embed_scale.to(module.weight.dtype)


def _ids(part: Prefill | Check) -> np.ndarray:
    """[R] int64."""
    if isinstance(part, Prefill):
        return part.ids.astype(np.int64)
    return np.concatenate([[part.root], part.tokens]).astype(np.int64)
