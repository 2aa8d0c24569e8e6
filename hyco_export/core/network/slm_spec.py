"""What the host must know of a converted SLM, put together from its network and its two graphs. Values only."""

from hyco_export.core.devicespec import KvLayer, SlmSpec
from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.handoff import KvShape
from hyco_export.core.network.slm import SlmNetwork


def slm_spec(
    network: SlmNetwork,
    vocab_size: int,
    keepset_digest: str,
    mask_value: float,
    tree: GraphSpec,
    prefill: GraphSpec,
    opening_token: int | None = None,
) -> SlmSpec:
    """The spec stored beside the graphs; rows are read from their inputs."""
    return SlmSpec(
        rows=tree.input("embeds").shape[0],
        prefill_rows=prefill.input("embeds").shape[0],
        vocab_size=vocab_size,
        keepset_digest=keepset_digest,
        hidden=network.hidden,
        per_layer_width=network.per_layer * len(network.layers),
        rings=network.rings,
        spans=network.spans,
        inv_freq=network.inv_freq,
        layers=tuple(
            KvLayer(layer.index, layer.layer_type, KvShape(layer.kv_heads, layer.dim)) for layer in network.storing
        ),
        mask_value=mask_value,
        tree=tree,
        prefill=prefill,
        opening_token=opening_token,
    )
