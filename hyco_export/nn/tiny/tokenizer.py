"""The family's one tokenizer: byte-pair encoding with Gemma's mechanics, 2,048 entries.

Ids: the special tokens, then `<0x00>`..`<0xFF>`, then the learned pieces. The byte tokens are ordinary vocabulary: as
special tokens they would capture the literal text "<0x0A>".
"""

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

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
