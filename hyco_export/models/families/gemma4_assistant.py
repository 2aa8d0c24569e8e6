"""The multi-token-prediction head of Gemma 4 verifiers; its text part is a Gemma 4 text model that stores no K/V."""

from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from hyco_export.models.families.slm_family import INERT, Honoured

HEAD_MODEL_TYPE = "gemma4_assistant"
HeadModel = Gemma4AssistantForCausalLM
HeadConfig = Gemma4AssistantConfig
HONOURED = Honoured(
    INERT
    | {"backbone_hidden_size", "text_config", "tie_word_embeddings", "num_centroids", "centroid_intermediate_top_k"},
    {"use_ordered_embeddings": (False,)},
)
