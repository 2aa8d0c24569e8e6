"""The multi-token-prediction head of Gemma 4 verifiers; its text part is a Gemma 4 text model that stores no K/V.

Some are published with ordered embeddings (those of E2B and E4B): tokens lie in clusters of equal size, and only those
of the clusters whose centroids score best get a logit. Over a keep set the output layer is small and static, so a
converted head is dense: it scores every kept token.

Legend: R rows, M head's width, V vocabulary size.
"""

from copy import deepcopy

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, PreTrainedConfig

from hyco_export.errors import CheckpointError
from hyco_export.models.families.slm_family import INERT, Honoured
from hyco_export.models.tensor_files import FETCH_HINT

HEAD_MODEL_TYPE = "gemma4_assistant"
HeadModel = Gemma4AssistantForCausalLM
HeadConfig = Gemma4AssistantConfig
HONOURED = Honoured(
    INERT
    | {"backbone_hidden_size", "text_config", "tie_word_embeddings"}
    | {"use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"}
)
CENTROIDS = "masked_embedding."  # beginning of the names of the module that chooses clusters
SELECTED_ROWS = 32  # at a time: each gathers the weights of its clusters, 2 MB in BF16 at 4,096 tokens of width 256


def output_logits(head: HeadModel, last: torch.Tensor) -> torch.Tensor:
    """last [R, M] -> logits [R, V] as transformers' forward gives them; tokens outside the best clusters share a value
    below all others."""
    if head.masked_embedding is None:
        return head.lm_head(last)
    parts = [head.masked_embedding(rows[None], head.lm_head.weight)[0] for rows in last.split(SELECTED_ROWS)]
    return torch.cat(parts)


def make_dense(head: HeadModel) -> HeadModel:
    """Let the output layer score every token, whatever its cluster; a head without centroids stays as it is."""
    head.masked_embedding = None
    head.config = deepcopy(head.config)  # transformers leaves the caller's object there
    head.config.use_ordered_embeddings = False
    return head


def ordered_embeddings(config: PreTrainedConfig) -> dict[str, str | int]:
    """What a converted head does instead of selecting tokens by centroids, for its metrics; empty for other heads."""
    if not (isinstance(config, HeadConfig) and config.use_ordered_embeddings):
        return {}
    return {
        "output_layer": "dense",
        "centroids": config.num_centroids,
        "best_centroids": config.centroid_intermediate_top_k,  # whose tokens the published head scores
    }


def require_ordering(head: HeadModel, checkpoint: object) -> None:
    """The clusters of a head with ordered embeddings hold every token once.

    Raises:
        CheckpointError: they do not; names `checkpoint`.
    """
    chooser = head.masked_embedding
    if chooser is None:
        return
    size, centroids, best = chooser.vocab_size, chooser.num_centroids, chooser.centroid_intermediate_top_k
    if size % centroids or not 0 < best <= centroids:
        raise CheckpointError(
            f"{checkpoint}: num_centroids is {centroids} and centroid_intermediate_top_k {best}, the first must divide "
            f"the {size} tokens and the second be at most the first",
            FETCH_HINT,
        )
    if not torch.equal(chooser.token_ordering.sort().values.cpu(), torch.arange(size)):
        raise CheckpointError(
            f"{checkpoint}: {CENTROIDS}token_ordering does not hold each of the {size} token ids once",
            FETCH_HINT,
        )
