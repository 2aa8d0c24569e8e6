"""One small graph, compiled once for all tests of this folder."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.targets import TARGETS
from hyco_export.graph.qnn import CompiledContext, compile_context
from tests.support.qdq_builder import two_layer_mlp


@pytest.fixture(scope="session")
def mlp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer int4 MLP: x uint16 [4, 32] -> y uint16 [4, 32]."""
    return two_layer_mlp().save(tmp_path_factory.mktemp("mlp") / "mlp.onnx")


@pytest.fixture(scope="session")
def compiled_mlp(mlp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CompiledContext:
    """The MLP for sm8850."""
    out_dir = tmp_path_factory.mktemp("sm8850")
    return compile_context(mlp_model, out_dir, "mlp", TARGETS["sm8850"], out_dir / "compile.log")


@pytest.fixture(scope="session")
def mlp_feed() -> dict[str, np.ndarray]:
    """x uint16 [4, 32] over the whole grid."""
    return {"x": np.random.default_rng(1).integers(0, 65536, (4, 32)).astype(np.uint16)}
