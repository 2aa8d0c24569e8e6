"""Run under torchrun by test_parallel: the same sessions with whole verifiers and their shards, and what differs.

Arguments: structure of a head of `gemma`'s and folder of a verifier's checkpoint, for each verifier.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hyco_export.core.encodings import encoding_from_range
from hyco_export.core.handoff import HandoffSpec
from hyco_export.models.process_group import BroadcastChannel, current_group, load_sharded_verifier
from hyco_export.models.verifier import kv_shapes, load_verifier
from hyco_export.protocol.tree import ROOT
from hyco_export.server.interfaces import Check, Prefill
from hyco_export.server.passes.cache import HandoffEncoder
from hyco_export.server.passes.distributed import Followers, LeadingVerifier, follow
from hyco_export.server.passes.head_drafter import ChainDrafter
from hyco_export.server.passes.verifier import Verifier
from tests.support import gemma

PREFILL_ROWS, HANDED, STEPS = 8, 5, 3
LONG, SHORT = np.arange(4, 24), np.arange(30, 41)  # prompts
TOKENS = np.array([7, 9, 11, 9, 13])
PARENTS = np.array([ROOT, ROOT, 0, 2, 1])


def encoder_of(config: Any) -> HandoffEncoder:
    names = ("e", "h", "k.sliding", "v.sliding", "k.full", "v.full")
    grids = {name: encoding_from_range(-4, 4, "uint8") for name in names}
    return HandoffEncoder(HandoffSpec(gemma.HIDDEN, 16, "post", kv_shapes(config), grids))


def drive(verifier: Verifier) -> dict[str, Any]:
    """Two sessions, in turns and in shared passes: pieces of prompts, trees, commits, drafts, hand-offs, an end."""
    first, second = verifier.open(), verifier.open()
    first.reserve(64)
    second.reserve(48)
    logits = [first.prime(LONG), second.prime(SHORT)]
    passes = verifier.forward([Check(first, 5, TOKENS, PARENTS), Check(second, 6, TOKENS[:2], PARENTS[:2])])
    first.commit((0, 2, 3))
    second.commit(())
    drafts = [first.draft(8, STEPS), second.draft(9, STEPS)]
    handoffs = [session.handoff(8, HANDED) for session in (first, second)]
    second.close()
    third = verifier.open()
    third.reserve(32)
    passes += verifier.forward([Check(first, 8, TOKENS, PARENTS), Prefill(third, SHORT[:PREFILL_ROWS])])
    first.commit((1, 4))
    drafts.append(first.draft(3, STEPS))
    handoffs.append(first.handoff(3, HANDED))
    logits += [rows.numpy() for rows in passes]
    return {"logits": logits, "drafts": drafts, "handoffs": handoffs}


def options_of(config: Any, structure: str) -> dict[str, Any]:
    drafter = ChainDrafter(gemma.tiny_head(structure))
    return {"drafter": drafter, "encoder": encoder_of(config), "prefill_rows": PREFILL_ROWS}


def compare(structure: str, folder: Path) -> None:
    group = current_group()
    if not group.main:
        line = BroadcastChannel()
        model, heads = load_sharded_verifier(folder, "float32", group)
        follow(Verifier(model, prefill_rows=PREFILL_ROWS, heads=heads), line)
        return
    with Followers(group, BroadcastChannel()) as followers:
        model, heads = load_sharded_verifier(folder, "float32", group)
        verifier = LeadingVerifier(followers, model, heads=heads, **options_of(model.config, structure))
        ours = drive(verifier)
    whole = load_verifier(folder, "float32")
    alone = Verifier(whole, **options_of(whole.config, structure))
    theirs = drive(alone)
    handed = [
        (np.frombuffer(part(one), np.uint8).astype(int), np.frombuffer(part(other), np.uint8).astype(int))
        for one, other in zip(ours["handoffs"], theirs["handoffs"], strict=True)
        for part in (lambda handoff: handoff.kv, lambda handoff: handoff.e + handoff.h)
    ]
    found = {
        "divided": sorted(
            {name.split(".", 3)[-1] for name, value in model.named_parameters() if isinstance(value, DTensor)}
        ),
        "cache_share": verifier.cache_bytes(64) / alone.cache_bytes(64),
        "logit_error": max(float(abs(a - b).max()) for a, b in zip(ours["logits"], theirs["logits"], strict=True)),
        "logit_spread": float(np.std(theirs["logits"][0])),
        "drafts": [ours["drafts"], theirs["drafts"]],
        "handoff_error": max(int(abs(a - b).max()) for a, b in handed),
        "handoff_bytes": sum(len(a) for a, _ in handed),
    }
    print("found " + json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for structure, folder in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compare(structure, Path(folder))
