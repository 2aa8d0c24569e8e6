"""Compares every linear layer and table of the SLM's graphs with its checkpoint, one at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from hyco_export.core.artifact import ENCODINGS_FILE, SLM
from hyco_export.core.device_spec import SLM_PREFILL_GRAPH, SLM_TREE_GRAPH
from hyco_export.core.network.slm import GATE, SlmNetwork
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, HostTables, PackedRows
from hyco_export.evaluate.diagnosis.finding import Finding, displaced
from hyco_export.evaluate.diagnosis.head_weights import read_encodings
from hyco_export.graph.slm_graphs import StoredMatrices
from hyco_export.models.families.slm_family import MODEL_PREFIX, PER_LAYER_TABLE, TOKEN_TABLE
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.verifier import load_config

REBUILD = "build it again: hyco-export convert-slm, then hyco-export compile"
OUTPUT_LAYER = "lm_head"
TABLE_ROWS = 8192  # compared at a time: 37 MB of the per-layer table of Gemma 4 E2B


def slm_findings(run: Path, checkpoint_folder: Path, kept: np.ndarray) -> list[Finding]:
    """Both graphs, the float back end's weights and the host's tables against the checkpoint; encodings as calibrated.

    `kept` are the SLM's own ids of its output layer's rows.

    A checkpoint that was quantised on the way is not quantised again: the graphs are then compared with the weights
    that `convert-slm` stored.
    """
    models = {
        name: onnx.load(run / SLM / f"{name}.onnx", load_external_data=False)
        for name in (SLM_TREE_GRAPH, SLM_PREFILL_GRAPH)
    }
    stored = {f"{SLM}/{name}.onnx": StoredMatrices(model, run / SLM) for name, model in models.items()}
    network, weights = read_slm(run / SLM / WEIGHTS_FILE)
    own = weights.integer_matrices()
    findings: list[Finding] = []
    if getattr(load_config(checkpoint_folder), "quantization_config", None) is not None:
        findings += _origin_findings(run, checkpoint_folder, kept, network, own)
    for name in own if not findings else ():  # a fault of the weights themselves shows in every graph
        matrix = own[name]
        ids = kept if name == OUTPUT_LAYER else np.arange(len(matrix.integers))
        for file, matrices in stored.items():
            if name in matrices:
                pair = (matrix.integers, matrix.scales)
                whole = dict(zip(ids.tolist(), matrix.integers, strict=True))
                findings += _layer(f"{file}, {name}", matrices[name], pair, ids, whole.items)
    return [*findings, *_encoding_findings(run, models)]


def _origin_findings(
    run: Path, checkpoint_folder: Path, kept: np.ndarray, network: SlmNetwork, own: Mapping[str, IntegerMatrix]
) -> Iterator[Finding]:
    """The stored weights and tables against a packed checkpoint, whose integers they keep."""
    checkpoint = PackedCheckpoint(checkpoint_folder)
    for name in checkpoint.linears:
        layer, matrix = name.removeprefix(MODEL_PREFIX), checkpoint.matrix(name).unpacked()
        if network.copies and layer.endswith(GATE):  # it reads some copies of a channel
            matrix = replace(matrix, integers=matrix.integers[:, list(network.sum_columns)])
        ids = kept if layer == OUTPUT_LAYER else np.arange(len(matrix.integers))
        wanted, found = matrix.rows(ids), own[layer]
        pairs = (found.integers, found.scales), (wanted.integers, wanted.scales)
        yield from _layer(f"{SLM}/{WEIGHTS_FILE}, {layer}", *pairs, ids, partial(enumerate, matrix.integers))
    tables = HostTables(run / SLM / TABLES_FILE)
    for module, name in ((TOKEN_TABLE, TOKENS), (PER_LAYER_TABLE, PER_LAYER)):
        if module in checkpoint.modules:
            yield from _table(f"{SLM}/{TABLES_FILE}, {name}", tables, name, checkpoint.table(module))


def _table(where: str, tables: HostTables, name: str, wanted: PackedRows) -> Iterator[Finding]:
    """A host table, a block at a time; the first block that differs is the finding."""
    found, scales = tables.stored(name), tables.scales(name)
    for start in range(0, len(wanted.packed), TABLE_ROWS):
        rows = slice(start, min(start + TABLE_ROWS, len(wanted.packed)))
        pairs = (found[rows], scales[rows]), (wanted.packed[rows], wanted.scales[rows])
        ids = np.arange(rows.start, rows.stop)
        findings = list(_layer(where, *pairs, ids, partial(enumerate, wanted.packed)))
        if findings:
            yield from findings
            return


def _layer(
    where: str,
    found: tuple[np.ndarray, np.ndarray],
    wanted: tuple[np.ndarray, np.ndarray],
    ids: np.ndarray,
    whole: Callable[[], Iterable[tuple[int, np.ndarray]]],
) -> Iterator[Finding]:
    """Rows of other tokens, other weights, or another scale; the first of these that holds."""
    if found[0].shape != wanted[0].shape:
        yield Finding("weights", where, f"is {list(found[0].shape)}, not {list(wanted[0].shape)}", REBUILD)
        return
    wrong = displaced(found[0], wanted[0], ids, whole)
    if wrong is not None and wrong.permuted:
        yield Finding("keep set", where, wrong.text, REBUILD)
    elif wrong is not None:
        text = f"{wrong.differing} of {wrong.rows} rows are not the checkpoint's"
        yield Finding("weights", where, text, REBUILD)
    elif not np.array_equal(found[1], wanted[1]):
        left, right = found[1].ravel(), wanted[1].ravel()
        changed = np.flatnonzero(left != right)
        first = changed[0]
        figures = f"the first is {left[first]:.6g} instead of {right[first]:.6g}"
        yield Finding("scale", where, f"{len(changed)} of {len(left)} scales differ, {figures}", REBUILD)


def _encoding_findings(run: Path, models: Mapping[str, onnx.ModelProto]) -> Iterator[Finding]:
    """Scales and zero points of activations against encodings.json."""
    encodings = read_encodings(run / SLM / ENCODINGS_FILE)
    for graph, model in models.items():
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for name, encoding in encodings.items():
            pairs = ((f"{name}/scale", np.float32(encoding.scale)), (f"{name}/zero_point", encoding.zero_point))
            for constant, wanted in pairs:
                if constant not in constants:
                    continue
                value = onnx.numpy_helper.to_array(constants[constant])
                if value.size == 1 and value.item() != wanted:
                    seen = f"is {value.item():.6g} instead of {wanted:.6g}"
                    yield Finding("scale", f"{SLM}/{graph}.onnx, {constant}", seen, REBUILD)
