"""TLS end to end with certificates of a test authority, what is refused, and when a server may be reachable."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from hyco_export.device.client import Access, HttpTransport
from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.security import (
    Tokens,
    certificate_names,
    check_exposure,
    client_context,
    is_loopback,
    is_named,
    is_self_signed,
    server_context,
)
from hyco_export.server.connections import PeerLimits
from hyco_export.server.http import create_app
from tests.support.live_server import running
from tests.support.toy_service import ALICE, BOB, INFO, MODEL, PROMPT, toy_engine


@dataclass(frozen=True)
class Files:
    certificate: Path
    key: Path
    authority: Path
    stranger: Path  # an authority that signed nothing here


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    found = Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem", folder / "stranger.pem")
    leaf.private_key_pem.write_to_path(found.key)
    for number, blob in enumerate(leaf.cert_chain_pems):
        blob.write_to_path(found.certificate, append=number > 0)
    authority.cert_pem.write_to_path(found.authority)
    stranger.cert_pem.write_to_path(found.stranger)
    return found


@pytest.fixture(scope="module")
def url(files: Files) -> Iterator[str]:
    app = create_app(toy_engine(), INFO, Tokens([ALICE]))
    with running(app, server_context(files.certificate, files.key)) as url:
        yield url


def test_a_generation_over_tls_with_a_token(url: str, files: Files) -> None:
    assert url.startswith("https://")
    transport = HttpTransport(url, access=Access(ALICE, files.authority))
    request = Request("plain", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, 12)
    assert generate(PROMPT, request, NullDrafter(), transport).tokens == tuple(MODEL.answer(PROMPT, 12))


def test_another_token_and_none_are_refused(url: str, files: Files) -> None:
    for token in (BOB, ""):
        with pytest.raises(ProtocolError) as refusal:
            HttpTransport(url, access=Access(token, files.authority)).info()
        assert refusal.value.code == "unauthorized"


@pytest.mark.parametrize("authority", ["stranger", None])
def test_a_certificate_of_an_unknown_authority_is_refused(url: str, files: Files, authority: str | None) -> None:
    access = Access(ALICE, getattr(files, authority) if authority else None)
    with pytest.raises(ServerError, match=r"not trusted: .*certificate.* \(give its authority with --ca"):
        HttpTransport(url, access=access).info()


def test_the_names_of_a_certificate_are_read(files: Files, tmp_path: Path) -> None:
    leaf = trustme.CA().issue_cert("Verifier.Example", "*.example", "::1")
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    names = certificate_names(server_context(tmp_path / "both.pem", tmp_path / "both.pem"), tmp_path / "both.pem")
    assert names[:2] == ("verifier.example", "*.example") and len(names) == 3
    assert is_named("::1", names) and is_named("VERIFIER.example", names) and not is_named("127.0.0.1", names)
    assert certificate_names(server_context(files.certificate, files.key), files.certificate) == ("127.0.0.1",)


def test_a_certificate_for_another_name_is_refused(url: str, files: Files) -> None:
    other = url.replace("127.0.0.1", "localhost")
    with pytest.raises(ServerError, match=r"not trusted: [Hh]ostname mismatch"):
        HttpTransport(other, access=Access(ALICE, files.authority)).info()


def test_handshakes_are_counted_and_slow_ones_end(files: Files) -> None:
    app = create_app(toy_engine(), INFO, Tokens([ALICE]))
    peers = PeerLimits(connections=3, head_s=0.5)
    with running(app, server_context(files.certificate, files.key), peers) as url:
        host, port = url.removeprefix("https://").split(":")
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(3 * peers.connections)]
        assert HttpTransport(url, access=Access(ALICE, files.authority)).info() == INFO  # one gave its place
        for peer in silent:  # all are ended, the first ones to make room, the others in time
            with suppress(ConnectionError):
                assert peer.recv(1) == b""
            peer.close()


def test_old_protocol_versions_are_off(files: Files) -> None:
    for context in (server_context(files.certificate, files.key), client_context(files.authority)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_unusable_files_are_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"TLS certificate .*none\.pem .*cannot be used: No such file"):
        server_context(tmp_path / "none.pem", files.key)
    with pytest.raises(ServerError, match=r"cannot be used: .*\(give PEM files"):
        server_context(files.authority, files.key)  # does not belong to the key
    with pytest.raises(ServerError, match=r"certificate authority .*key\.pem cannot be used"):
        client_context(files.key)


def test_a_token_does_not_travel_in_the_clear() -> None:
    with pytest.raises(ServerError, match=r"the token would travel in the clear to 10\.0\.0\.1") as refusal:
        HttpTransport("http://10.0.0.1:1", access=Access(ALICE))
    assert ALICE not in str(refusal.value)
    HttpTransport("http://10.0.0.1:1", access=Access(ALICE, insecure=True))
    for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"):
        HttpTransport(url, access=Access(ALICE))


@pytest.mark.parametrize(
    ("host", "stays"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("::", False), ("10.1.2.3", False), ("verifier.example", False), ("", False),
    ],
)  # fmt: skip
def test_which_addresses_stay_on_this_machine(host: str, stays: bool) -> None:
    assert is_loopback(host) is stays


@pytest.mark.parametrize(
    ("host", "has_tls", "has_token", "insecure", "missing"),
    [
        ("0.0.0.0", False, False, False, "no TLS and no token"),
        ("0.0.0.0", True, False, False, "no token"),
        ("10.1.2.3", False, True, False, "no TLS"),
        ("0.0.0.0", True, True, False, None),
        ("0.0.0.0", False, False, True, None),
        ("127.0.0.1", False, False, False, None),
    ],
)
def test_reachable_servers_need_both_or_the_word(
    host: str, has_tls: bool, has_token: bool, insecure: bool, missing: str | None
) -> None:
    if missing is None:
        check_exposure(host, has_tls, has_token, insecure)
        return
    with pytest.raises(ServerError, match=f"there is {missing} .*--insecure"):
        check_exposure(host, has_tls, has_token, insecure)


def test_http_and_https_mixed_up_are_told_with_the_right_url(url: str) -> None:
    plain = url.replace("https", "http", 1)
    with pytest.raises(ServerError, match=f"{plain} speaks TLS .give the URL with https: {url}"):
        HttpTransport(plain, access=Access(ALICE)).info()
    with running(create_app(toy_engine(), INFO)) as plain:
        tls = plain.replace("http", "https", 1)
        with pytest.raises(ServerError, match=f"{tls} answers without TLS .give the URL with http: {plain}"):
            HttpTransport(tls).info()


def test_what_is_wrong_with_a_certificate_has_its_own_next_step(url: str, files: Files) -> None:
    for authority, step in ((None, "of a self-signed certificate"), (files.stranger, f"{files.stranger} did not sign")):
        with pytest.raises(ServerError, match=f"--ca.*{step}"):
            HttpTransport(url, access=Access(ALICE, authority)).info()
    with pytest.raises(ServerError, match="give with --server a host name or address that the certificate is for"):
        HttpTransport(url.replace("127.0.0.1", "localhost"), access=Access(ALICE, files.authority)).info()
    with pytest.raises(ServerError, match="is reached without TLS"):
        HttpTransport("http://127.0.0.1:1", access=Access("", files.authority))


def test_a_refused_token_names_where_tokens_come_from(url: str, files: Files) -> None:
    for token, step in (
        ("", "--token-file FILE, or the environment variable HYCO_TOKEN"),
        (BOB, "none of this server"),
    ):
        with pytest.raises(ProtocolError, match=step):
            HttpTransport(url, access=Access(token, files.authority)).info()


def test_only_a_certificate_that_signed_itself_is_its_own_authority(files: Files) -> None:
    assert is_self_signed(files.authority) and not is_self_signed(files.certificate)
