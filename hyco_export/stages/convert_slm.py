"""Stage `convert-slm`: the SLM checkpoint becomes two static integer graphs over K/V rings (HyCo, §3.2, Appendix A).

Files:
    slm_tree.onnx, slm_prefill.onnx   QDQ graphs: integers and scales of the weights as in the checkpoint
    slm_graphs.data                   the weights of both, where they are large
    slm.json                          `SlmSpec`: what the host needs
    slm_tables.safetensors            embedding tables for the host, packed
    slm_weights.safetensors           the same weights for the float back end
    slm_opening.safetensors           K/V rows of the attention-sink token (BOS) in the rings' integers, if stored
    slm_bridge.safetensors            the map of both vocabularies, for an SLM with another tokenizer
    slm_samples.safetensors           sample feeds of both graphs
    encodings.json, sqnr.json         every encoding; SQNR by layer, top-1 agreement, clipping
    and, where the recipe asks for them, those of `stages.parts.sensitivity`

Four gates: float parity with transformers' model, the same logits after channels of the residual stream were split,
weights equal one by one, graphs without lint findings. Activations
have 16-bit ranges of this stage's own; the checkpoint's 8-bit activation scales are not used, and switched off in the
model that parity is measured against.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx

from hyco_export.core.artifact import (
    CAPTURE,
    ENCODINGS_FILE,
    KEEPSET,
    SLM_SAMPLES_FILE,
    SLM_SINK_FILE,
    PartialBuild,
)
from hyco_export.core.device_spec import (
    SLM_PREFILL_GRAPH,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSpec,
    TensorSpec,
    to_integers,
)
from hyco_export.core.encodings import Encoding
from hyco_export.core.estimates.shapes import SAMPLES_PER_GRAPH
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.keepset import read_keepset
from hyco_export.core.memory import release_freed
from hyco_export.core.network.host import slm_spec, write_attention_sink
from hyco_export.core.network.quantisation import kv_range_names, slm_encodings
from hyco_export.core.network.slm import SlmNetwork, layer_results
from hyco_export.core.network.weights import PackedMatrices, Weights
from hyco_export.errors import RecipeError
from hyco_export.evaluate.slm_quality import SlmQuality, measure_slm
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.slm_graphs import prefill_graph, tree_graph, with_outputs
from hyco_export.graph.writer import ExternalData
from hyco_export.models.slm.calibration import CalibrationMemory, calibrated_ranges, prefill_samples, tree_samples
from hyco_export.models.slm.float import open_checkpoint
from hyco_export.models.slm.surgery import slm_network
from hyco_export.stages.captured import captured_texts, long_texts
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.parts.sensitivity import QuantisedSlm, write_slm_evidence
from hyco_export.stages.parts.slm_proofs import ComparedText, find_reference, require_equal, weight_pairs
from hyco_export.stages.parts.slm_surgery import (
    Surgery,
    bridge_metrics,
    find_columns,
    open_for,
    operate,
    rounding_of,
    split_metrics,
    with_sink,
    with_split_outliers,
    without_sink,
)
from hyco_export.stages.table import ConvertSlmConfig

TREE_FILE, PREFILL_FILE = f"{SLM_TREE_GRAPH}.onnx", f"{SLM_PREFILL_GRAPH}.onnx"
SQNR_FILE = "sqnr.json"
SAMPLE_SEED = 20261011  # of the forests among the samples
GRAPH_DATA_FILE = "slm_graphs.data"
INLINE_VALUES = 50_000_000  # 25 MB in INT4: smaller models keep their weights inside the graphs


@dataclass(frozen=True)
class Graphs:
    """The emitted graphs and their inputs and outputs."""

    tree_model: onnx.ModelProto
    tree: GraphSpec
    prefill: GraphSpec
    encodings: Mapping[str, Encoding]


def check(config: ConvertSlmConfig, sources: Mapping[str, Path]) -> None:
    """The checkpoint holds every tensor, finite, in a layout and of a model that can be converted.

    Raises:
        CheckpointError: it does not.
        RecipeError: `wide_kv` names no ring.
    """
    checkpoint = open_checkpoint(sources["slm"], rounding_of(config.weights))
    network = slm_network(checkpoint, _rings(config))
    wide_rings(config.graph.wide_kv, network)
    checkpoint.require_finite()


def build(config: ConvertSlmConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Surgery, float parity, calibration, emission, comparison; see the module for files and gates."""
    keepset = read_keepset(inputs[KEEPSET])
    checkpoint = open_for(keepset, inputs["slm"], config.weights, bridged=config.bridge is not None)
    columns = find_columns(config.bridge, keepset, inputs.get("verifier"), inputs["slm"], checkpoint.config.vocab_size)
    captured = captured_texts(inputs[CAPTURE], "validation", config.sequence_limit)
    validation = long_texts(columns.read(captured), config.graph.rows)
    texts = captured_texts(inputs[CAPTURE], "calibration", config.sequence_limit)
    calibration = long_texts(columns.read(texts), config.graph.rows)
    surgery = operate(checkpoint, _rings(config), columns.kept, out_dir)
    if config.graph.stored_opening:
        surgery = with_sink(surgery, calibration[0][0], config.graph.rows, config.calibration.mask_value)
        calibration, validation = (without_sink(ids, surgery, config.graph.rows) for ids in (calibration, validation))
    compared = ComparedText(
        validation, config.graph.rows, config.calibration.mask_value, config.calibration.slm_quality_passes
    )
    reference = find_reference(inputs["slm"], checkpoint, surgery, compared, progress)
    share, mask_value = config.graph.outlier_columns, compared.mask_value
    surgery = with_split_outliers(surgery, share, calibration, config.graph.rows, mask_value, out_dir)
    graphs = _emit(config, surgery, _calibrate(config, surgery, calibration, out_dir, progress), out_dir)
    equal = require_equal(weight_pairs(reference.weights, out_dir, out_dir / TREE_FILE, out_dir / PREFILL_FILE))
    parity, original_best = reference.parity, reference.original_best
    del reference  # and transformers' model with it, which only a collection frees
    release_freed()
    quality = _measure(config, surgery, graphs, validation, original_best, out_dir)
    if config.graph.evidence_passes:
        wanted = config.calibration
        quantised = QuantisedSlm(surgery, graphs.encodings, wanted.mask_value, wanted.slm_margin)
        write_slm_evidence(quantised, quality, config.graph, validation, out_dir, progress)
    token = surgery.sink.token if surgery.sink else None
    spec = slm_spec(
        surgery.network,
        columns.kept.vocab_size,
        keepset.digest,
        config.calibration.mask_value,
        graphs.tree,
        graphs.prefill,
        token,
    )
    columns.write(out_dir)
    write_json(out_dir / SLM_SPEC_FILE, spec)
    if surgery.sink:
        write_attention_sink(out_dir / SLM_SINK_FILE, surgery.sink, graphs.tree)
    _write_samples(config, surgery, graphs, validation, out_dir)
    return {
        "tensors_equal": f"{equal} of {equal}",
        "parity_in_std": parity,
        "sqnr_min_db": round(quality.worst_db, 2),
        "sqnr_median_db": round(quality.median_db, 2),
        "sqnr_logits_db": round(quality.layers["logits"], 2),
        "top1_agreement": round(quality.top1_agreement, 4),
        **_original_agreement(quality),
        **split_metrics(surgery),
        "positions": quality.positions,
        **bridge_metrics(columns, keepset, captured),
        "bytes": {path.name: path.stat().st_size for path in sorted(out_dir.iterdir()) if path.is_file()},
    }


def _original_agreement(quality: SlmQuality) -> Metrics:
    found = quality.original_agreement
    return {} if found is None else {"top1_agreement_unrounded": round(found, 4)}


def wide_rings(patterns: Sequence[str], network: SlmNetwork) -> frozenset[str]:
    """The rings that a recipe wants in 16 bits.

    Raises:
        RecipeError: a pattern names none.
    """
    rings = [name.replace("_new", "") for name in kv_range_names(network)]
    for pattern in patterns:
        if not any(fnmatchcase(ring, pattern) for ring in rings):
            raise RecipeError(
                f"$.slm.wide_kv: no ring is called {pattern}",
                f"the SLM stores K/V in {', '.join(rings)}; patterns as v.* name several",
            )
    return frozenset(ring for ring in rings if any(fnmatchcase(ring, pattern) for pattern in patterns))


def _rings(config: ConvertSlmConfig) -> dict[str, int]:
    return {"sliding": config.graph.sliding_ring, "full": config.graph.ring}


def _calibrate(
    config: ConvertSlmConfig, surgery: Surgery, sequences: Sequence[Sequence[int]], out_dir: Path, progress: Progress
) -> dict[str, Encoding]:
    """Encodings from the calibration sequences; a killed build has those of whole sequences already."""
    wanted, memory = config.calibration, CalibrationMemory(PartialBuild(out_dir))
    if done := memory.sequences:
        progress.note(f"going on: {done} of {len(sequences)} calibration sequences are done")
    ranges = calibrated_ranges(
        surgery.float_slm,
        surgery.tables,
        sequences,
        config.graph.rows,
        wanted.mask_value,
        wanted.slm_percentile,
        wanted.kv_percentile,
        lambda done, total: progress.step("SLM calibration passes", done, total),
        wanted.slm_passes,
        surgery.sink,
        memory,
    )
    wide = wide_rings(config.graph.wide_kv, surgery.network)
    return slm_encodings(surgery.network, ranges, wanted.slm_margin, wanted.kv_margin, wanted.mask_value, wide)


def _emit(config: ConvertSlmConfig, surgery: Surgery, encodings: Mapping[str, Encoding], out_dir: Path) -> Graphs:
    """Write both graphs and the table of encodings.

    Raises:
        CompileError: a graph breaks a rule of the NPU.
    """
    network, weights, graph = surgery.network, surgery.weights, config.graph
    with _data_file(weights, out_dir) as data:
        tree_model, tree = tree_graph(network, weights, encodings, graph.rows, data)
        prefill_model, prefill = prefill_graph(network, weights, encodings, graph.prefill_rows, data)
    for model, file in ((tree_model, TREE_FILE), (prefill_model, PREFILL_FILE)):
        require_clean(model, file, out_dir)
        onnx.save(model, out_dir / file)
    write_json(out_dir / ENCODINGS_FILE, dict(encodings))
    return Graphs(tree_model, tree, prefill, encodings)


@contextmanager
def _data_file(weights: Weights, out_dir: Path) -> Iterator[ExternalData | None]:
    """Where both graphs put their large weights: in a file of their own when they would make a protobuf unwieldy."""
    assert isinstance(weights.matrices, PackedMatrices)
    if weights.matrices.value_count <= INLINE_VALUES:
        yield None
    else:
        with ExternalData(out_dir / GRAPH_DATA_FILE) as data:
            yield data


def _measure(
    config: ConvertSlmConfig,
    surgery: Surgery,
    graphs: Graphs,
    sequences: Sequence[Sequence[int]],
    original_best: np.ndarray | None,
    out_dir: Path,
) -> SlmQuality:
    """Compare the tree graph with the float network on held-out sequences; writes the figures."""
    shape = (config.graph.rows, surgery.network.stream_width)
    inner = [
        TensorSpec(name, shape, graphs.encodings[name].dtype, graphs.encodings[name])
        for name in layer_results(surgery.network)
    ]
    session = ReferenceSession(with_outputs(graphs.tree_model, inner).SerializeToString(), data_folder=out_dir)
    quality = measure_slm(
        surgery.float_slm,
        session,
        graphs.tree,
        inner,
        graphs.encodings,
        surgery.tables,
        config.calibration.mask_value,
        sequences,
        config.calibration.slm_quality_passes,
        original_best,
        surgery.sink,
    )
    write_json(out_dir / SQNR_FILE, quality)
    return quality


def _write_samples(
    config: ConvertSlmConfig, surgery: Surgery, graphs: Graphs, sequences: Sequence[Sequence[int]], out_dir: Path
) -> None:
    """Some feeds of both graphs, on validation text."""
    chosen, mask_value = sequences[:SAMPLES_PER_GRAPH], config.calibration.mask_value
    slm, tables = surgery.float_slm, surgery.tables
    trees = tree_samples(slm, tables, chosen, config.graph.rows, mask_value, SAMPLE_SEED, surgery.sink)
    prefills = prefill_samples(slm, tables, chosen, config.graph.prefill_rows, mask_value, surgery.sink)
    write_samples(
        out_dir / SLM_SAMPLES_FILE,
        {
            graphs.tree.name: [to_integers(graphs.tree.inputs, feeds) for feeds in trees],
            graphs.prefill.name: [to_integers(graphs.prefill.inputs, feeds) for feeds in prefills],
        },
    )
