"""The kept K/V rows of an SLM's opening token on disk: integers in the encodings of the rings. Values and one file."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.network.boundary import to_integers
from hyco_export.core.network.slm_host import Opening
from hyco_export.errors import ArtifactError


def write_opening(path: Path, opening: Opening, tree: GraphSpec) -> None:
    """Write the rows as the inputs of the tree graph take them."""
    rings = [spec for spec in tree.inputs if spec.name in opening.rows]
    save_file(to_integers(rings, opening.rows), path)


def read_opening(path: Path) -> dict[str, np.ndarray]:
    """Rows uint8 [N, 1, d] by ring.

    Raises:
        ArtifactError: missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build it again: hyco-export convert-slm") from error
