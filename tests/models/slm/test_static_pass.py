"""The float SLM behind integers: the artifact folder is enough, and it is as near the QDQ graph as the grids allow."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.device_spec import SLM_SPEC_FILE, to_integers, to_real
from hyco_export.core.files import write_json
from hyco_export.core.keepset import KeepSet
from hyco_export.core.network.host import SlmHost, slm_spec
from hyco_export.core.network.weight_files import WEIGHTS_FILE, write_slm
from hyco_export.core.numerics import sqnr_db
from hyco_export.errors import ArtifactError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.models.slm.static_pass import open_torch_slm
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import KEPT, MASK_VALUE, slm_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `convert-slm` leaves for this back end."""
    parts, path = slm_parts(), tmp_path_factory.mktemp("artifact")
    write_slm(path / WEIGHTS_FILE, parts.network, parts.weights)
    spec = slm_spec(parts.network, 96, KeepSet(KEPT, 96).digest, MASK_VALUE, parts.tree, parts.prefill)
    write_json(path / SLM_SPEC_FILE, spec)
    return path


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    parts = slm_parts()
    host = SlmHost(parts.network, parts.tables, ROWS, MASK_VALUE)
    host.append(parts.float_slm.tree, random_ids(ROWS))
    return host.feeds(random_ids(ROWS, 1), [-1, 0, 1, 1, 3, 0])


def test_both_graphs_run_from_the_folder_alone(folder: Path, feeds: dict[str, np.ndarray]) -> None:
    sessions, parts = open_torch_slm(folder), slm_parts()
    for session, graph, model in (
        (sessions.tree, parts.tree, parts.tree_model),
        (sessions.prefill, parts.prefill, parts.prefill_model),
    ):
        integers = to_integers(graph.inputs, feeds)
        found = session.run(integers)
        reference = ReferenceSession(model.SerializeToString()).run(integers)
        for spec in graph.outputs:
            assert (found[spec.name].dtype, found[spec.name].shape) == (np.dtype(spec.dtype), spec.shape)
            assert spec.encoding is not None
            wanted = spec.encoding.dequantize(reference[spec.name])
            assert sqnr_db(wanted, spec.encoding.dequantize(found[spec.name])) > 25.0, spec.name


def test_inside_it_is_the_float_network(folder: Path, feeds: dict[str, np.ndarray]) -> None:
    parts = slm_parts()
    integers = to_integers(parts.tree.inputs, feeds)
    found = open_torch_slm(folder).tree.run(integers)
    wanted = parts.float_slm.tree(to_real(parts.tree.inputs, integers))
    logits = parts.tree.output("logits")
    assert logits.encoding is not None
    assert found["logits"].shape == (ROWS, len(KEPT))
    assert np.array_equal(found["logits"], logits.encoding.quantize(wanted["logits"]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"slm\.json is not a SlmSpec"):
        open_torch_slm(tmp_path)
