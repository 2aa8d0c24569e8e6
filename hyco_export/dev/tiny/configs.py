"""Shapes of the three models and their one tokenizer: byte-pair encoding with Gemma's mechanics, 2,048 entries.

Layer patterns: S sliding, F full attention.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hyco_export.models.families.gemma4 import LanguageConfig
from hyco_export.models.families.gemma4_assistant import HeadConfig
from hyco_export.models.families.released_configs import layer_names

# ---- the tokenizer

VOCAB_SIZE = 2048

PAD, EOS, BOS, UNK, MASK, TURN_START, TURN_END = "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK, MASK, TURN_START, TURN_END)
"""In id order: `<pad>` is 0 and `<turn|>` is 6."""

PAD_ID, EOS_ID, BOS_ID, TURN_END_ID = (SPECIAL_TOKENS.index(token) for token in (PAD, EOS, BOS, TURN_END))
STOP_IDS = [EOS_ID, TURN_END_ID]

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

SPACE_MARK = "▁"
"""Stands for a space inside the vocabulary, as in SentencePiece."""

MAX_CONTEXT = 4096

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim }}"
    "{{ '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the pieces from `texts` and wrap them with bos, specials and the chat template."""
    trained = _with_gemma_text_rules(Tokenizer(BPE()))
    trainer = BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[*SPECIAL_TOKENS, *BYTE_TOKENS], show_progress=False)
    trained.train_from_iterator(texts, trainer)
    learned = json.loads(trained.to_str())["model"]

    merges = [tuple(pair) for pair in learned["merges"]]
    model = BPE(vocab=learned["vocab"], merges=merges, unk_token=UNK, byte_fallback=True, fuse_unk=True)
    tokenizer = _with_gemma_text_rules(Tokenizer(model))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        mask_token=MASK,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _with_gemma_text_rules(tokenizer: Tokenizer) -> Tokenizer:
    """Spaces become marks; a piece is part of one word, one digit or part of one run of punctuation."""
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPACE_MARK, "merged_with_next"),
            pre_tokenizers.Split(Regex(rf"[^\w{SPACE_MARK}]+|\d"), "isolated"),
        ]
    )
    return tokenizer


SLIDING_WINDOW = 64
SOFT_CAP = 30.0

CHAIN_LENGTH = 4
"""K of the paper: tokens that the head drafts per round."""

SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
"""The paper's sampling, used in every measurement."""

VERIFIER_HIDDEN = 128
VERIFIER_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": True,
}
"""Shared by verifier and head: the head reads the verifier's keys and values, so the widths must be equal."""


def _text_config(pattern: str, **fields: Any) -> LanguageConfig:
    """What the three have in common: vocabulary, ids, window."""
    return LanguageConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=len(pattern),
        layer_types=layer_names(pattern),
        sliding_window=SLIDING_WINDOW,
        max_position_embeddings=MAX_CONTEXT,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=STOP_IDS,
        **fields,
    )


def verifier_config() -> LanguageConfig:
    """1.8 M parameters."""
    return _text_config(
        "SSFSSF",
        hidden_size=VERIFIER_HIDDEN,
        intermediate_size=512,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=SOFT_CAP,
        **VERIFIER_ATTENTION,
    )


def head_config() -> HeadConfig:
    """1.1 M parameters; every layer reads the verifier's keys and values."""
    pattern = "SSSF"
    text = _text_config(
        pattern,
        hidden_size=128,
        intermediate_size=384,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=len(pattern),
        **VERIFIER_ATTENTION,
    )
    return HeadConfig(text_config=text, backbone_hidden_size=VERIFIER_HIDDEN)


def slm_config() -> LanguageConfig:
    """0.7 M parameters: per-layer embeddings; the last three layers share keys and values and have double-wide MLPs.

    Its output layer has weights of its own: packed tables cannot be tied.
    """
    return _text_config(
        "SFSSF",
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        final_logit_softcapping=SOFT_CAP,
        tie_word_embeddings=False,
    )


def sampling_generation_config() -> GenerationConfig:
    """For verifier and SLM."""
    return GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=STOP_IDS, **SAMPLING)


def head_generation_config() -> GenerationConfig:
    """For the head: transformers' assisted generation reads the chain length from it."""
    return GenerationConfig(
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        num_assistant_tokens=CHAIN_LENGTH,
        num_assistant_tokens_schedule="constant",
    )
