"""Sample feeds of graphs on disk: what the emulator's parity is measured on. Knows names and arrays only.

One safetensors file holds several graphs: `<graph>/<index>/<input>`, integers as the graph takes them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.errors import ArtifactError

Feed = Mapping[str, np.ndarray]


def save_samples(path: Path, samples: Mapping[str, Sequence[Feed]]) -> None:
    """Write the feeds of graphs, by the name of the graph."""
    tensors = {
        f"{graph}/{index}/{name}": np.ascontiguousarray(values)
        for graph, feeds in samples.items()
        for index, feed in enumerate(feeds)
        for name, values in feed.items()
    }
    save_file(tensors, path)


def load_samples(path: Path, graph: str) -> list[dict[str, np.ndarray]]:
    """The feeds of one graph, in the order they were saved.

    Raises:
        ArtifactError: the file is missing or damaged, or has no feed for this graph.
    """
    hint = "build the stage that wrote it again"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"sample feeds {path} cannot be read: {error}", hint) from error
    feeds: dict[int, dict[str, np.ndarray]] = {}
    for key, values in tensors.items():
        owner, index, name = key.split("/", 2)
        if owner == graph:
            feeds.setdefault(int(index), {})[name] = values
    if not feeds:
        raise ArtifactError(f"{path} has no sample feed for {graph}", hint)
    return [feeds[index] for index in sorted(feeds)]
