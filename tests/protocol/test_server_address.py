"""How a server's URL is written and read, and what a failed call says about it."""

import socket

import pytest

from hyco_export.device.client import HttpTransport
from hyco_export.errors import ProtocolError, ServerError, UnreachableError
from hyco_export.protocol.server_address import failed_call, read_url, url_of
from hyco_export.server.http import create_app
from tests.support.live_server import running
from tests.support.raw_server import RawServer, http_answer
from tests.support.toy_service import INFO, toy_engine


@pytest.mark.parametrize(
    ("listens", "url", "called"),
    [
        ("127.0.0.1", "http://127.0.0.1:8411", "127.0.0.1"),
        ("0.0.0.0", "http://127.0.0.1:8411", "127.0.0.1"),
        ("", "http://127.0.0.1:8411", "127.0.0.1"),
        ("::1", "http://[::1]:8411", "::1"),
        ("::", "http://[::1]:8411", "::1"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:8411", "fe80::1%eth0"),
        ("verifier.example", "http://verifier.example:8411", "verifier.example"),
    ],
)
def test_the_url_of_a_listener_can_be_called(listens: str, url: str, called: str) -> None:
    assert url_of(listens, 8411) == url
    address = read_url(url)
    assert (address.host, address.port, address.tls) == (called, 8411, False)


@pytest.mark.parametrize(
    ("url", "host", "prefix"),
    [("HTTP://Host:1/", "host", ""), (" https://h/a/b/ \n", "h", "/a/b"), ("http://[::1]", "::1", "")],
)
def test_spellings_that_mean_a_server_are_taken(url: str, host: str, prefix: str) -> None:
    address = read_url(url)
    assert (address.host, address.prefix) == (host, prefix)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a b:1", "holds blanks or control characters"),
        ("http://a\x1b:1", "holds blanks or control characters"),
        ("http://a:1?x=1", "has a query or fragment"),
        ("http://a:1#x", "has a query or fragment"),
        ("http://a:65536", "Port out of range"),
        ("http://::1:8411", r"IPv6 addresses in brackets: http://\[::1\]"),
        ("a:1", "is not http://HOST:PORT"),
    ],
)
def test_what_is_no_server_url_is_refused_with_the_rule(url: str, reason: str) -> None:
    with pytest.raises(ServerError, match=reason):
        read_url(url)


def test_a_path_that_the_server_does_not_know_is_taken_off() -> None:
    with running(create_app(toy_engine(), INFO)) as url:
        assert HttpTransport(f"{url}/").info() == INFO
        with pytest.raises(ProtocolError, match=f"no calls under the path /v1 .give --server without a path: {url}.$"):
            HttpTransport(f"{url}/v1").info()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http_answer(b"<p>", "404 Not Found", "text/html", "Server: nginx\r\n"), "printed: nginx answers there"),
        (http_answer(b"<p>", "302 Found", "text/html", "Location: https://o/x\r\n"), "it leads to https://o/x"),
        (http_answer(b"<p>", "401 Unauthorized", "text/html"), "a proxy or another program refuses the call"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "speaks no HTTP: SSH-2.0.*another program listens there"),
    ],
)
def test_another_program_at_the_url_is_named(answer: bytes, message: str) -> None:
    with RawServer([answer]) as server, pytest.raises(ServerError, match=message):
        HttpTransport(server.url).info()


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(UnreachableError, match=r"no host of this name is known.*correct the host name in --server"):
        HttpTransport("http://nowhere.invalid:1").info()


def test_the_command_that_starts_a_server_there_has_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"refused .start it with `hyco-export serve --port {port}`"):
        HttpTransport(f"http://127.0.0.1:{port}").info()


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://[::1]:8479", "start it with `hyco-export serve --host ::1 --port 8479`, or correct --server"),
        ("http://127.0.0.2:8411", "start it with `hyco-export serve --host 127.0.0.2`, or correct --server"),
        ("http://localhost:8479", "start it with `hyco-export serve --port 8479`, or correct --server"),
        (
            "https://localhost:8479",
            "start it with `hyco-export serve --port 8479`, with its --tls-cert and --tls-key, or correct --server",
        ),
        ("https://verifier.example:8479", "start it with `hyco-export serve`, with its --tls-cert and --tls-key, or"),
    ],
)
def test_the_command_that_starts_a_server_listens_where_the_url_points(url: str, hint: str) -> None:
    error = failed_call(read_url(url), ConnectionRefusedError())
    assert isinstance(error, UnreachableError) and error.hint.startswith(hint)
