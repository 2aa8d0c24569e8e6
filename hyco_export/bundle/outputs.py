"""What came back from a device: outputs of a bundle's golden vectors, in the layouts that tools write.

For a vector `CASE` of graph `GRAPH`, the n-th line of `qnn-net-run/GRAPH.txt` (from 0), a tensor is looked for in

    OUTPUTS/CASE.npz, OUTPUTS/GRAPH/CASE.npz          arrays by tensor name
    OUTPUTS/CASE/, OUTPUTS/GRAPH/CASE/                raw files (`raw_files`)
    OUTPUTS/GRAPH/Result_n/                           raw files as qnn-net-run writes them
"""

from collections.abc import Iterator
from pathlib import Path

from hyco_export.bundle.raw_files import Read, read_tensor
from hyco_export.bundle.spec import Bundle, Case
from hyco_export.errors import ArtifactError


def read_outputs(bundle: Bundle, folder: Path) -> dict[tuple[str, str], Read]:
    """By case and tensor; graphs of which nothing came back are left out.

    Raises:
        ArtifactError: no such folder, or nothing in it is an output of this bundle.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", "give the folder that holds what came back from the device")
    found: dict[tuple[str, str], Read] = {}
    for name, graph in bundle.graphs.items():
        cases = [case for case in bundle.cases if case.graph == name]
        if not any(place.exists() for number, case in enumerate(cases) for place in _places(folder, case, number)):
            continue
        for number, case in enumerate(cases):
            for tensor in graph.outputs:
                found[case.id, tensor.name] = read_tensor(_places(folder, case, number), tensor.spec)
    if not found:
        raise ArtifactError(
            f"{folder} holds no outputs of this bundle's golden vectors",
            "its layout is one of those in BUNDLE.md, chapter 12, such as head/Result_0/chain.raw",
        )
    return found


def _places(folder: Path, case: Case, number: int) -> Iterator[Path]:
    yield folder / f"{case.id}.npz"
    yield folder / case.graph / f"{case.id}.npz"
    yield folder / case.id
    yield folder / case.graph / case.id
    yield folder / case.graph / f"Result_{number}"
