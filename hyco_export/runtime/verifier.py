"""The verifier behind ports.VerifierSession: a transformers Gemma 4 text model with tree attention over a slot cache.

Knows positions, masks, which rows to keep and what a hand-off is made of; not sampling, rules or HTTP. One session's
calls are made by one thread at a time; sessions share the models and nothing else.

Legend: L committed positions, R rows of a pass (root first), N nodes, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.nn.verifier import ATTENTION_NAMES, handoff_layers
from hyco_export.runtime import wire
from hyco_export.runtime.chain_drafter import ChainDrafter
from hyco_export.runtime.handoff_encoder import HandoffEncoder
from hyco_export.runtime.ports import RowOutputs
from hyco_export.runtime.slot_cache import SlotCache, cache_layout
from hyco_export.runtime.tree import ancestor_mask, depths
from hyco_export.runtime.tree_mask import attention_mask

PREFILL_ROWS = 512  # rows of one prefill pass: bounds the mask at 512 x (L + 512) values


class Verifier:
    """The models behind a server, shared by its sessions.

    Args:
        model: Gemma 4 causal language model in evaluation mode.
        drafter: the server's own head, for sessions that draft on the server.
        encoder: grids of the head artifact, for sessions whose device runs the head.
        restricted_drafter: the same head over the head artifact's keep set and window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: ChainDrafter | None = None,
        encoder: HandoffEncoder | None = None,
        restricted_drafter: ChainDrafter | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self.drafter = drafter
        self.restricted_drafter = restricted_drafter
        self.encoder = encoder
        self.layout = cache_layout(config)
        self.handoff_layers = handoff_layers(config)
        self.device = model.device
        self._model = model
        self._backbone = model.get_decoder()
        self._soft_cap = config.final_logit_softcapping
        self._windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        # transformers cuts rows before KV-shared layers when this is an integer, and fails without per-layer embeddings
        self._all_rows = torch.tensor(0)

    def open(self) -> "TorchVerifierSession":
        """An empty session."""
        return TorchVerifierSession(self)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] -> input embeddings [..., H] with their factor."""
        return self._model.get_input_embeddings()(ids)

    def forward(
        self, cache: SlotCache, ids: np.ndarray, row_depths: np.ndarray, block: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of R rows on top of the cache, whose K/V it writes behind the committed ones.

        ids [R]; row_depths [R]: positions L + depth; block bool [R, R]: which rows of the pass a row sees.

        Returns:
            Hidden states [R, H] after the final norm, and those a hand-off sends (before it with `hidden_norm: pre`).
        """
        cache.reserve(len(ids))
        masks = {
            name: attention_mask(
                block,
                row_depths,
                cache.length,
                cache.first_visible(window),
                window,
                self._model.dtype,
                self.device,
            )
            for name, window in self._windows.items()
        }
        with self._states_before_norm() as before:
            after = self._backbone(
                input_ids=self._there(ids)[None],
                attention_mask=masks,
                position_ids=self._there(cache.length + row_depths)[None],
                cache=cache,
                use_cache=True,
                logits_to_keep=self._all_rows,
            ).last_hidden_state[0]
        return after, before[0] if before else after

    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        """Hidden states [R, H] after the final norm -> logits [R, V] float32 after the soft-cap."""
        logits = self._model.get_output_embeddings()(hidden)
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits.float().cpu().numpy()

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @contextmanager
    def _states_before_norm(self) -> Iterator[list[torch.Tensor]]:
        """Collects what the final norm is given, [R, H], where the hand-off sends it."""
        states: list[torch.Tensor] = []
        if self.encoder is None or self.encoder.spec.hidden_norm == "post":
            yield states
            return
        handle = self._backbone.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0]))
        try:
            yield states
        finally:
            handle.remove()


class TorchVerifierSession:
    """ports.VerifierSession: one session's committed positions."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._cache = SlotCache(verifier.layout)
        self._pass: tuple[torch.Tensor, torch.Tensor] | None = None  # states of the last verify, [R, H] each
        self._state: torch.Tensor | None = None  # [H] of the newest committed position, after the final norm
        self._handed: torch.Tensor | None = None  # [H] as the hand-off sends it

    @property
    def length(self) -> int:
        """L."""
        return self._cache.length

    @torch.inference_mode()
    def prime(self, ids: np.ndarray) -> np.ndarray:
        """Prefill ids [n]; logits [V] float32 of the last one."""
        for start in range(0, len(ids), PREFILL_ROWS):
            chunk = ids[start : start + PREFILL_ROWS]
            rows = np.arange(len(chunk))
            causal = rows[:, None] >= rows
            after, handed = self._verifier.forward(self._cache, chunk, rows, causal)
            self._cache.keep(range(len(chunk)))
            self._remember(after[-1], handed[-1])
        return self._verifier.logits(after[-1:])[0]

    @torch.inference_mode()
    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> RowOutputs:
        """Forward the root and the tree's nodes tokens [N], parents [N]."""
        ids = np.concatenate([[root], tokens]).astype(np.int64)  # [R]
        row_depths = np.concatenate([[0], depths(parents.tolist())])
        block = np.zeros((len(ids), len(ids)), bool)
        block[:, 0] = True  # all rows see the root
        block[1:, 1:] = ancestor_mask(parents.tolist())
        self._pass = self._verifier.forward(self._cache, ids, row_depths, block)
        return RowOutputs(self._verifier.logits(self._pass[0]))

    @torch.inference_mode()
    def commit(self, accepted: tuple[int, ...]) -> None:
        """Keep the root and these nodes (a path, depth order) of the last `verify`."""
        if self._pass is None:
            raise RuntimeError("commit without verify")
        rows = [0, *(node + 1 for node in accepted)]
        self._cache.keep(rows)
        after, handed = self._pass
        self._remember(after[rows[-1]], handed[rows[-1]])
        self._pass = None

    @torch.inference_mode()
    def draft(self, root: int, steps: int, restricted: bool = False) -> tuple[int, ...]:
        """The server's own head: top-1 tokens after `root`."""
        drafter = self._verifier.restricted_drafter if restricted else self._verifier.drafter
        if drafter is None or self._state is None:
            raise RuntimeError("draft needs a head and a primed session")
        keys_values = {}
        for layer_type, index in self._verifier.handoff_layers.items():
            keys, values = self._cache.committed(index, drafter.span(layer_type))
            keys_values[ATTENTION_NAMES[layer_type]] = keys[None], values[None]
        return drafter.chain(self._verifier.embed, root, self._state, keys_values, self.length, steps)

    @torch.inference_mode()
    def handoff(self, root: int, count: int) -> wire.Handoff:
        """e(root), h of the newest committed position, K/V of the `count` newest ones, in 8 bits."""
        encoder = self._verifier.encoder
        if encoder is None or self._handed is None:
            raise RuntimeError("handoff needs a head artifact and a primed session")
        rows = {name: self._cache.committed(self._verifier.handoff_layers[name], count) for name in LAYER_TYPES}
        e = self._verifier.embed(torch.tensor(root, device=self._verifier.device))
        return encoder.encode(e, self._handed, rows, max(0, self.length - count))

    def _remember(self, after: torch.Tensor, handed: torch.Tensor) -> None:
        """The states [H] of the newest committed position; copies, as views would keep the whole pass alive."""
        self._state, self._handed = after.clone(), handed.clone()

    def close(self) -> None:
        """Free the cache."""
        self._cache = SlotCache(self._verifier.layout)
        self._pass = self._state = self._handed = None
