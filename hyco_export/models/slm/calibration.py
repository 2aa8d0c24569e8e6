"""Ranges of the SLM's tensors over calibration text, and sample inputs of its graphs."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from safetensors.torch import load_file, save_file

from hyco_export.core.artifact import WORK_FOLDER, PartialBuild
from hyco_export.core.network.host import AttentionSink, EmbeddingRows, SlmHost
from hyco_export.core.network.quantisation import kv_range_names
from hyco_export.core.ring import NO_PARENT
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.torch_ops import RangeObserver

Ids = Sequence[int]
UNIT = "calibration"


def full_passes(ids: Ids, rows: int) -> list[Ids]:
    """The sequence in passes of `rows` tokens; a rest that does not fill a pass is left out (padding is no text)."""
    return [ids[start : start + rows] for start in range(0, len(ids) - rows + 1, rows)]


def first_passes(passes: list[list[Ids]], limit: int | None) -> list[list[Ids]]:
    """At most `limit` passes: the first of every sequence, then the second of those that have one, and so on."""
    if limit is None:
        return passes
    depth = max((len(parts) for parts in passes), default=0)
    order = [(number, at) for at in range(depth) for number, parts in enumerate(passes) if at < len(parts)]
    taken = Counter(number for number, _ in order[:limit])
    return [parts[: taken[number]] for number, parts in enumerate(passes)]


class CalibrationMemory:
    """Remembers in a build folder what the observer saw of the sequences that are finished.

    Args:
        partial: the build folder's finished units.
    """

    def __init__(self, partial: PartialBuild) -> None:
        self._partial = partial

    def keep(self, observer: RangeObserver, sequences: int) -> None:
        """Store the observer after the first `sequences` sequences."""
        name, state = f"{WORK_FOLDER}/{UNIT}.safetensors", observer.state()
        with self._partial.place(name) as draft:
            save_file(state, draft)
        self._partial.finish(UNIT, [name], {"sequences": sequences, "order": list(state)})

    @property
    def sequences(self) -> int:
        """How many sequences a killed build has seen."""
        receipt = self._partial.finished(UNIT)
        return int(receipt.note["sequences"]) if receipt else 0

    def recall(self, observer: RangeObserver) -> int:
        """Restore the observer; how many sequences it has seen."""
        receipt = self._partial.finished(UNIT)
        if receipt is None:
            return 0
        (name,) = receipt.files
        state = load_file(self._partial.build_dir / name)  # in the file's order, not in that of the network
        observer.restore({key: state[key] for key in receipt.note["order"]})
        return int(receipt.note["sequences"])


def calibrated_ranges(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    percentile: float,
    kv_percentile: float,
    tell: Callable[[int, int], None],
    max_passes: int | None = None,
    sink: AttentionSink | None = None,
    memory: CalibrationMemory | None = None,
) -> dict[str, tuple[float, float]]:
    """(low, high) of every tensor of a tree pass that needs a range, K/V rows as (-m, m).

    Args:
        sequences: token ids; the rings start empty for each.
        rows: R of the passes.
        percentile, kv_percentile: of the values, and of the magnitudes of K and V.
        tell: done and total passes.
        sink: of every sequence, which then begin after it.
        memory: where what was seen is kept after every sequence, and found again.
        max_passes: leave out what lies beyond, as many passes of every sequence as of the others.

    Raises:
        ValueError: no sequence fills a pass.
    """
    passes = first_passes([full_passes(ids, rows) for ids in sequences], max_passes)
    total = sum(len(parts) for parts in passes)
    if not total:
        raise ValueError(f"no calibration sequence has {rows} tokens")
    observer = RangeObserver(percentile, total, dict.fromkeys(kv_range_names(slm.network), kv_percentile))
    finished = memory.recall(observer) if memory else 0
    done = sum(len(parts) for parts in passes[:finished])
    for number, parts in enumerate(passes[finished:], finished + 1):
        host = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        for part in parts:
            host.append(lambda feeds: slm.tree(feeds, observer), part)
            done += 1
            tell(done, total)
        if memory:
            memory.keep(observer, number)
    return observer.ranges()


# ---- sample inputs: forests and prefill on rings that hold text


def random_forest(rows: int, generator: np.random.Generator) -> list[int]:
    """Parents of `rows` nodes, each any earlier node or none."""
    return [NO_PARENT if row == 0 else int(generator.integers(NO_PARENT, row)) for row in range(rows)]


def tree_samples(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    seed: int,
    sink: AttentionSink | None = None,
) -> list[dict[str, np.ndarray]]:
    """Feeds of one forest per sequence: its first pass of tokens is in the rings, the nodes are tokens of its text."""
    generator = np.random.default_rng(seed)
    samples = []
    for ids in sequences:
        host = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        host.append(slm.tree, ids[:rows])
        tokens = generator.choice(np.asarray(ids), rows)
        samples.append(host.feeds(tokens, random_forest(rows, generator)))
    return samples


def prefill_samples(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    sink: AttentionSink | None = None,
) -> list[dict[str, np.ndarray]]:
    """Feeds of the second prefill pass of each sequence (its text repeated where it is too short)."""
    samples = []
    for ids in sequences:
        tokens = np.resize(np.asarray(ids), 2 * rows)
        host = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        host.append(slm.prefill, tokens[:rows])
        samples.append(host.feeds(tokens[rows:], range(NO_PARENT, rows - 1)))
    return samples
