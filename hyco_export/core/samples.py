"""Sample feeds of graphs, saved by the stage that makes a graph and run again by those that compile or judge it.

One safetensors file; tensor `<graph>/<input>` has the samples on a leading axis. Knows names and integers only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.errors import ArtifactError

Feeds = Mapping[str, np.ndarray]
SEPARATOR = "/"


def write_samples(path: Path, samples: Mapping[str, Sequence[Feeds]]) -> None:
    """Feeds by graph name; all feeds of a graph have the same inputs and shapes."""
    stacked = {
        f"{graph}{SEPARATOR}{name}": np.stack([feed[name] for feed in feeds])
        for graph, feeds in samples.items()
        for name in feeds[0]
    }
    save_file(stacked, path)


def read_samples(path: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Feeds by graph name, in the order they were written.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    try:
        stacked = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"sample feeds {path} cannot be read: {error}", "build the stage that wrote them"
        ) from error
    samples: dict[str, list[dict[str, np.ndarray]]] = {}
    for key, tensor in stacked.items():
        graph, name = key.split(SEPARATOR, 1)
        feeds = samples.setdefault(graph, [{} for _ in tensor])
        for feed, values in zip(feeds, tensor, strict=True):
            feed[name] = values
    return samples
