"""Stage `convert-slm`: the SLM checkpoint becomes two static integer graphs over K/V rings (HyCo, §3.2, Appendix A).

Files:
    slm_tree.onnx, slm_prefill.onnx   QDQ graphs: integers and scales of the weights as in the checkpoint
    slm.json                          `SlmSpec`: what the host needs
    slm_tables.safetensors            embedding tables for the host, packed
    slm_weights.safetensors           the same weights for the float back end
    slm_samples.safetensors           sample feeds of both graphs
    encodings.json, sqnr.json         every grid; SQNR by layer, top-1 agreement, clipping
    and, where the recipe asks for them, those of `stages.slm_evidence`

Three gates: float parity with transformers' model, weights equal one by one, graphs without lint findings. Activations
have 16-bit ranges of this stage's own; the checkpoint's 8-bit activation scales are not used, and switched off in the
model that parity is measured against.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hyco_export.core import recipe as recipes
from hyco_export.core.devicespec import SLM_PREFILL_GRAPH, SLM_SPEC_FILE, SLM_TREE_GRAPH, write_spec
from hyco_export.core.encodings import Encoding
from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.core.json_file import write_json
from hyco_export.core.keepset import KeepSet, read_keepset
from hyco_export.core.layout import CAPTURE, KEEPSET, SLM, SLM_SAMPLES_FILE
from hyco_export.core.network.boundary import to_integers
from hyco_export.core.network.slm import SlmNetwork, layer_results
from hyco_export.core.network.slm_file import WEIGHTS_FILE, write_slm
from hyco_export.core.network.slm_grids import slm_encodings
from hyco_export.core.network.slm_spec import slm_spec
from hyco_export.core.network.weights import Weights
from hyco_export.core.samples import write_samples
from hyco_export.core.tables import TABLES_FILE, HostTables, save_tables
from hyco_export.errors import ArtifactError, CheckpointError
from hyco_export.stages.capture import Split, read_answers
from hyco_export.stages.slm_evidence import Subject, write_slm_evidence
from hyco_export.stages.slm_proofs import require_equal, require_parity, weight_pairs
from hyco_export.stages.stage import Metrics, Progress, Source, Stage

if TYPE_CHECKING:
    import onnx

    from hyco_export.evaluate.slm_quality import SlmQuality
    from hyco_export.nn.slm.static_pass import FloatSlm

TREE_FILE, PREFILL_FILE = f"{SLM_TREE_GRAPH}.onnx", f"{SLM_PREFILL_GRAPH}.onnx"
ENCODINGS_FILE = "encodings.json"
SQNR_FILE = "sqnr.json"
SAMPLE_SEED = 20261011  # of the forests among the samples
QUALITY_PASSES = 96  # about 3,000 positions: top-1 agreement to within half a percent
SAMPLES_PER_GRAPH = 4  # the emulator takes seconds to minutes for one


class ConvertSlmConfig(msgspec.Struct, frozen=True):
    """What changes the artifact's bytes."""

    graph: recipes.SlmGraph
    calibration: recipes.Calibration
    sequence_limit: int


@dataclass(frozen=True)
class Surgery:
    """What becomes of a checkpoint before calibration. `kept`: token ids [V] of the output layer's rows."""

    network: SlmNetwork
    weights: Weights
    float_slm: "FloatSlm"
    tables: HostTables
    kept: np.ndarray


@dataclass(frozen=True)
class Graphs:
    """The emitted graphs and their inputs and outputs."""

    tree_model: "onnx.ModelProto"
    tree: GraphSpec
    prefill: GraphSpec
    encodings: Mapping[str, Encoding]


def config(recipe: recipes.Recipe) -> ConvertSlmConfig:
    """The recipe's fields that this stage reads."""
    return ConvertSlmConfig(recipe.slm, recipe.calibration, recipe.capture.sequence_limit)


def sources(recipe: recipes.Recipe) -> Mapping[str, Source]:
    """The SLM's checkpoint."""
    return {"slm": recipe.models.slm}


def check(config: ConvertSlmConfig, sources: Mapping[str, Path]) -> None:
    """The checkpoint holds every tensor, in a layout and of a model that can be converted.

    Raises:
        CheckpointError: it does not.
    """
    from hyco_export.nn.slm.gemma_quant import PackedCheckpoint
    from hyco_export.nn.slm.surgery import slm_network

    slm_network(PackedCheckpoint(sources["slm"]), _rings(config))


def build(config: ConvertSlmConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Surgery, float parity, calibration, emission, comparison; see the module for files and gates."""
    from hyco_export.nn.slm.gemma_quant import stock_model

    keepset = read_keepset(inputs[KEEPSET])
    calibration = _sequences(inputs[CAPTURE], "calibration", config)
    validation = _sequences(inputs[CAPTURE], "validation", config)
    surgery = _operate(config, inputs["slm"], keepset, out_dir)
    stock = stock_model(inputs["slm"])

    parity = require_parity(
        stock,
        surgery.float_slm,
        surgery.tables,
        surgery.kept,
        [token for ids in validation for token in ids],
        config.graph.rows,
        lambda done, total: progress.step("parity with transformers", done, total),
    )
    graphs = _emit(config, surgery, _calibrate(config, surgery, calibration, progress), out_dir)
    equal = require_equal(weight_pairs(stock, surgery.kept, out_dir, out_dir / TREE_FILE, out_dir / PREFILL_FILE))
    quality = _measure(config, surgery, graphs, validation, out_dir)
    if config.graph.evidence_passes:
        subject = Subject(surgery.float_slm, surgery.tables, graphs.encodings, config.calibration.mask_value)
        write_slm_evidence(subject, quality, config.graph, validation, out_dir, progress)
    spec = slm_spec(surgery.network, keepset, config.calibration.mask_value, graphs.tree, graphs.prefill)
    write_spec(out_dir / SLM_SPEC_FILE, spec)
    _write_samples(config, surgery, graphs, validation, out_dir)
    return {
        "tensors_equal": f"{equal} of {equal}",
        "parity_in_std": parity,
        "sqnr_min_db": round(quality.worst_db, 2),
        "sqnr_median_db": round(quality.median_db, 2),
        "sqnr_logits_db": round(quality.layers["logits"], 2),
        "top1_agreement": round(quality.top1_agreement, 4),
        "positions": quality.positions,
        "bytes": {path.name: path.stat().st_size for path in sorted(out_dir.iterdir())},
    }


def _rings(config: ConvertSlmConfig) -> dict[str, int]:
    return {"sliding": config.graph.sliding_ring, "full": config.graph.ring}


def _sequences(capture: Path, split: Split, config: ConvertSlmConfig) -> list[list[int]]:
    """Prompt and answer ids of a split that fill at least one pass.

    Raises:
        ArtifactError: there are none.
    """
    answers = read_answers(capture, split)
    sequences = [(answer.prompt_ids + answer.answer_ids)[: config.sequence_limit] for answer in answers]
    long_enough = [ids for ids in sequences if len(ids) >= config.graph.rows]
    if not long_enough:
        raise ArtifactError(
            f"{capture} has no {split} sequence of {config.graph.rows} tokens or more ($.slm.rows)",
            "raise $.capture.max_new_tokens or lower $.slm.rows, then: hyco-export capture",
        )
    return long_enough


def _operate(config: ConvertSlmConfig, folder: Path, keepset: KeepSet, out_dir: Path) -> Surgery:
    """Read the checkpoint, write tables and float weights.

    Raises:
        CheckpointError: unreadable, not convertible, or of another vocabulary than the keep set.
    """
    from hyco_export.nn.slm.gemma_quant import PackedCheckpoint
    from hyco_export.nn.slm.static_pass import FloatSlm
    from hyco_export.nn.slm.surgery import host_tables, slm_network, slm_weights
    from hyco_export.nn.torch_ops import TorchWeights

    checkpoint = PackedCheckpoint(folder)
    if checkpoint.config.vocab_size != keepset.vocab_size:
        raise CheckpointError(
            f"the SLM's vocabulary has {checkpoint.config.vocab_size} tokens, the keep set's {keepset.vocab_size}",
            "give an SLM with the verifier's tokenizer ($.models.slm)",
        )
    network = slm_network(checkpoint, _rings(config))
    weights = slm_weights(checkpoint, keepset.ids)
    write_slm(out_dir / WEIGHTS_FILE, network, weights)
    save_tables(out_dir / TABLES_FILE, host_tables(checkpoint))
    tables = HostTables(out_dir / TABLES_FILE)
    return Surgery(network, weights, FloatSlm(network, TorchWeights(weights)), tables, keepset.ids)


def _calibrate(
    config: ConvertSlmConfig, surgery: Surgery, sequences: Sequence[Sequence[int]], progress: Progress
) -> dict[str, Encoding]:
    """Encodings from the calibration sequences."""
    from hyco_export.nn.slm.calibration import calibrated_ranges

    wanted = config.calibration
    ranges = calibrated_ranges(
        surgery.float_slm,
        surgery.tables,
        sequences,
        config.graph.rows,
        wanted.mask_value,
        wanted.slm_percentile,
        wanted.kv_percentile,
        lambda done, total: progress.step("SLM calibration passes", done, total),
    )
    return slm_encodings(surgery.network, ranges, wanted.slm_margin, wanted.kv_margin, wanted.mask_value)


def _emit(config: ConvertSlmConfig, surgery: Surgery, encodings: Mapping[str, Encoding], out_dir: Path) -> Graphs:
    """Write both graphs and the table of grids.

    Raises:
        CompileError: a graph breaks a rule of the NPU.
    """
    import onnx

    from hyco_export.graph.lint import require_clean
    from hyco_export.graph.slm_graphs import prefill_graph, tree_graph

    tree_model, tree = tree_graph(surgery.network, surgery.weights, encodings, config.graph.rows)
    prefill_model, prefill = prefill_graph(surgery.network, surgery.weights, encodings, config.graph.prefill_rows)
    for model, file in ((tree_model, TREE_FILE), (prefill_model, PREFILL_FILE)):
        require_clean(model, file)
        onnx.save(model, out_dir / file)
    write_json(out_dir / ENCODINGS_FILE, dict(encodings))
    return Graphs(tree_model, tree, prefill, encodings)


def _measure(
    config: ConvertSlmConfig, surgery: Surgery, graphs: Graphs, sequences: Sequence[Sequence[int]], out_dir: Path
) -> "SlmQuality":
    """Compare the tree graph with the float network on held-out sequences; writes the figures."""
    from hyco_export.evaluate.slm_quality import measure_slm
    from hyco_export.graph.reference import ReferenceSession
    from hyco_export.graph.slm_graphs import with_outputs

    shape = (config.graph.rows, surgery.network.hidden)
    inner = [
        TensorSpec(name, shape, graphs.encodings[name].dtype, graphs.encodings[name])
        for name in layer_results(surgery.network)
    ]
    session = ReferenceSession(with_outputs(graphs.tree_model, inner).SerializeToString())
    quality = measure_slm(
        surgery.float_slm,
        session,
        graphs.tree,
        inner,
        graphs.encodings,
        surgery.tables,
        config.calibration.mask_value,
        sequences,
        QUALITY_PASSES,
    )
    write_json(out_dir / SQNR_FILE, quality)
    return quality


def _write_samples(
    config: ConvertSlmConfig, surgery: Surgery, graphs: Graphs, sequences: Sequence[Sequence[int]], out_dir: Path
) -> None:
    """Some feeds of both graphs, on validation text."""
    from hyco_export.nn.slm.samples import prefill_samples, tree_samples

    chosen, mask_value = sequences[:SAMPLES_PER_GRAPH], config.calibration.mask_value
    slm, tables = surgery.float_slm, surgery.tables
    trees = tree_samples(slm, tables, chosen, config.graph.rows, mask_value, SAMPLE_SEED)
    prefills = prefill_samples(slm, tables, chosen, config.graph.prefill_rows, mask_value)
    write_samples(
        out_dir / SLM_SAMPLES_FILE,
        {
            graphs.tree.name: [to_integers(graphs.tree.inputs, feeds) for feeds in trees],
            graphs.prefill.name: [to_integers(graphs.prefill.inputs, feeds) for feeds in prefills],
        },
    )


STAGE = Stage(SLM, 1, (CAPTURE, KEEPSET), config, sources, build, check=check)
