"""A server that serves something else is named before the first prompt."""

import msgspec
import pytest

from hyco_export.errors import ServerError
from hyco_export.evaluate.connect import Expected, mismatches, require_compatible, require_room
from hyco_export.protocol.wire import PROTOCOL_VERSION, ServerInfo

EXPECTED = Expected("v" * 64, "t" * 64, 2048, "k" * 64, "h" * 64, 32, 4, ("exact", "epsilon"))
INFO = ServerInfo(
    version=PROTOCOL_VERSION,
    server="hyco-export",
    verifier_digest="v" * 64,
    tokenizer_digest="t" * 64,
    vocab_size=2048,
    stop_ids=[1],
    head_digest="h" * 64,
    keepset_digest="k" * 64,
    node_limit=64,
    prompt_limit=4096,
    server_steps=4,
    rules=["exact", "epsilon"],
    clock="thread-cpu",
)


def test_the_runs_own_server_fits():
    assert mismatches(INFO, EXPECTED) == []
    require_compatible(INFO, EXPECTED, "http://here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "it speaks protocol version 9, this side 1"),
        ({"verifier_digest": "x" * 64}, "verifier checkpoint is xxxxxxxxxxxx… there, vvvvvvvvvvvv… here"),
        ({"tokenizer_digest": "x" * 64}, "tokenizer is xxxxxxxxxxxx… there"),
        ({"keepset_digest": "x" * 64}, "keep set is xxxxxxxxxxxx… there"),
        ({"head_digest": ""}, "head artifact (its encodings) is none there, hhhhhhhhhhhh… here"),
        ({"vocab_size": 262144}, "its vocabulary has 262,144 tokens, the artifacts' 2,048"),
        ({"node_limit": 8}, "it verifies at most 8 nodes a round, the recipe sends 32"),
        ({"server_steps": 0}, "its own head drafts 0 tokens, the baseline needs 4"),
        ({"rules": ["exact"]}, "it does not know the acceptance rule 'epsilon'"),
    ],
)
def test_each_mismatch_is_named(change, words):
    found = mismatches(msgspec.structs.replace(INFO, **change), EXPECTED)
    assert len(found) == 1
    assert words in found[0]


def test_all_mismatches_are_named_at_once_with_the_next_step():
    info = msgspec.structs.replace(INFO, head_digest="", vocab_size=5)
    with pytest.raises(ServerError) as caught:
        require_compatible(info, EXPECTED, "http://there:1")
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("the server at http://there:1 does not belong to this run: ")
    assert "head artifact" in caught.value.message and "vocabulary" in caught.value.message
    assert "hyco-export serve" in caught.value.hint


def test_prompts_that_the_server_would_refuse_for_their_length_are_not_sent() -> None:
    info = msgspec.structs.replace(INFO, prompt_limit=100, context_limit=120)
    require_room(info, "p", 100, 20)
    with pytest.raises(ServerError, match="prompt p has 101 ids, the server takes 100"):
        require_room(info, "p", 101, 1)
    with pytest.raises(ServerError, match="prompt p and its answer need 121 positions, the server's verifier has 120"):
        require_room(info, "p", 100, 21)
    require_room(msgspec.structs.replace(info, context_limit=0), "p", 100, 10_000)  # an older server does not say
