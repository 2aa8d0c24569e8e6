"""The part of `convert-head` that stores golden positions (`core.golden`): what `validate` tells faults by.

Files:
    golden.json                 positions, prompts, drafts of transformers' head, expected acceptance, probabilities
    golden-<n>.safetensors      `models.capture.Capture` of one validation text each, as far as it is needed
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from hyco_export.core.artifact import CAPTURE, FINAL_NORM_FILE, KEEPSET, QAT_HEAD
from hyco_export.core.encodings import Encoding
from hyco_export.core.estimates.shapes import GOLDEN_TREES
from hyco_export.core.golden import (
    LIKELY_ROOT,
    Golden,
    GoldenRoot,
    GoldenSession,
    GoldenText,
    GoldenTree,
    acceptance_by_depth,
    accepted_length,
    golden_text_file,
    write_golden,
)
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.keepset import KeepSet
from hyco_export.core.network.weight_files import read_head
from hyco_export.core.network.weights import read_kept_table
from hyco_export.core.recipe import Dtype
from hyco_export.models.capture import Capture, load_capture, save_capture
from hyco_export.models.embedding_table import find_embedding, scaled_row
from hyco_export.models.families.gemma4_assistant import make_dense
from hyco_export.models.generation_rules import checkpoint_suppressed_ids
from hyco_export.models.golden import (
    PlannedSession,
    chain_logits,
    choose_sessions,
    golden_root,
    load_stored,
    received,
    table_lookup,
)
from hyco_export.models.head.unroll import load_norm
from hyco_export.models.verifier import load_config, load_head
from hyco_export.stages.captured import read_answers, read_trees, sequence_paths
from hyco_export.stages.declarations import Metrics, Progress


def write_golden_files(
    inputs: Mapping[str, Path],
    keepset: KeepSet,
    handoff_encoding: Mapping[str, Encoding],
    hidden_norm: HiddenNorm,
    dtype: Dtype,
    steps: int,
    window: int,
    out_dir: Path,
    progress: Progress,
) -> Metrics:
    """Choose positions on the validation captures, draft there with transformers' head; the expected acceptance."""
    paths = sequence_paths(inputs[CAPTURE], "validation")
    answers = read_answers(inputs[CAPTURE], "validation")
    captures = [load_capture(path) for path in paths]
    sliding = load_config(inputs["verifier"]).get_text_config().sliding_window
    walks = choose_sessions([(capture.answer_start, len(capture)) for capture in captures], sliding, steps)
    texts = sorted({walk.text for walk in walks})
    reference = _ReferenceHeads(inputs, keepset, handoff_encoding, hidden_norm, dtype, steps, window)
    sessions = []
    for done, walk in enumerate(walks, 1):
        roots = reference.roots(walk, captures[walk.text])
        sessions.append(GoldenSession(texts.index(walk.text), roots))
        progress.step("golden sessions drafted by transformers' head", done, len(walks))
    for number, text in enumerate(texts):
        needed = max(walk.roots(steps)[-1] for walk in walks if walk.text == text) + steps + 2
        save_capture(out_dir / golden_text_file(number), captures[text].cut(needed))
    lengths = [
        accepted_length(root.chain, tuple(captures[walk.text].ids[root.position + 1 :].tolist()))
        for walk, session in zip(walks, sessions, strict=True)
        for root in session.roots
    ]
    server = [root.server_accepted for session in sessions for root in session.roots]
    golden = Golden(
        steps=steps,
        window=sliding,
        chain_acceptance=acceptance_by_depth(lengths, steps),
        server_accepted_mean=float(np.mean(server)) if server else 0.0,
        texts=tuple(GoldenText(answers[text].messages, tuple(answers[text].prompt_ids)) for text in texts),
        sessions=tuple(sessions),
        trees=choose_trees(read_trees(inputs[CAPTURE])),
    )
    write_golden(out_dir, golden)
    return {
        "roots": golden.root_count,
        "chain_acceptance": [round(share, 4) for share in golden.chain_acceptance],
        "server_accepted_mean": round(golden.server_accepted_mean, 3),
    }


def choose_trees(trees: Sequence[GoldenTree]) -> tuple[GoldenTree, ...]:
    """A few, spread over the texts; first those whose root a right server draws soon."""
    likely = [tree for tree in trees if tree.root_prob >= LIKELY_ROOT]
    if len(likely) < GOLDEN_TREES:
        return tuple(sorted(trees, key=lambda tree: -tree.root_prob)[:GOLDEN_TREES])
    return tuple(likely[place] for place in np.linspace(0, len(likely) - 1, GOLDEN_TREES).round().astype(int))


class _ReferenceHeads:
    """transformers' head twice: with the artifact's weights, and as it was published."""

    def __init__(
        self,
        inputs: Mapping[str, Path],
        keepset: KeepSet,
        handoff_encoding: Mapping[str, Encoding],
        hidden_norm: HiddenNorm,
        dtype: Dtype,
        steps: int,
        window: int,
    ) -> None:
        self._keepset, self._handoff_encoding, self._steps, self._window = keepset, handoff_encoding, steps, window
        self._head = make_dense(load_head(inputs["head"], "float32"))
        load_stored(self._head, read_head(inputs[QAT_HEAD]).matrices)
        self._published = load_head(inputs["head"], dtype)
        self._lookup = table_lookup(read_kept_table(inputs[KEEPSET]), keepset.ids)
        source = find_embedding(inputs["verifier"])
        self._embed = lambda token: scaled_row(source, token, dtype)
        allowed = np.ones(source.vocab_size, bool)
        allowed[list(checkpoint_suppressed_ids(inputs["verifier"], source.vocab_size))] = False
        self._allowed = np.flatnonzero(allowed)
        self._norm = load_norm(inputs[CAPTURE] / FINAL_NORM_FILE) if hidden_norm == "pre" else None

    def roots(self, walk: PlannedSession, capture: Capture) -> tuple[GoldenRoot, ...]:
        """Drafts of both at every root of a walk."""
        kept = torch.from_numpy(self._keepset.ids.astype(np.int64))
        allowed = torch.from_numpy(self._allowed)
        arrived, ids = received(capture, self._handoff_encoding), capture.ids.tolist()
        found = []
        for root in walk.roots(self._steps):
            logits = chain_logits(self._head, arrived, root, self._window, self._steps, self._norm, self._lookup, kept)
            whole = (capture, root, root, self._steps, self._norm, self._embed, allowed)
            server_chain = [int(self._allowed[step.argmax()]) for step in chain_logits(self._published, *whole)]
            found.append(golden_root(root, self._keepset.ids, logits, server_chain, ids))
        return tuple(found)
