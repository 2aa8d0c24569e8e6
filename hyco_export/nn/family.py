"""Do a verifier, a head and an SLM belong together? Reads their configurations only."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.errors import CheckpointError
from hyco_export.nn.verifier import ATTENTION_NAMES, READS_KV, kv_shapes, layer_kv_shape

HEAD_MODEL_TYPE = "gemma4_assistant"
SET_HINT = "use the head that was published for this verifier and an SLM with the same tokenizer ($.models)"


def check_family(
    verifier: PreTrainedConfig,
    head: PreTrainedConfig | None,
    slm: PreTrainedConfig | None = None,
    bridged: bool = False,
) -> None:
    """Refuse checkpoints that do not belong together; all mismatches are named at once. Either drafter may be missing.

    `bridged`: the SLM has a vocabulary of its own.

    Raises:
        CheckpointError: a checkpoint is not of its role's kind; widths, K/V shapes or vocabularies differ; or the head
            has a part the static graph cannot hold.
    """
    _require_roles(verifier, head, slm)
    from_head = _head_mismatches(verifier, head) if head is not None else ()
    problems = [*from_head, *_vocabulary_mismatches(verifier, head, None if bridged else slm)]
    if problems:
        raise CheckpointError("checkpoints do not belong together: " + "; ".join(problems), SET_HINT)


def _require_roles(verifier: PreTrainedConfig, head: PreTrainedConfig | None, slm: PreTrainedConfig | None) -> None:
    """Only a head drafts steps, and only the others are language models of their own."""
    for role, config in (("verifier", verifier), ("head", head), ("slm", slm)):
        if config is None or (config.model_type == HEAD_MODEL_TYPE) == (role == "head"):
            continue
        wanted = f"a {HEAD_MODEL_TYPE}" if role == "head" else "a language model"
        raise CheckpointError(
            f"$.models.{role} is a {config.model_type!r} model, the {role} must be {wanted}",
            f"correct $.models.{role}",
        )


def _head_mismatches(verifier: PreTrainedConfig, head: PreTrainedConfig) -> Iterator[str]:
    hidden = verifier.get_text_config().hidden_size
    if head.backbone_hidden_size != hidden:
        yield f"the head's backbone width is {head.backbone_hidden_size}, the verifier's hidden size is {hidden}"
    if head.use_ordered_embeddings:
        yield "the head orders its vocabulary by centroids, which has no static graph"
    text = head.get_text_config()
    shapes = kv_shapes(verifier)
    for index, mode in enumerate(text.kv_sharing_modes):
        if mode != READS_KV:
            yield f"the head's layer {index} computes K/V of its own"
    for layer_type in LAYER_TYPES:
        layers = [i for i, kind in enumerate(text.layer_types) if kind == ATTENTION_NAMES[layer_type]]
        for own in dict.fromkeys(layer_kv_shape(text, index) for index in layers):
            given = shapes[layer_type]
            if own != given:
                yield (
                    f"the head reads {layer_type} K/V of {own.heads} heads x {own.dim}, "
                    f"the verifier gives {given.heads} x {given.dim}"
                )


def _vocabulary_mismatches(
    verifier: PreTrainedConfig, head: PreTrainedConfig | None, slm: PreTrainedConfig | None
) -> Iterator[str]:
    size = verifier.get_text_config().vocab_size
    others = {"head": head, "SLM": slm}
    for name, config in others.items():
        if config is not None and config.get_text_config().vocab_size != size:
            yield f"the {name}'s vocabulary has {config.get_text_config().vocab_size} tokens, the verifier's {size}"
