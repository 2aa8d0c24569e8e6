"""Stage `convert-head`: the trained head's K steps as one static integer graph over the keep set.

Files:
    head.onnx                  the QDQ graph: integers in, kept rows out
    head.json                  `core.device_spec.HeadSpec`: sizes, hand-off encodings, inputs and outputs
    head_samples.safetensors   feeds of some validation positions (`core.golden`), for the compiler's parity
    encodings.json             every encoding of the graph by tensor name
    and those of `stages.parts.head_golden`, by which a running server and device are judged

Metrics tell how the graph on CPU drafts beside the same weights step by step in float, fed the same 8-bit inputs, and
beside the original head (transformers' own, with the choice by centroids of a head that has ordered embeddings: the
graph scores every kept token). The float head looks up embeddings also where the graph has a table of products.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from hyco_export.core.artifact import (
    CAPTURE,
    ENCODINGS_FILE,
    FINAL_NORM_FILE,
    HEAD_SAMPLES_FILE,
    KEEPSET,
)
from hyco_export.core.device_spec import HEAD_GRAPH, HEAD_SPEC_FILE, GraphSpec, HeadSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.estimates.shapes import ROOTS_PER_SEQUENCE, SAVED_EVERY
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, KvShape
from hyco_export.core.keepset import KeepSet, read_keepset
from hyco_export.core.memory import release_freed
from hyco_export.core.network import head as network_head
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.network.quantisation import handoff_encodings, head_encodings
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.models.checkpoints import checkpoint_digest
from hyco_export.models.families.gemma4_assistant import ordered_embeddings
from hyco_export.models.head.agreement import ComparedPosition, Drafts, compared_positions, match_original, run_session
from hyco_export.models.head.calibration import activation_ranges, captured_ranges, clipped_shares
from hyco_export.models.head.static_pass import FloatHead, TorchHeadSession, float_head, with_projected_table
from hyco_export.models.head.unroll import load_norm
from hyco_export.models.verifier import load_config, load_head
from hyco_export.stages.captured import sequence_paths
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.parts.head_golden import write_golden_files
from hyco_export.stages.table import ConvertHeadConfig, HeadCalibration

GRAPH_FILE = f"{HEAD_GRAPH}.onnx"


def build(config: ConvertHeadConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Calibrate, emit, compare; see the module for the files."""
    settings, calibration = config.head, config.calibration
    head = float_head(inputs, settings.steps, settings.runner_up_steps, settings.window, config.hidden_norm)
    keepset = read_keepset(inputs[KEEPSET])
    learned = sequence_paths(inputs[CAPTURE], "calibration")
    held_out = sequence_paths(inputs[CAPTURE], "validation")

    handoff_encoding = handoff_encodings(captured_ranges(learned, calibration.activation_percentile))
    emitted, table_db = with_projected_table(head) if settings.projected_table else (head, None)
    graph = _emit(emitted, learned, handoff_encoding, calibration, out_dir / GRAPH_FILE, progress)
    spec = _spec(
        head.network, graph, handoff_encoding, keepset, checkpoint_digest(inputs["verifier"]), calibration.mask_value
    )
    write_json(out_dir / HEAD_SPEC_FILE, spec)
    positions = _positions(config, head.network, graph, inputs, held_out)
    progress.note(f"comparing drafts at {len(positions)} validation positions")
    floating = run_session(TorchHeadSession(head, graph), positions)
    table = {} if table_db is None else _table_metrics(head, emitted, table_db)
    del head, emitted  # whose floats nobody needs beside transformers' heads, and those beside ONNX Runtime's
    release_freed()
    write_samples(out_dir / HEAD_SAMPLES_FILE, {HEAD_GRAPH: [position.feeds for position in positions[::SAVED_EVERY]]})
    steps, window = settings.steps, settings.window
    golden = write_golden_files(
        inputs, keepset, handoff_encoding, config.hidden_norm, config.dtype, steps, window, out_dir, progress
    )
    release_freed()  # transformers' modules are freed by a collection only
    integer = run_session(ReferenceSession(out_dir / GRAPH_FILE), positions)
    for remark in remarks(floating, integer, keepset.ids):
        progress.note(remark)
    return {
        **_compare(integer, floating, positions, keepset),
        "golden": golden,
        "clipped_share": {name: round(share, 6) for name, share in clipped_shares(held_out, handoff_encoding).items()},
        "round_bytes": spec.handoff.round_bytes,
        "row_bytes": spec.handoff.row_bytes,
        "bytes": (out_dir / GRAPH_FILE).stat().st_size,
        **({"ordered_embeddings": ordered} if (ordered := ordered_embeddings(load_config(inputs["head"]))) else {}),
        **table,
    }


def _table_metrics(plain: FloatHead, projected: FloatHead, sqnr_db: float) -> Metrics:
    """Both tables' sizes, and what the second rounding to 8 bits costs."""
    sizes = {
        "embeddings_bytes": plain.weights.tables[network_head.TABLE].integers.nbytes,
        "projected_bytes": projected.weights.tables[network_head.PROJECTED_TABLE].integers.nbytes,
    }
    return {"table": {**sizes, "projected_sqnr_db": round(sqnr_db, 1)}}


def _emit(
    head: FloatHead,
    paths: Sequence[Path],
    handoff_encoding: Mapping[str, Encoding],
    calibration: HeadCalibration,
    path: Path,
    progress: Progress,
) -> GraphSpec:
    """Write the integer graph on ranges seen in the captures, and these; its inputs and outputs."""
    mask_value = calibration.mask_value

    def report(done: int) -> None:
        progress.step("captures seen by calibration", done, len(paths))

    ranges = activation_ranges(head, paths, handoff_encoding, mask_value, report)
    encodings = head_encodings(head.network, ranges, handoff_encoding, mask_value)
    write_json(path.parent / ENCODINGS_FILE, encodings)
    ops = QdqOps(HEAD_GRAPH, head.weights, encodings)
    network_head.build(ops, head.network)
    model = ops.model()
    require_clean(model, HEAD_GRAPH)
    onnx.save(model, path)
    return ops.spec()


def _spec(
    network: HeadNetwork,
    graph: GraphSpec,
    handoff_encoding: Mapping[str, Encoding],
    keepset: KeepSet,
    verifier_digest: str,
    mask_value: float,
) -> HeadSpec:
    shape = network.architecture
    kv: dict[str, KvShape] = {layer_type: shape.kv_shape(layer_type) for layer_type in LAYER_TYPES}
    return HeadSpec(
        steps=network.steps,
        runner_up_steps=network.runner_up_steps,
        vocab_size=shape.vocab_size,
        keepset_digest=keepset.digest,
        verifier_digest=verifier_digest,
        handoff=HandoffSpec(shape.backbone, network.window, network.hidden_norm, kv, dict(handoff_encoding)),
        spans=shape.spans,
        inv_freq=shape.inv_freq,
        mask_value=mask_value,
        graph=graph,
    )


def _positions(
    config: ConvertHeadConfig,
    network: HeadNetwork,
    graph: GraphSpec,
    inputs: Mapping[str, Path],
    paths: Sequence[Path],
) -> list[ComparedPosition]:

    norm = load_norm(inputs[CAPTURE] / FINAL_NORM_FILE) if config.hidden_norm == "pre" else None
    original = load_head(inputs["head"], config.dtype)
    mask_value = config.calibration.mask_value
    return compared_positions(network, graph, paths, original, norm, mask_value, ROOTS_PER_SEQUENCE)


def remarks(floating: Drafts, integer: Drafts, kept: np.ndarray) -> list[str]:
    """What the agreement of two sessions does not say: a head of zeros agrees with itself in everything."""
    found = []
    for name, drafts in (("the trained head", floating), ("the head's graph", integer)):
        ids = np.unique(drafts.chain)
        if len(drafts.chain) > 1 and len(ids) == 1:
            found.append(
                f"{name} drafts token {kept[ids[0]]} at all {len(drafts.chain)} validation positions and every step: "
                "its weights may be zeros, or its scales lost; look at $.models.head and the qat-head stage"
            )
    return found


def _compare(integer: Drafts, floating: Drafts, positions: Sequence[ComparedPosition], keepset: KeepSet) -> Metrics:
    """The graph on CPU against its weights in float, step by step, and against the original head."""
    return {
        "positions": len(positions),
        **_equal_shares(integer, floating),
        "original_agreement": {
            "graph": _by_depth(integer, positions, keepset.ids),
            "float_w4": _by_depth(floating, positions, keepset.ids),
            "positions": [depth.positions for depth in match_original(integer, positions, keepset.ids)],
        },
    }


def _equal_shares(integer: Drafts, floating: Drafts) -> Metrics:
    """Shares of equal ids: over all chain ids, by depth, and of runner-ups."""
    same = integer.chain == floating.chain  # [n, K]
    seconds = integer.runner_up == floating.runner_up  # [n, S]
    return {
        "float_agreement": round(float(same.mean()), 4),
        "float_agreement_by_depth": [round(float(share), 4) for share in same.mean(axis=0)],
        "float_agreement_runner_up": [round(float(share), 4) for share in seconds.mean(axis=0)],
    }


def _by_depth(drafts: Drafts, positions: Sequence[ComparedPosition], kept: np.ndarray) -> list[float]:

    return [round(depth.share, 4) for depth in match_original(drafts, positions, kept)]
