"""What several tests of the workbench share."""

from pathlib import Path

import onnx
import pytest

from hyco_export.core.device_spec import SlmSpec, to_integers
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.network.weight_files import write_slm
from hyco_export.models.slm.calibration import tree_samples
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import MASK_VALUE, slm_parts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a converted SLM alone."""
    parts, root = slm_parts(), tmp_path_factory.mktemp("run")
    folder = root / "convert-slm"
    folder.mkdir()
    onnx.save(parts.tree_model, folder / "slm_tree.onnx")
    onnx.save(parts.prefill_model, folder / "slm_prefill.onnx")
    spec = SlmSpec(ROWS, ROWS, 96, "k", 32, 0, {}, {}, {}, (), MASK_VALUE, parts.tree, parts.prefill)
    write_json(folder / "slm.json", spec)
    write_json(folder / "encodings.json", parts.encodings)
    write_slm(folder / "slm_weights.safetensors", parts.network, parts.weights)
    sequences = [random_ids(40, seed) for seed in (7, 8)]
    feeds = tree_samples(parts.float_slm, parts.tables, sequences, ROWS, MASK_VALUE, 3, None)
    trees = [to_integers(parts.tree.inputs, feed) for feed in feeds]
    prefills = [{tensor.name: feed[tensor.name] for tensor in parts.prefill.inputs} for feed in trees]
    write_samples(folder / "slm_samples.safetensors", {"slm_tree": trees, "slm_prefill": prefills})
    return root
