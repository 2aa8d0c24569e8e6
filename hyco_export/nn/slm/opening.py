"""K/V rows of the token that begins every text, from the float network."""

from hyco_export.core.network.slm_host import EmbeddingRows, Opening, SlmHost
from hyco_export.nn.slm.static_pass import FloatSlm


def find_opening(slm: FloatSlm, embeddings: EmbeddingRows, token: int, rows: int, mask_value: float) -> Opening:
    """Rows of `token` at position 0, by a pass of `rows` rows."""
    host = SlmHost(slm.network, embeddings, rows, mask_value)
    outputs = host.append(slm.tree, [token])
    names = [f"{kind}.{layer.index}" for layer in slm.network.storing for kind in ("k", "v")]
    return Opening(token, {name: outputs[name.replace(".", "_new.")][:, :1] for name in names})
