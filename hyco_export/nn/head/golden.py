"""Which positions become golden, and what transformers' own head drafts there: a truth that shares no code with graphs.

The head is transformers' module with its own masks, one row at a time, fed what travels: 8-bit hand-off values of the
newest W positions. The static network, the graphs and the device's host must give the same. Knows captures and
weights; writes no files.

Legend: T tokens of a text, K steps, W positions of the device's window, C kept tokens, H the verifier's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import SHOWN_LOGITS, GoldenRoot, accepted_length
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, STATE_HALF
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable
from hyco_export.nn.capture import Capture
from hyco_export.nn.final_norm import FinalNorm
from hyco_export.nn.head.linears import linear_layers, load_weight
from hyco_export.nn.head.stored import stored_name
from hyco_export.nn.verifier import ATTENTION_NAMES

LONG_TEXTS, SHORT_TEXTS = 2, 4
EDGE_ROUNDS, SHORT_ROUNDS, LONG_ROUNDS = 5, 3, 1
BEFORE_EDGE = 2  # rounds that end before the sliding window's edge, where a text allows it

Embed = Callable[[int], torch.Tensor]  # token id -> [H]


@dataclass(frozen=True)
class Walk:
    """A session to be: `rounds` of K + 1 tokens after the first root."""

    text: int
    start: int
    rounds: int

    def roots(self, steps: int) -> list[int]:
        return [self.start + number * (steps + 1) for number in range(self.rounds + 1)]


def choose_walks(texts: Sequence[tuple[int, int]], window: int, steps: int) -> list[Walk]:
    """Sessions over texts of (answer start, tokens): short ones; on the longest texts one whose rounds cross the
    verifier's sliding window, and one primed beyond it. Texts that are too short are left out."""
    by_length = sorted(range(len(texts)), key=lambda text: -texts[text][1])
    longest, others = by_length[:LONG_TEXTS], sorted(by_length[LONG_TEXTS:])
    spread = np.unique(np.linspace(0, len(others) - 1, min(SHORT_TEXTS, len(others))).round().astype(int))
    wanted = [Walk(others[index], texts[others[index]][0], SHORT_ROUNDS) for index in spread]
    for text in longest:
        start, tokens = texts[text]
        wanted.append(Walk(text, max(start, window - BEFORE_EDGE * (steps + 1)), EDGE_ROUNDS))
        late = _last_root(tokens, steps) - LONG_ROUNDS * (steps + 1)
        if late >= start and late > window:
            wanted.append(Walk(text, late, LONG_ROUNDS))
    return [walk for each in wanted if (walk := _shortened(each, texts[each.text][1], steps)).rounds >= 0]


def _last_root(tokens: int, steps: int) -> int:
    """The last root whose chain can be compared; a text's last token may be a stop, which is never sent."""
    return tokens - 2 - steps


def _shortened(walk: Walk, tokens: int, steps: int) -> Walk:
    """With as many rounds as the text has room for; -1 when it has none for the first root."""
    room = (_last_root(tokens, steps) - max(walk.start, 1)) // (steps + 1)
    return Walk(walk.text, max(walk.start, 1), max(-1, min(walk.rounds, room)))


def load_stored(head: Gemma4AssistantForCausalLM, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the artifact's weights into transformers' module; a matrix that is stored in two is put together again."""
    for name, layer in linear_layers(head):
        stored = stored_name(name)
        if stored == PRE_PROJECTION and stored not in matrices:
            real = np.concatenate([matrices[EMBEDDING_HALF].real(), matrices[STATE_HALF].real()], axis=1)
        else:
            real = matrices[stored].real()
        load_weight(layer, torch.from_numpy(real))
    # the table it was tied to, which a head never looks up, would stay beside it: a gigabyte
    head.get_input_embeddings().weight = head.lm_head.weight


def on_grids(capture: Capture, grids: Mapping[str, Encoding]) -> Capture:
    """What arrives of a capture when it travels in these grids, float32."""

    def arrive(name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grids[name].dequantize(grids[name].quantize(values.float().numpy())))

    arrived: list[dict[str, torch.Tensor]] = [
        {layer_type: arrive(f"{kind}.{layer_type}", rows[layer_type]) for layer_type in LAYER_TYPES}
        for kind, rows in (("k", capture.k), ("v", capture.v))
    ]
    return Capture(capture.ids, capture.answer_start, arrive("e", capture.e), arrive("h", capture.h), *arrived)


def table_lookup(table: IntegerTable, kept: np.ndarray) -> Embed:
    """Embeddings of kept tokens from the 8-bit table."""
    return lambda token: torch.from_numpy(table.real(np.searchsorted(kept, [token])))[0]


@torch.no_grad()
def chain_logits(
    head: Gemma4AssistantForCausalLM,
    capture: Capture,
    root: int,
    window: int,
    steps: int,
    norm: FinalNorm | None,
    embed: Embed,
    kept: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Logits [C] of K steps at `root`, each fed the best token of the one before; `kept` [C] None: over all tokens."""
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
    """What is kept of one root: the highest logits [C] of every step; `ids` is the whole text."""
    top = [step.topk(min(SHOWN_LOGITS, len(kept))) for step in logits]
    following = tuple(ids[root + 1 : root + 1 + len(server_chain)])
    return GoldenRoot(
        position=root,
        top=tuple(tuple(int(kept[row]) for row in step.indices) for step in top),
        logits=tuple(tuple(step.values.tolist()) for step in top),
        server_accepted=accepted_length(tuple(server_chain), following),
        server_chain=tuple(server_chain),
    )
