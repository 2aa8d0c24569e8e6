"""A reply's pieces: whose they are, that they join to the text, and the figures with them."""

from hyco_export.evaluate.chat.reply import Piece, Reply
from hyco_export.models.text.tokenizer import open_tokenizer
from hyco_export.protocol.trace import RoundTrace
from hyco_export.protocol.tree import Source, Tree
from tests.evaluate.synthetic_traces import generation, local_trace, prime_trace, round_trace
from tests.support.scripted_chat import VERIFIER

TOKENIZER = open_tokenizer(VERIFIER).backend
END_OF_TURN = TOKENIZER.encode("<turn|>", add_special_tokens=False).ids
CHAIN, RUNNER_UP, SLM = Source.CHAIN, Source.RUNNER_UP, Source.SLM


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def a_round(number: int, proposed: list[tuple[int, Source]], bonus: int | None, **fields: object) -> RoundTrace:
    """A round whose whole tree, a path, was accepted."""
    tokens, sources = zip(*proposed, strict=True) if proposed else ((), ())
    tree = Tree(tokens, tuple(range(-1, len(tokens) - 1)), (-1.0,) * len(tokens), sources)
    committed = tokens if bonus is None else (*tokens, bonus)
    return round_trace(tuple(range(len(tokens))), committed, tree=tree, number=number, **fields)


def test_each_piece_has_the_source_of_its_tokens() -> None:
    a, b, c, d = (ids_of(word)[0] for word in (" the", " list", " is", " file"))
    first = a_round(1, [(a, CHAIN), (b, CHAIN), (c, RUNNER_UP), (d, SLM)], a)
    kept = local_trace([b, c])
    second = a_round(2, [(d, SLM)], None, finished="length")
    reply = Reply(TOKENIZER)
    assert [piece.source for piece in reply.follow(generation(primes=(prime_trace(),)))] in ([], ["bonus"])
    said = reply.follow(generation(first))
    assert said == [
        Piece(" the list", "chain"),
        Piece(" is", "runner-up"),
        Piece(" file", "slm"),
        Piece(" the", "bonus"),
    ]
    assert reply.figures.by_source == {"chain": 2, "runner-up": 1, "slm": 1, "bonus": 2, "unverified": 0}
    assert (reply.figures.mat, reply.figures.tokens, reply.figures.finished) == (5.0, 6, "length")
    both = generation(first, second, locals=(kept,), total_ms=2000.0)
    assert reply.follow(both) == [Piece(" list is", "unverified"), Piece(" file", "slm")]
    assert (reply.figures.tokens, reply.figures.mat, reply.figures.tokens_per_s) == (9, 3.0, 4.5)
    assert reply.follow(both) == [] and reply.figures.tokens == 9


def test_a_chain_that_the_server_drafted_is_chain() -> None:
    reply = Reply(TOKENIZER)
    drafted = round_trace((0, 1), (ids_of(" a")[0], ids_of(" b")[0], ids_of(" c")[0]), drafted=3)
    assert [piece.source for piece in reply.follow(generation(drafted, primes=()))] == ["chain", "bonus"]


def test_a_character_of_several_tokens_is_shown_whole_by_its_last_one() -> None:
    ids = ids_of("한")
    assert len(ids) > 1, "the character is one token: nothing is held back"
    proposed = [(token, CHAIN) for token in ids[:-1]]
    reply = Reply(TOKENIZER)
    assert reply.follow(generation(first := a_round(1, proposed, None), primes=())) == []
    second = a_round(2, [(ids[-1], SLM)], ids_of("!")[0])
    assert reply.follow(generation(first, second, primes=())) == [Piece("한", "slm"), Piece("!", "bonus")]
    assert reply.end() == []


def test_half_a_character_is_shown_broken_at_the_end_only() -> None:
    half = [(token, CHAIN) for token in ids_of("한")[:-1]]
    reply = Reply(TOKENIZER)
    assert reply.follow(generation(a_round(1, half, None), primes=())) == []
    assert "\ufffd" in "".join(piece.text for piece in reply.end())


def test_the_end_of_a_turn_has_no_text_and_counts() -> None:
    assert len(END_OF_TURN) == 1
    reply = Reply(TOKENIZER)
    assert reply.follow(generation(a_round(1, [(ids_of(" a")[0], SLM)], END_OF_TURN[0]), primes=())) == [
        Piece(" a", "slm")
    ]
    assert reply.figures.tokens == 2 and reply.end() == []


def test_before_the_first_round_there_is_no_mat() -> None:
    reply = Reply(TOKENIZER)
    assert (reply.figures.mat, reply.figures.tokens_per_s, reply.figures.tokens) == (None, None, 0)
