"""Quality figures: perfect for the float network itself, and worse in the right places for a damaged graph."""

from collections.abc import Mapping

import numpy as np
import pytest

from hyco_export.core.device_spec import GraphSession, TensorSpec
from hyco_export.core.network.slm import layer_results
from hyco_export.evaluate.slm_quality import SlmQuality, ends, measure_slm
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.slm_graphs import with_outputs
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import MASK_VALUE, slm_parts

SEQUENCES = [random_ids(27, 5), random_ids(13, 6)]  # 4 + 2 full passes


def inner_tensors() -> list[TensorSpec]:
    parts = slm_parts()
    return [TensorSpec(name, (ROWS, 32), "uint16", parts.encodings[name]) for name in layer_results(parts.network)]


class Damaged:
    """A session whose `name` output is moved by `steps` grid steps."""

    def __init__(self, session: GraphSession, name: str, steps: int) -> None:
        self._session, self._name, self._steps = session, name, steps

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self._session.run(feeds)
        moved = np.clip(outputs[self._name].astype(np.int64) + self._steps, 0, 65535)
        return {**outputs, self._name: moved.astype(np.uint16)}

    def close(self) -> None:
        self._session.close()


def measured(session: GraphSession, max_passes: int = 99) -> SlmQuality:
    parts = slm_parts()
    return measure_slm(
        parts.float_slm,
        session,
        parts.tree,
        inner_tensors(),
        parts.encodings,
        parts.tables,
        MASK_VALUE,
        SEQUENCES,
        max_passes,
    )


def opened() -> ReferenceSession:
    return ReferenceSession(with_outputs(slm_parts().tree_model, inner_tensors()).SerializeToString())


def test_the_graph_is_measured_layer_by_layer() -> None:
    quality = measured(opened())
    assert quality.positions == 6 * ROWS
    names = {*layer_results(slm_parts().network), "logits", "k_new.0", "v_new.0", "k_new.1", "v_new.1"}
    assert set(quality.layers) == names
    assert quality.worst_db == min(quality.layers.values()) > 25.0
    assert quality.worst_db <= quality.median_db
    assert quality.top1_agreement > 0.9
    assert all(0.0 < share < 0.05 for share in quality.clipped.values())


def test_damage_shows_where_it_is() -> None:
    whole, broken = measured(opened()), measured(Damaged(opened(), "layers.2.scaled", 3000))
    assert broken.layers["layers.2.scaled"] < 25.0 < whole.layers["layers.2.scaled"]
    assert broken.layers["final"] == whole.layers["final"]


def test_passes_can_be_limited() -> None:
    assert measured(opened(), max_passes=2).positions == 2 * ROWS


def test_nothing_to_measure_is_an_error() -> None:
    parts = slm_parts()
    with pytest.raises(ValueError, match="no sequence has 6 tokens"):
        measure_slm(
            parts.float_slm, opened(), parts.tree, [], parts.encodings, parts.tables, MASK_VALUE, [random_ids(5)], 9
        )


def test_ends_are_half_a_step_beyond_the_grid() -> None:
    encoding = slm_parts().encodings["k.0"]
    low, high = ends(encoding)
    assert encoding.quantize(np.array([low + 0.1 * encoding.scale]))[0] == 0
    assert np.isclose(high, 127.5 * encoding.scale)
    assert np.isclose(low, -128.5 * encoding.scale)
