"""Golden drafts: at which positions, and what transformers' own head drafts there.

The reference shares no code with the graphs: it is transformers' module with transformers' masks, run one row at a
time on what a device receives, the 8-bit hand-off of the newest W positions. The static network, the graphs and the
device's host code must give the same drafts. Golden trees, for a server's probabilities, are in `golden_tree`.

Legend: T tokens of a text, K steps, W positions of the device's window, C kept tokens, H the verifier's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import SHOWN_LOGITS, GoldenRoot, accepted_length
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, STATE_HALF
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable
from hyco_export.models.capture import Capture
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.quantisers import linear_layers, load_weight
from hyco_export.models.head.stored import stored_name
from hyco_export.models.head.unroll import FinalNorm
from hyco_export.models.verifier import ATTENTION_NAMES

LONG_TEXTS, SHORT_TEXTS = 2, 4
EDGE_ROUNDS, SHORT_ROUNDS, LONG_ROUNDS = 5, 3, 1
BEFORE_EDGE = 2  # rounds that end before the sliding window's edge, where a text allows it

Embed = Callable[[int], torch.Tensor]  # token id -> [H]


@dataclass(frozen=True)
class PlannedSession:
    """Where a golden session is taken: the text's number, its first root, and `rounds` of K + 1 tokens after it."""

    text: int
    start: int
    rounds: int

    def roots(self, steps: int) -> list[int]:
        return [self.start + number * (steps + 1) for number in range(self.rounds + 1)]


def choose_sessions(texts: Sequence[tuple[int, int]], window: int, steps: int) -> list[PlannedSession]:
    """Choose short sessions, and on the longest texts one that crosses the verifier's sliding window and one beyond it.

    Args:
        texts: (answer start, tokens) of each; those that are too short for a session are left out.
        window: the verifier's sliding window.
        steps: K.
    """
    by_length = sorted(range(len(texts)), key=lambda text: -texts[text][1])
    longest, others = by_length[:LONG_TEXTS], sorted(by_length[LONG_TEXTS:])
    spread = np.unique(np.linspace(0, len(others) - 1, min(SHORT_TEXTS, len(others))).round().astype(int))
    wanted = [PlannedSession(others[index], texts[others[index]][0], SHORT_ROUNDS) for index in spread]
    for text in longest:
        start, tokens = texts[text]
        wanted.append(PlannedSession(text, max(start, window - BEFORE_EDGE * (steps + 1)), EDGE_ROUNDS))
        late = _last_root(tokens, steps) - LONG_ROUNDS * (steps + 1)
        if late >= start and late > window:
            wanted.append(PlannedSession(text, late, LONG_ROUNDS))
    return [session for each in wanted if (session := _shortened(each, texts[each.text][1], steps)).rounds >= 0]


def _last_root(tokens: int, steps: int) -> int:
    """The last root whose chain can be compared: the text's last token may be a stop, which is never sent."""
    return tokens - 2 - steps


def _shortened(session: PlannedSession, tokens: int, steps: int) -> PlannedSession:
    """The session with as many rounds as fit into the text; -1 rounds when not even the first root does."""
    room = (_last_root(tokens, steps) - max(session.start, 1)) // (steps + 1)
    return PlannedSession(session.text, max(session.start, 1), max(-1, min(session.rounds, room)))


def load_stored(head: HeadModel, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the artifact's weights into transformers' module; a matrix that is stored in two halves is joined."""
    for name, layer in linear_layers(head):
        stored = stored_name(name)
        if stored == PRE_PROJECTION and stored not in matrices:
            real = np.concatenate([matrices[EMBEDDING_HALF].real(), matrices[STATE_HALF].real()], axis=1)
        else:
            real = matrices[stored].real()
        load_weight(layer, torch.from_numpy(real))
    # a head never looks up the table that its output layer was tied to: left as it is, it would take a gigabyte
    head.get_input_embeddings().weight = head.lm_head.weight


def received(capture: Capture, encodings: Mapping[str, Encoding]) -> Capture:
    """What a device receives of a capture when it is sent in these encodings, float32."""

    def decoded(name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(encodings[name].dequantize(encodings[name].quantize(values.float().numpy())))

    keys_values: list[dict[str, torch.Tensor]] = [
        {layer_type: decoded(f"{kind}.{layer_type}", rows[layer_type]) for layer_type in LAYER_TYPES}
        for kind, rows in (("k", capture.k), ("v", capture.v))
    ]
    return Capture(capture.ids, capture.answer_start, decoded("e", capture.e), decoded("h", capture.h), *keys_values)


def table_lookup(table: IntegerTable, kept: np.ndarray) -> Embed:
    """Embeddings of kept tokens from the 8-bit table."""
    return lambda token: torch.from_numpy(table.real(np.searchsorted(kept, [token])))[0]


@torch.no_grad()
def chain_logits(
    head: HeadModel,
    capture: Capture,
    root: int,
    window: int,
    steps: int,
    norm: FinalNorm | None,
    embed: Embed,
    kept: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Logits [C] of K steps at `root`, each on the best token of the one before.

    Args:
        capture: the text's hand-off, exact or `received`.
        window: positions of K/V before the root that the head sees.
        norm: applied to h, for a head that reads it after the verifier's final norm.
        embed: embedding of a drafted token.
        kept: [C] token ids of the rows; None: all tokens of the vocabulary.
    """
    first = max(0, root - window)
    keys_values = {
        ATTENTION_NAMES[kind]: (
            capture.k[kind][first:root].transpose(0, 1)[None],
            capture.v[kind][first:root].transpose(0, 1)[None],
        )
        for kind in LAYER_TYPES
    }
    state = capture.h[root - 1]
    embedding, state = capture.e[root], state if norm is None else norm(state)
    found = []
    for _ in range(steps):
        output = head(
            inputs_embeds=torch.cat([embedding, state])[None, None],
            attention_mask=torch.ones(1, root - first + 1),
            position_ids=torch.tensor([[root]]),
            shared_kv_states=keys_values,
            use_cache=False,
        )
        logits = output.logits[0, 0] if kept is None else output.logits[0, 0][kept]
        found.append(logits)
        best = int(logits.argmax())
        embedding = embed(best if kept is None else int(kept[best])).to(state.dtype)
        state = output.last_hidden_state[0, 0]
    return found


def golden_root(
    root: int, kept: np.ndarray, logits: Sequence[torch.Tensor], server_chain: Sequence[int], ids: Sequence[int]
) -> GoldenRoot:
    """The golden root of these logits [C] by step over the `kept` ids [C]; `ids` is the whole text."""
    top = [step.topk(min(SHOWN_LOGITS, len(kept))) for step in logits]
    following = tuple(ids[root + 1 : root + 1 + len(server_chain)])
    return GoldenRoot(
        position=root,
        top=tuple(tuple(int(kept[row]) for row in step.indices) for step in top),
        logits=tuple(tuple(step.values.tolist()) for step in top),
        server_accepted=accepted_length(tuple(server_chain), following),
        server_chain=tuple(server_chain),
    )
