"""PROTOCOL.md says what the code does: its dumps, field orders, refusal codes and limits are compared with the code."""

import hashlib
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HandoffSpec, KvRows, KvShape
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import STATUS_OF
from hyco_export.server import http
from hyco_export.server.admission import Limits
from hyco_export.server.connections import SLOWEST_READER_BYTES_PER_S, PeerLimits

PROTOCOL = Path(wire.__file__).with_name("PROTOCOL.md")
TEXT = PROTOCOL.read_text(encoding="utf-8")
BYTES_PER_LINE = 16
KINDS = {
    "PrimeRequest": wire.PrimeRequest,
    "Sampling": wire.Sampling,
    "Acceptance": wire.Acceptance,
    "PrimeReply": wire.PrimeReply,
    "Handoff": wire.Handoff,
    "VerifyRequest": wire.VerifyRequest,
    "VerifyReply": wire.VerifyReply,
    "Evidence": wire.Evidence,
    "Refusal": wire.Refusal,
    "ServerInfo": wire.ServerInfo,
}

GRID = Encoding("uint8", 0.5, 128)
SPEC = HandoffSpec(
    hidden=4,
    window=8,
    hidden_norm="post",
    kv={"sliding": KvShape(2, 2), "full": KvShape(1, 3)},
    encodings=dict.fromkeys(("e", "h", "k.sliding", "v.sliding", "k.full", "v.full"), GRID),
)


def rows(count: int, start: int) -> KvRows:
    """Rows whose bytes are numbered in the order in which they travel."""
    numbers = start + np.arange(count * SPEC.row_bytes, dtype=np.uint8).reshape(count, SPEC.row_bytes)
    return KvRows(
        k={"sliding": numbers[:, 0:4].reshape(count, 2, 2), "full": numbers[:, 8:11].reshape(count, 1, 3)},
        v={"sliding": numbers[:, 4:8].reshape(count, 2, 2), "full": numbers[:, 11:14].reshape(count, 1, 3)},
    )


PROMPT = [2, 105, 2364, 107]
COMMITTED = [*PROMPT, 9259]
EXAMPLES = {
    "prime-request": wire.encode(
        wire.PrimeRequest(
            1, PROMPT, wire.PAPER_SAMPLING, wire.Acceptance("epsilon", 0.005), 20261011, 256, "device", 0, "5f2c"
        )
    ),
    "prime-reply": wire.encode(
        wire.PrimeReply(
            version=1,
            session="Zr0k3vXyQm2N7dC1aBcDeA",
            root=9259,
            length=5,
            finished="",
            handoff=wire.Handoff(b"\x01\x02\x03\x04", b"\x05\x06\x07\x08", SPEC.pack_rows(rows(2, 16)), 2),
            server_ms=41.5,
        )
    ),
    "verify-request": wire.encode(
        wire.VerifyRequest(1, 5, wire.committed_digest(COMMITTED), [236764, 1217, 236888, 2098], [-1, 0, -1, 1])
    ),
    "verify-reply": wire.encode(
        wire.VerifyReply(
            version=1,
            round=1,
            accepted=[0, 1],
            drawn=[True, False],
            tokens=[236764, 1217, 564],
            finished="",
            handoff=wire.Handoff(b"\x01\x02\x03\x04", b"\x05\x06\x07\x08", SPEC.pack_rows(rows(3, 16)), 4),
            drafted=0,
            server_ms=6.25,
        )
    ),
    "refusal": wire.encode(wire.Refusal(1, "unknown_session", "no such session", "prime again")),
}


def dump(payload: bytes) -> str:
    lines = [payload[start : start + BYTES_PER_LINE] for start in range(0, len(payload), BYTES_PER_LINE)]
    return "\n".join(line.hex(" ") for line in lines)


def fenced(label: str) -> str:
    match = re.search(rf"```hex {label}\n(.*?)\n```", TEXT, flags=re.DOTALL)
    assert match, f"PROTOCOL.md has no block `hex {label}`; it should be:\n{dump(EXAMPLES[label])}"
    return match[1]


def table_after(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its header."""
    section = TEXT.split(f"\n{heading}\n", 1)
    assert len(section) == 2, f"PROTOCOL.md has no heading {heading!r}"
    lines = [line for line in section[1].split("\n## ")[0].split("\n### ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("label", EXAMPLES)
def test_the_dumps_are_what_the_code_sends(label: str) -> None:
    assert fenced(label) == dump(EXAMPLES[label])


def test_no_dump_is_left_untested() -> None:
    assert set(re.findall(r"```hex (\S+)", TEXT)) == set(EXAMPLES)


@pytest.mark.parametrize("name", KINDS)
def test_fields_are_listed_in_the_order_in_which_they_travel(name: str) -> None:
    listed = [row[1].strip("`") for row in table_after(f"### {name}")]
    assert listed == list(KINDS[name].__struct_fields__)
    numbers = [row[0] for row in table_after(f"### {name}")]
    assert numbers == [str(index) for index in range(len(listed))]


def test_the_refusal_table_is_complete() -> None:
    listed = {row[0].strip("`"): int(row[1]) for row in table_after("## 7 Refusals")}
    assert listed == STATUS_OF


def test_the_digest_example_is_right() -> None:
    digest = wire.committed_digest(COMMITTED)
    assert digest == hashlib.blake2b(np.array(COMMITTED, "<i4").tobytes(), digest_size=8).digest()
    assert f"`{COMMITTED}`" in TEXT and f"`{digest.hex()}`" in TEXT
    assert f"`{np.array(COMMITTED, '<i4').tobytes().hex()}`" in TEXT


def test_the_row_layout_example_is_right() -> None:
    assert [SPEC.row_bytes, SPEC.round_bytes] == [14, 8]
    payload = SPEC.pack_rows(rows(2, 16))
    assert list(payload) == list(range(16, 16 + 28))
    assert f"`{payload.hex(' ')}`" in TEXT


def test_the_limits_are_the_servers() -> None:
    limits, calls, peers = Limits(), http.CallLimits(), PeerLimits()
    for phrase in (
        f"{http.ENVELOPE_BYTES} + {http.ID_BYTES} x prompt limit",
        f"{http.ENVELOPE_BYTES} + {2 * http.ID_BYTES} x node limit",
        f"{limits.node_limit} nodes",
        f"{limits.prompt_limit:,} ids",
        f"{limits.sessions} sessions",
        f"{limits.idle_s:.0f} s",
        f"{limits.sessions_per_token} of one token",
        f"A body may take {calls.body_s:.0f} s and come in {peers.body_pieces} chunks or packets",
        f"less than {SLOWEST_READER_BYTES_PER_S} B a second over {peers.stall_s:.0f} s",
        f"the head of a request {peers.head_s:.0f} s and {peers.head_bytes} B",
    ):
        assert phrase in TEXT, phrase


def test_largest_bodies_fit_the_limits() -> None:
    limits = Limits()
    prompt = [2**31 - 1] * limits.prompt_limit
    prime = wire.PrimeRequest(
        1, prompt, wire.PAPER_SAMPLING, wire.EXACT, 2**64 - 1, 2**31, "device", 0, "f" * 64, 2**31
    )
    assert len(wire.encode(prime)) <= http.ENVELOPE_BYTES + http.ID_BYTES * limits.prompt_limit
    nodes = [2**31 - 1] * limits.node_limit
    round_body = wire.VerifyRequest(1, 2**31, b"\xff" * 8, nodes, nodes)
    assert len(wire.encode(round_body)) <= http.ENVELOPE_BYTES + 2 * http.ID_BYTES * limits.node_limit


def test_a_round_of_32_nodes_stays_below_300_bytes() -> None:
    # the paper's vocabulary: ids of up to 262,143 take 5 B each, parents 1 B
    body = wire.VerifyRequest(1, 32_000, bytes(8), [262_143] * 32, [-1, *range(31)])
    assert len(wire.encode(body)) < 300


@pytest.mark.parametrize("name", KINDS)
def test_a_field_may_be_left_out_exactly_where_the_page_says_optional(name: str) -> None:
    optional = {row[1].strip("`") for row in table_after(f"### {name}") if row[3].startswith("optional")}
    fields = msgspec.structs.fields(KINDS[name])
    assert optional == {field.name for field in fields if not field.required}


@pytest.mark.parametrize("short", [[], [0.0], [0.0, 1]])
def test_settings_that_are_left_out_are_malformed_and_not_guessed(short: list[float]) -> None:
    for place in (2, 3):  # sampling, acceptance
        fields = msgspec.msgpack.decode(EXAMPLES["prime-request"])
        fields[place] = fields[place][: len(short)] if place == 2 else fields[place][: len(short) // 2]
        with pytest.raises(ProtocolError) as refusal:
            wire.decode(msgspec.msgpack.encode(fields), wire.PrimeRequest)
        assert refusal.value.code == "malformed" and f"$[{place}]" in refusal.value.message


def test_additional_fields_at_the_end_are_ignored_and_defaults_may_be_left_out() -> None:
    fields = msgspec.msgpack.decode(EXAMPLES["prime-request"])
    longer = msgspec.msgpack.encode([*fields, "from a later version"])
    shorter = msgspec.msgpack.encode(fields[:-1])
    expected = wire.decode(EXAMPLES["prime-request"], wire.PrimeRequest)
    assert wire.decode(longer, wire.PrimeRequest) == wire.decode(shorter, wire.PrimeRequest) == expected
