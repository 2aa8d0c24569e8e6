"""How the commands reach a server: a dead one is said at once, one that is started again is waited for."""

import pytest

from hyco_export.cli.connection import ConnectOptions, transport_to
from hyco_export.device.client import Patience
from hyco_export.errors import UnreachableError
from hyco_export.protocol import wire
from tests.support.raw_server import DROP, RawServer, http_answer

INFO = wire.ServerInfo(1, "test", "v", "t", 16, [1], "", "", 32, 64, 4, ["exact"], "thread-cpu")
VERIFY = wire.VerifyRequest(1, 5, b"12345678", [], [])
VERDICT = wire.VerifyReply(1, 3, [], [], [6], "", None, 0, 1.0)
PRIME = wire.PrimeRequest(1, [5], wire.Sampling(0.0, 0, 1.0), wire.EXACT, 1, 4, "device", 0, "")
PRIMED = wire.PrimeReply(1, "s", 6, 2, "", None, 1.0)


@pytest.mark.parametrize("link", [None, "wifi"])
def test_a_server_that_is_started_again_in_the_middle_of_a_run_is_waited_for(link: str | None) -> None:
    gone = [DROP] * (3 + len(Patience().pauses_s))  # more than a round's own tries
    answers = [http_answer(wire.encode(INFO)), *gone, http_answer(wire.encode(VERDICT))]
    with RawServer(answers) as server:
        transport, _ = transport_to(server.url, ConnectOptions(link=link), seed=1)
        assert transport.verify("s", 3, VERIFY) == VERDICT
        assert len(server.requests) == len(answers)
    with RawServer([http_answer(wire.encode(INFO)), DROP, DROP, http_answer(wire.encode(PRIMED))]) as server:
        transport, _ = transport_to(server.url, ConnectOptions(link=link), seed=1)
        assert transport.prime(PRIME) == PRIMED
        assert len({request.split(b"\r\n\r\n", 1)[1] for request in server.requests[1:]}) == 1  # tries of one attempt


def test_a_dead_server_is_said_at_once() -> None:
    with RawServer([DROP]) as server:
        with pytest.raises(UnreachableError, match="no answer from the verifier server"):
            transport_to(server.url, ConnectOptions(), seed=1)
        assert len(server.requests) == 1
