"""What the integer grids of one layer cost the SLM: KL from float logits to those of a pass with this layer rounded.

Knows the float passes and grids by tensor name; no files. Weights play no part: they are the checkpoint's own integers.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.network.slm_host import EmbeddingRows, Opening, SlmHost
from hyco_export.graph.parity import logit_kl
from hyco_export.nn.slm.calibration import full_passes
from hyco_export.nn.slm.static_pass import FloatSlm

NEW_ROWS = ("k_new", "v_new")  # what a layer writes into its ring, in 8 bits


def grids_by_row(results: Sequence[str], encodings: Mapping[str, Encoding]) -> dict[str, dict[str, Encoding]]:
    """For each row of the table, the grids that are its own.

    A new K or V is a row of its own; the result of a layer stands for all other tensors of that layer; any other
    result stands for itself.
    """
    rows = {}
    for name in results:
        layer = name.rpartition(".")[0]
        if name.partition(".")[0] in NEW_ROWS or not layer:
            rows[name] = {name: encodings[name]}
        else:
            rows[name] = {tensor: grid for tensor, grid in encodings.items() if tensor.startswith(f"{layer}.")}
    return rows


def row_divergences(
    slm: FloatSlm,
    rows: Mapping[str, Mapping[str, Encoding]],
    embeddings: EmbeddingRows,
    rows_per_pass: int,
    mask_value: float,
    sequences: Sequence[Sequence[int]],
    max_passes: int,
    tell: Callable[[int, int], None],
    opening: Opening | None = None,
) -> dict[str, float]:
    """Mean KL in nats per token of each row's rounding, over the first full passes of the sequences (after
    `opening`, if they have one).

    Raises:
        ValueError: no sequence fills a pass.
    """
    found: dict[str, list[float]] = {name: [] for name in rows}
    passes = [(number, tokens) for ids in sequences for number, tokens in enumerate(full_passes(ids, rows_per_pass))]
    if not passes:
        raise ValueError(f"no sequence has {rows_per_pass} tokens")
    total = min(max_passes, len(passes))

    def compare(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = slm.tree(feeds)
        for name, grids in rows.items():
            found[name].append(logit_kl(outputs["logits"], slm.rounded_tree(feeds, grids)["logits"]))
        return outputs

    for done, (number, tokens) in enumerate(islice(passes, max_passes), 1):
        if number == 0:
            host = SlmHost(slm.network, embeddings, rows_per_pass, mask_value, opening=opening)
        host.append(compare, tokens)
        tell(done, total)
    return {name: float(np.mean(values)) for name, values in found.items()}
