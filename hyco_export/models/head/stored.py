"""From transformers' head to what `qat-head` stores: shape, norms and weights under the static network's names."""

from collections.abc import Mapping

import numpy as np
from transformers import PreTrainedConfig

from hyco_export.core.network.head import HeadArchitecture, HeadLayer
from hyco_export.core.network.weight_files import StoredHead
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.errors import CheckpointError
from hyco_export.models.families.config_fields import require_honoured
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.families.slm_family import SHORT_NAMES, rotary_frequencies
from hyco_export.models.head.unroll import head_spans
from hyco_export.models.verifier import layer_kv_shape

MODEL_PREFIX = "model."  # transformers' name of the decoder inside the head
WEIGHT_SUFFIX = ".weight"


def stored_name(module_name: str) -> str:
    """The static network's name of a module: `model.layers.0.mlp.up_proj` -> `layers.0.mlp.up_proj`."""
    return module_name.removeprefix(MODEL_PREFIX)


def store(head: HeadModel, matrices: Mapping[str, IntegerMatrix], bits: int) -> StoredHead:
    """The head with these integer matrices (by module name) and its own float norms.

    Raises:
        CheckpointError: as `head_architecture`.
    """
    named = {stored_name(name): matrix for name, matrix in matrices.items()}
    return StoredHead(head_architecture(head), bits, named, norm_vectors(head))


def norm_vectors(head: HeadModel) -> dict[str, np.ndarray]:
    """Weights of all norms, float32 [n], by the static network's names."""
    return {
        stored_name(name).removesuffix(WEIGHT_SUFFIX): parameter.detach().float().cpu().numpy()
        for name, parameter in head.named_parameters()
        if parameter.ndim == 1 and name.endswith(WEIGHT_SUFFIX)
    }


def head_architecture(head: HeadModel) -> HeadArchitecture:
    """The head's shape.

    Raises:
        CheckpointError: the head has a part that the static network does not.
    """
    config: PreTrainedConfig = head.config
    text = config.get_text_config()
    require_honoured(config, "head")
    if set(text.layer_types) != set(SHORT_NAMES):
        raise CheckpointError(
            f"the head has layers of {sorted(set(text.layer_types))}, not of both {sorted(SHORT_NAMES)}",
            "the static graph reads one hand-off of each type: use a published Gemma 4 assistant",
        )
    layers = tuple(
        HeadLayer(
            layer_type=SHORT_NAMES[layer_type],
            heads=text.num_attention_heads,
            kv=layer_kv_shape(text, index),
            scalar=float(head.model.layers[index].layer_scalar),
        )
        for index, layer_type in enumerate(text.layer_types)
    )
    return HeadArchitecture(
        backbone=config.backbone_hidden_size,
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        epsilon=text.rms_norm_eps,
        layers=layers,
        spans=head_spans(config),
        inv_freq=rotary_frequencies(head.model.rotary_emb),
    )
