"""Compares the constants of the head's graph, one by one, with the artifacts they come from.

From the graph backwards: head.onnx against `qat-head` and the keep set, these against the checkpoints of head and
verifier. The expected graph is emitted again and compared by name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper
from safetensors import safe_open

from hyco_export.core.artifact import ENCODINGS_FILE, HEAD, KEEPSET, QAT_HEAD
from hyco_export.core.device_spec import HEAD_GRAPH, HEAD_SPEC_FILE, HeadSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.keepset import KEEPSET_FILE, KeepSet
from hyco_export.core.network import head as network_head
from hyco_export.core.network.head import (
    EMBEDDING_HALF,
    FINAL_NORM,
    OUTPUT_LAYER,
    PRE_PROJECTION,
    PROJECTED_TABLE,
    STATE_HALF,
    TABLE,
)
from hyco_export.core.network.weight_files import read_head
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.numerics import sqnr_db
from hyco_export.core.recipe import Dtype
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.diagnosis.finding import Fault, Finding, displaced
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.graph.writer import CARRIERS, read_weight
from hyco_export.models.embedding_table import CHUNK_ROWS, find_embedding, quantized_embedding
from hyco_export.models.head.static_pass import open_float_head, with_projected_table
from hyco_export.models.head.stored import norm_vectors, stored_name
from hyco_export.models.verifier import load_head

REBUILD = "build it again: hyco-export {}, then hyco-export compile"
WHERE = f"{HEAD}/{HEAD_GRAPH}.onnx"
OWN_DB = 5.0  # 4 bits of the head's own weights were never below 11 dB; weights of another head are below 0
ROW_SLOPES = (0.7, 1.4)  # of a row against its original: training and clipping were seen to move it by 5 %
SCALE_SUFFIXES = ("/scale", "/zero_point", "/row_scale")


def graph_findings(run: Path, spec: HeadSpec, keepset: KeepSet) -> list[Finding]:
    """head.onnx against the trained head, the table and the calibrated encodings."""
    model = onnx.load(run / HEAD / f"{HEAD_GRAPH}.onnx")
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    side: HiddenNorm = "pre" if FINAL_NORM in found else "post"
    head = open_float_head(run, side)
    if PROJECTED_TABLE in found:
        head, _ = with_projected_table(head)
    ops = QdqOps(HEAD_GRAPH, head.weights, read_encodings(run / HEAD / ENCODINGS_FILE))
    network_head.build(ops, head.network)
    emitted = ops.model()
    wanted = {tensor.name: tensor for tensor in emitted.graph.initializer}
    missing = [name for name in wanted if name not in found]
    if missing:
        seen = f"{len(missing)} of {len(wanted)} constants are missing, first {missing[0]}"
        return [Finding("weights", WHERE, seen, REBUILD.format(HEAD))]
    differing = [name for name in wanted if not _same(found[name], wanted[name])]
    findings = []
    if side != spec.handoff.hidden_norm:
        seen = f"the graph takes h from {side}, head.json says {spec.handoff.hidden_norm}"
        findings.append(Finding("norm side", f"{HEAD}/{HEAD_SPEC_FILE}", seen, REBUILD.format(HEAD)))
    for name, names in _row_tables(differing):
        finding = _moved_rows(run, name, found[name], wanted[name], keepset)
        if finding is not None:
            findings.append(finding)
            differing = [other for other in differing if other not in names]
    findings += _constant_findings(found, wanted, differing)
    if [node.op_type for node in model.graph.node] != [node.op_type for node in emitted.graph.node]:
        nodes = f"{len(model.graph.node)} nodes, a graph of this head has {len(emitted.graph.node)}, or others"
        findings.append(Finding("weights", WHERE, nodes, REBUILD.format(HEAD)))
    return findings


def read_encodings(path: Path) -> dict[str, Encoding]:
    """The calibrated encodings by tensor name.

    Raises:
        ArtifactError: missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Encoding])
    except (OSError, msgspec.MsgspecError) as error:
        hint = f"build it again: hyco-export {path.parent.name}"
        raise ArtifactError(f"{path} cannot be read: {error}", hint) from error


def _same(left: onnx.TensorProto, right: onnx.TensorProto) -> bool:
    return left.data_type == right.data_type and left.dims == right.dims and _bytes(left) == _bytes(right)


def _bytes(tensor: onnx.TensorProto) -> bytes:
    return tensor.raw_data or numpy_helper.to_array(tensor).tobytes()


def _row_tables(differing: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    """Constants with a row a token that differ, and all constants that differ with their rows."""
    for name in (OUTPUT_LAYER, TABLE, PROJECTED_TABLE):
        if name in differing:
            yield name, {other for other in differing if other == name or other.startswith(f"{name}/")}


def _moved_rows(
    run: Path, name: str, found: onnx.TensorProto, wanted: onnx.TensorProto, keepset: KeepSet
) -> Finding | None:
    """Rows of the output layer or the table that belong to other tokens."""
    rows, right = _values(found), _values(wanted)
    owners: Iterable[tuple[int, np.ndarray]] = zip(keepset.ids.tolist(), right, strict=True)
    if name == OUTPUT_LAYER:
        matrix = read_head(run / QAT_HEAD).matrices[OUTPUT_LAYER]
        owners = enumerate(matrix.integers)
        if matrix.multipliers is not None:  # blocks are stored with the inputs first
            rows, right = (np.ascontiguousarray(part.T) for part in (rows, right))
    if rows.shape != right.shape:
        return None
    wrong = displaced(rows, right, keepset.ids, lambda: owners)
    if wrong is None or not wrong.permuted:
        return None
    return Finding("keep set", f"{WHERE}, {name}", wrong.text, REBUILD.format(HEAD))


def _constant_findings(
    found: Mapping[str, onnx.TensorProto], wanted: Mapping[str, onnx.TensorProto], differing: Sequence[str]
) -> Iterator[Finding]:
    """One finding a tensor: a scale with its ratio, or weights with the share that differs; most matrices: one."""
    weights = [name for name in differing if not name.endswith(SCALE_SUFFIXES)]
    matrices = [name for name in wanted if wanted[name].data_type in CARRIERS.values() and len(wanted[name].dims) == 2]
    if len(weights) * 2 > len(matrices):
        seen = f"{len(weights)} constants are not those of {QAT_HEAD}, first {weights[0]}"
        yield Finding("head", WHERE, seen, REBUILD.format(HEAD))
        return
    for name in differing:
        if name.endswith(SCALE_SUFFIXES):
            yield Finding("scale", f"{WHERE}, {name}", _scale_text(found[name], wanted[name]), REBUILD.format(HEAD))
        else:
            share = _differing_share(_values(found[name]), _values(wanted[name]))
            yield Finding("weights", f"{WHERE}, {name}", f"{share:.1%} of its values differ", REBUILD.format(HEAD))


def _values(tensor: onnx.TensorProto) -> np.ndarray:
    return read_weight(tensor) if tensor.data_type in set(CARRIERS.values()) else numpy_helper.to_array(tensor)


def _scale_text(found: onnx.TensorProto, wanted: onnx.TensorProto) -> str:
    left, right = (_values(tensor).astype(np.float64).ravel() for tensor in (found, wanted))
    if left.shape != right.shape:
        return f"has shape {list(found.dims)}, not {list(wanted.dims)}"
    changed = np.flatnonzero(left != right)
    first = changed[0]
    return f"{len(changed)} of {len(left)} differ, the first is {left[first]:.6g} instead of {right[first]:.6g}"


def _differing_share(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.mean(left != right)) if left.shape == right.shape else 1.0


def origin_findings(run: Path, head_checkpoint: Path, dtype: Dtype) -> list[Finding]:
    """The trained head against the checkpoint it was trained from: its own weights, every channel at its size."""
    from hyco_export.models.head.quantisers import linear_weights, untie_output_layer

    published = load_head(head_checkpoint, dtype)
    untie_output_layer(published)
    stored = read_head(run / QAT_HEAD)
    originals = {stored_name(name): weight.float().numpy() for name, weight in linear_weights(published).items()}
    where, findings, foreign = f"{QAT_HEAD}/head.safetensors", [], []
    for name, original in originals.items():
        real = _whole(name, stored.matrices)
        if real.shape != original.shape:
            findings.append(
                Finding(
                    "head", where, f"{name} is {list(real.shape)}, not {list(original.shape)}", REBUILD.format(QAT_HEAD)
                )
            )
        elif sqnr_db(original, real) >= OWN_DB or not _is_foreign(original, real):
            findings += _row_findings(name, original, real, where)
        else:
            foreign.append(f"{name} {sqnr_db(original, real):.0f} dB")
    for name, vector in norm_vectors(published).items():
        if not np.array_equal(vector, stored.vectors.get(name, np.zeros(0))):
            findings.append(Finding("weights", where, f"{name} is not the checkpoint's", REBUILD.format(QAT_HEAD)))
    if foreign:
        hint = "train the head of this recipe: hyco-export qat-head, or correct $.models.head"
        return [
            Finding(
                "head",
                where,
                f"{len(foreign)} of {len(originals)} matrices are not those of $.models.head: {', '.join(foreign[:3])}",
                hint,
            )
        ]
    return findings


def _whole(name: str, matrices: Mapping[str, IntegerMatrix]) -> np.ndarray:
    """Real values [N, K] of a linear layer of the module."""
    if name == PRE_PROJECTION and name not in matrices:
        return np.concatenate([matrices[EMBEDDING_HALF].real(), matrices[STATE_HALF].real()], axis=1)
    return matrices[name].real()


def _is_foreign(original: np.ndarray, real: np.ndarray) -> bool:
    """Do the rows have nothing in common? A row with a wrong scale still points where its original does."""
    products = np.einsum("nk,nk->n", original, real, dtype=np.float64)
    lengths = np.linalg.norm(original, axis=1) * np.linalg.norm(real, axis=1)
    return float(np.median(products / np.maximum(lengths, np.finfo(np.float32).tiny))) < 0.5


def _row_findings(name: str, original: np.ndarray, real: np.ndarray, where: str) -> Iterator[Finding]:
    """Output channels whose size is not their original's, or whose direction is another's."""
    power = np.einsum("nk,nk->n", original, original, dtype=np.float64)
    slopes = np.einsum("nk,nk->n", original, real, dtype=np.float64) / np.maximum(power, np.finfo(np.float32).tiny)
    wrong = np.flatnonzero((power > 0) & ((slopes < ROW_SLOPES[0]) | (slopes > ROW_SLOPES[1])))
    if len(wrong):
        sizes = f"channel {wrong[0]} is {slopes[wrong[0]]:.3g} times as large as in the checkpoint"
        text = f"{name}: {len(wrong)} of {len(slopes)} channels have another size, {sizes}"
        yield Finding("scale", where, text, REBUILD.format(QAT_HEAD))


def table_findings(run: Path, verifier: Path, dtype: Dtype, keepset: KeepSet) -> list[Finding]:
    """The kept embedding table against the verifier's own embedding."""
    source = find_embedding(verifier)
    where, hint = f"{KEEPSET}/{KEEPSET_FILE}", REBUILD.format(KEEPSET)
    if source.vocab_size != keepset.vocab_size:
        return [
            Finding(
                "keep set", where, f"counts {keepset.vocab_size} tokens, the verifier has {source.vocab_size}", hint
            )
        ]
    wanted = quantized_embedding(source, keepset.ids, dtype)
    with safe_open(run / KEEPSET / KEEPSET_FILE, framework="numpy") as stored:
        integers, scales = stored.get_tensor("table"), stored.get_tensor("table_scale")
    if integers.shape != wanted.integers.shape:
        return [Finding("keep set", where, f"table {list(integers.shape)}, not {list(wanted.integers.shape)}", hint)]

    def whole() -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, source.vocab_size, CHUNK_ROWS):
            tokens = np.arange(start, min(start + CHUNK_ROWS, source.vocab_size))
            yield from zip(tokens.tolist(), quantized_embedding(source, tokens, dtype).integers, strict=True)

    wrong = displaced(integers, wanted.integers, keepset.ids, whole)
    if wrong is not None and wrong.permuted:
        return [Finding("keep set", f"{where}, table", wrong.text, hint)]
    if wrong is not None:
        share = f"{wrong.differing} of {wrong.rows} rows are not the verifier's embeddings"
        fault: Fault = "verifier" if wrong.differing * 2 > wrong.rows else "weights"
        return [
            Finding(fault, f"{where}, table", share, "build it from this recipe's verifier: hyco-export build-keepset")
        ]
    changed = np.flatnonzero(scales != wanted.scale)
    if len(changed):
        row = changed[0]
        first = f"that of token {keepset.ids[row]} is {scales[row]:.6g} instead of {wanted.scale[row]:.6g}"
        text = f"{len(changed)} of {len(scales)} scales differ, {first}"
        return [Finding("scale", f"{where}, table_scale", text, hint)]
    return []
