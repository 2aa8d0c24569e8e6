"""A run that is only values: specs, keep set, recipe, and the server that belongs to it."""

from pathlib import Path

import numpy as np

from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH, GraphSpec, HeadSpec, SlmSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HandoffSpec, KvShape
from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe import Checkpoint, Data, KeepSetChoice, Models, Recipe, Validation
from hyco_export.evaluate.connect import RunArtifacts
from hyco_export.protocol.wire import PROTOCOL_VERSION, ServerInfo

VOCAB = 128
KEEPSET = KeepSet(np.arange(60), VOCAB)
HANDOFF = HandoffSpec(
    hidden=4,
    window=16,
    hidden_norm="post",
    kv={"sliding": KvShape(1, 2), "full": KvShape(1, 2)},
    encodings=dict.fromkeys(("e", "h", "k.sliding", "v.sliding", "k.full", "v.full"), Encoding("uint8", 0.1, 128)),
)
LOGITS = TensorSpec("logits", (3, 60), "uint16", Encoding("uint16", 0.01, 1000))
HEAD_SPEC = HeadSpec(4, 2, VOCAB, KEEPSET.digest, "v" * 64, HANDOFF, {}, {}, -100.0, GraphSpec(HEAD_GRAPH, (), ()))
SLM_SPEC = SlmSpec(
    32, 32, VOCAB, KEEPSET.digest, 4, 0, {}, {}, {}, (), -100.0,
    GraphSpec(SLM_TREE_GRAPH, (), (LOGITS,)), GraphSpec("slm_prefill", (), ()),
)  # fmt: skip
ARTIFACTS = RunArtifacts(Path("run"), HEAD_SPEC, SLM_SPEC, KEEPSET, "h" * 64, "c" * 64)
CHECKPOINT = Checkpoint(model="x")
RECIPE = Recipe(
    name="synthetic",
    models=Models(verifier=CHECKPOINT, head=CHECKPOINT, slm=CHECKPOINT),
    data=Data(calibration="a", validation="b", conversations="c"),
    keepset=KeepSetChoice(size=300),
    validation=Validation(prompts=3, emulator_prompts=1, max_new_tokens=16, emulator_max_new_tokens=6),
)
INFO = ServerInfo(
    version=PROTOCOL_VERSION,
    server="hyco-export",
    verifier_digest="v" * 64,
    tokenizer_digest="t" * 64,
    vocab_size=VOCAB,
    stop_ids=[1],
    head_digest="h" * 64,
    keepset_digest=KEEPSET.digest,
    node_limit=64,
    prompt_limit=4096,
    server_steps=4,
    rules=["exact", "epsilon"],
    clock="thread-cpu",
)
