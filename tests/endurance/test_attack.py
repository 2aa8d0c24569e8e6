"""The attacks, short: the command's own parts, one plain server and one with TLS."""

import pytest

from tests.endurance.attack import ATTACKS, TLS_ATTACKS, attacked, served, stopped


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_server_stands_the_attacks(secure: bool) -> None:
    attacks = TLS_ATTACKS if secure else ATTACKS
    with served(secure) as server:
        for name in ("silent sockets", "idle after a request", "one-byte chunks, 401", "pipelining"):
            finding = attacked(server, name, attacks[name], 0.5)
            assert finding.stood, finding.row


@pytest.mark.slow
def test_a_server_under_attack_stops_in_seconds() -> None:
    finding = stopped(False, 0.5)
    assert finding.stood, finding.row
