"""The 8-bit embedding table of the kept tokens, as the head's graph looks it up. Reads a `build-keepset` artifact."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.core.keepset import KEEPSET_FILE
from hyco_export.core.network.weights import IntegerTable
from hyco_export.errors import ArtifactError

ZERO_POINT = 128  # int8 rows become uint8: HTP gathers unsigned tables


def read_kept_table(folder: Path) -> IntegerTable:
    """Rows in keep-set order, the embedding's factor inside the scales.

    Raises:
        ArtifactError: the file is missing, damaged or holds no table.
    """
    path = folder / KEEPSET_FILE
    try:
        with safe_open(path, framework="numpy") as stored:
            signed, scales = stored.get_tensor("table"), stored.get_tensor("table_scale")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{path} holds no embedding table: {error}", "build it again: hyco-export build-keepset"
        ) from error
    return IntegerTable((signed.astype(np.int16) + ZERO_POINT).astype(np.uint8), scales, ZERO_POINT)
