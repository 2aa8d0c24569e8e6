"""The HTTP application in-process: routes, statuses, limits, metrics, garbage; and once as a real process."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import STATUS_OF
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Batching, Facts, Limits, expiry_hint, retry_wait_s
from hyco_export.server.engine import Engine
from hyco_export.server.http import CallLimits, create_app
from hyco_export.server.interfaces import SequentialModels
from hyco_export.server.serving import bind, serve
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

HEAD = "head-artifact-key"
BODY = {"Content-Type": wire.MEDIA_TYPE}
PROMPT = [5, 6, 7, 8]
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 4096, HEAD, WINDOW, 4)
LIMITS = Limits(sessions=4, node_limit=32, prompt_limit=100)
INFO = wire.ServerInfo(
    version=wire.PROTOCOL_VERSION,
    server="hyco-export test",
    verifier_digest="v",
    tokenizer_digest="t",
    vocab_size=VOCAB_SIZE,
    stop_ids=[STOP_ID],
    head_digest=HEAD,
    keepset_digest="k",
    node_limit=LIMITS.node_limit,
    prompt_limit=LIMITS.prompt_limit,
    server_steps=4,
    rules=["exact", "epsilon"],
    clock="thread-cpu",
)
PRIME = wire.PrimeRequest(wire.PROTOCOL_VERSION, PROMPT, wire.Sampling(0.0, 0, 1.0), wire.EXACT, 7, 50, "device", 0, "")


def toy_engine() -> Engine:
    model = ToyLanguageModel(stop_bias=-99.0)
    return Engine(lambda: ScriptedSession(model), FACTS, LIMITS)


@pytest.fixture
def engine() -> Engine:
    return toy_engine()


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, INFO), headers=BODY) as client:
        yield client


def prime(client: TestClient, request: wire.PrimeRequest = PRIME) -> wire.PrimeReply:
    answer = client.post("/v1/sessions", content=wire.encode(request))
    assert answer.status_code == 200 and answer.headers["content-type"] == wire.MEDIA_TYPE
    return wire.decode(answer.content, wire.PrimeReply)


def round_body(ids: list[int], tokens: list[int], parents: list[int]) -> bytes:
    return wire.encode(wire.VerifyRequest(wire.PROTOCOL_VERSION, len(ids), wire.committed_digest(ids), tokens, parents))


def refused(answer: httpx.Response, code: str) -> wire.Refusal:
    refusal = wire.decode(answer.content, wire.Refusal)
    assert (refusal.code, answer.status_code) == (code, STATUS_OF[code])
    assert answer.headers["content-type"] == wire.MEDIA_TYPE
    return refusal


def test_a_generation_over_http(client: TestClient, engine: Engine) -> None:
    reply = prime(client)
    ids = [*PROMPT, reply.root]
    chain = ToyLanguageModel(stop_bias=-99.0).greedy(ids, 3)
    path = f"/v1/sessions/{reply.session}"
    answer = client.post(f"{path}/rounds/1", content=round_body(ids, chain[:2], [ROOT, 0]))
    assert wire.decode(answer.content, wire.VerifyReply).tokens == chain
    again = client.post(f"{path}/rounds/1", content=round_body(ids, chain[:2], [ROOT, 0]))
    assert again.content == answer.content
    assert client.delete(path).status_code == 204 and engine.session_count == 0
    assert client.delete(path).status_code == 204
    refusal = refused(client.post(f"{path}/rounds/2", content=round_body([*ids, *chain], [], [])), "unknown_session")
    assert refusal.hint == "prime again with the committed ids"


def test_info_is_a_map_that_says_what_this_server_is(client: TestClient) -> None:
    answer = client.get("/v1/info")
    assert wire.decode(answer.content, wire.ServerInfo) == INFO
    assert msgspec.msgpack.decode(answer.content)["rules"] == ["exact", "epsilon"]


@pytest.mark.parametrize(
    ("tokens", "parents", "code"),
    [
        ([1, 2], [ROOT], "tree_shape"),
        ([VOCAB_SIZE], [ROOT], "token_range"),
        ([3, 3], [ROOT, ROOT], "duplicate_sibling"),
        ([3, 4], [1, 0], "parent_order"),
        ([3] * 33, list(range(-1, 32)), "tree_size"),
    ],
)
def test_bad_trees_get_400_with_a_typed_code(
    client: TestClient, tokens: list[int], parents: list[int], code: str
) -> None:
    reply = prime(client)
    ids = [*PROMPT, reply.root]
    path = f"/v1/sessions/{reply.session}/rounds/1"
    answer = client.post(path, content=round_body(ids, tokens, parents))
    assert answer.status_code == 400
    refused(answer, code)
    assert client.post(path, content=round_body(ids, [], [])).status_code == 200


def test_the_first_broken_rule_is_named_in_the_order_of_the_page(client: TestClient) -> None:
    reply = prime(client)
    ids = [*PROMPT, reply.root]
    path = f"/v1/sessions/{reply.session}/rounds"
    many, bad = [3] * 66, [VOCAB_SIZE]
    plain = {"Content-Type": "text/plain"}
    refused(client.post("/v1/sessions", content=b"\0" * 2000, headers=plain | {"Origin": "x"}), "origin")
    refused(client.post("/v1/sessions", content=b"\0" * 2000, headers=plain), "body_size")
    refused(client.post(f"{path}/one", content=b"?", headers=plain), "media_type")
    assert "the round in the path" in refused(client.post(f"{path}/one", content=b"?"), "malformed").message
    refused(client.post("/v1/sessions/nobody/rounds/1", content=b"?"), "malformed")
    refused(client.post("/v1/sessions/nobody/rounds/9", content=round_body(ids, many, [])), "unknown_session")
    refused(client.post(f"{path}/9", content=round_body([1], many, [])), "round_future")
    refused(client.post(f"{path}/1", content=round_body([1], many, [])), "length_differs")
    refused(client.post(f"{path}/1", content=round_body(ids, many, [])), "tree_shape")
    refused(client.post(f"{path}/1", content=round_body(ids, bad * 66, [9] * 66)), "tree_size")
    refused(client.post(f"{path}/1", content=round_body(ids, bad * 2, [9] * 2)), "token_range")
    refused(client.post(f"{path}/1", content=round_body(ids, [3, *bad], [9, 9])), "parent_order")
    changes: dict[str, object] = {}
    for code, more in (  # from the last rule to the first: each new mistake hides the ones before
        ("head_mismatch", {"head_digest": "x"}),
        ("value_range", {"draft_steps": 3}),
        ("unsupported", {"acceptance": wire.Acceptance("exact", float("nan"))}),
        ("value_range", {"seed": -1}),
        ("prompt_size", {"prompt": [VOCAB_SIZE] * 101}),
        ("unsupported", {"draft_side": "x"}),
        ("value_range", {"attempt": "x" * 65}),
        ("version", {"version": 2}),
    ):
        changes |= more
        refused(client.post("/v1/sessions", content=wire.encode(msgspec.structs.replace(PRIME, **changes))), code)


def test_conflicting_rounds_get_409(client: TestClient) -> None:
    reply = prime(client)
    ids = [*PROMPT, reply.root]
    path = f"/v1/sessions/{reply.session}/rounds"
    refused(client.post(f"{path}/2", content=round_body(ids, [], [])), "round_future")
    refused(client.post(f"{path}/1", content=round_body(ids[1:], [], [])), "length_differs")
    refused(client.post(f"{path}/1", content=round_body([*PROMPT, 0], [], [])), "digest_differs")
    for number in ("one", "-1", "1.0", "²", "9" * 5000, "01", "+1", "%201", "1%20", "1_0", "%D9%A1", "1" * 10):
        refused(client.post(f"{path}/{number}", content=round_body(ids, [], [])), "malformed")


def test_a_prompt_that_is_too_long_gets_413_and_a_value_out_of_range_422(client: TestClient) -> None:
    long = msgspec.structs.replace(PRIME, prompt=[2] * 101)
    refused(client.post("/v1/sessions", content=wire.encode(long)), "prompt_size")
    greedy = msgspec.structs.replace(PRIME, sampling=wire.Sampling(-1.0, 64, 0.95))
    refused(client.post("/v1/sessions", content=wire.encode(greedy)), "value_range")
    other = msgspec.structs.replace(PRIME, head_digest="another")
    refused(client.post("/v1/sessions", content=wire.encode(other)), "head_mismatch")


def test_a_body_that_is_too_large_is_refused_before_it_is_read(client: TestClient) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while read < 100:
            read += 1
            yield b"\x00" * 1000

    refusal = refused(client.post("/v1/sessions", content=b"\x00" * 2000), "body_size")
    assert refusal.message == "the body is larger than the 1524 B this call takes"
    refused(client.post("/v1/sessions", content=endless()), "body_size")  # chunked: no length is declared
    refused(client.post("/v1/sessions", content=b"", headers={"content-length": "9" * 5000}), "body_size")


def test_the_right_version_is_asked_for(client: TestClient) -> None:
    future = msgspec.structs.replace(PRIME, version=2)
    refusal = refused(client.post("/v1/sessions", content=wire.encode(future)), "version")
    assert refusal.message == "protocol version 2, this side speaks 1"


@pytest.mark.parametrize(
    "body",
    [[2], [2, "x", {"prompt": [1]}], {"version": 2}, {"version": 2, "ids": [1]}, {"version": 2, 1: [1]}, [7, None]],
)
def test_another_version_is_named_whatever_its_shape(client: TestClient, body: object) -> None:
    for path in ("/v1/sessions", "/v1/sessions/a/rounds/1"):
        refused(client.post(path, content=msgspec.msgpack.encode(body)), "version")
    for other in ([], [1], {}, {"version": 1}, {"version": "2"}, ["2"], 2):
        refused(client.post("/v1/sessions", content=msgspec.msgpack.encode(other)), "malformed")


def test_unknown_paths_and_methods_are_typed_too(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), "unknown_route")
    for method, path in (
        ("GET", "/v1/info/"),
        ("POST", "/v1/sessions/"),
        ("DELETE", "/v1/sessions/"),
        ("POST", "/v1/sessions/a/rounds/1/"),
        ("POST", "/v1/sessions/a/rounds/"),
        ("DELETE", "/v1/sessions/a/"),
    ):  # no path is guessed: a redirection would carry no refusal
        refused(client.request(method, path, follow_redirects=False), "unknown_route")
    answer = client.get("/v1/sessions")
    refused(answer, "method")
    assert answer.headers["allow"] == "POST"
    assert client.post("/v1/sessions/a").headers["allow"] == "DELETE"
    refused(client.post("/v1/sessions/a/b/c/d", content=b""), "unknown_route")


@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        ({"Content-Type": "text/plain"}, "said to be 'text/plain'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "said to be 'application/x-www-form-urlencoded'"),
        ({"Content-Type": ""}, "said to be ''"),
        ({"Content-Encoding": "gzip"}, "has a Content-Encoding"),
    ],
)
def test_bodies_of_another_kind_are_refused(
    client: TestClient, engine: Engine, headers: dict[str, str], seen: str
) -> None:
    for path in ("/v1/sessions", "/v1/sessions/a/rounds/1"):
        assert seen in refused(client.post(path, content=wire.encode(PRIME), headers=headers), "media_type").message
    assert engine.session_count == 0
    parameters = {"Content-Type": f"{wire.MEDIA_TYPE.upper()}; version=1"}
    assert client.post("/v1/sessions", content=wire.encode(PRIME), headers=parameters).status_code == 200


@pytest.mark.parametrize("origin", ["https://example.org", "http://127.0.0.1:8411", "null"])
def test_web_pages_cannot_call(client: TestClient, engine: Engine, origin: str) -> None:
    for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/info"), ("DELETE", "/v1/sessions/a")):
        refused(client.request(method, path, content=wire.encode(PRIME), headers={"Origin": origin}), "origin")
    assert engine.session_count == 0


def test_full_servers_say_429(client: TestClient) -> None:
    for _ in range(LIMITS.sessions):
        prime(client)
    answer = client.post("/v1/sessions", content=wire.encode(PRIME))
    refusal = refused(answer, "sessions_full")
    assert answer.headers["retry-after"] == "5" and refusal.retry_after_s == 5  # any of them may end before it expires


def test_full_caches_say_when_to_try_again_too() -> None:
    engine = Engine(
        lambda: ScriptedSession(ToyLanguageModel(stop_bias=-99.0)),
        FACTS,
        msgspec.structs.replace(LIMITS, cache_bytes=100),
        models=SequentialModels(position_bytes=1),
    )
    with TestClient(create_app(engine, INFO), headers=BODY) as client:
        prime(client)
        answer = client.post("/v1/sessions", content=wire.encode(PRIME))
        assert answer.headers["retry-after"] == "5" and refused(answer, "cache_full").retry_after_s == 5


def test_a_wait_is_never_said_to_be_nothing() -> None:
    assert retry_wait_s(0.0) == 1.0 and "in 1 s" in expiry_hint("", 0.0)


def test_a_server_whose_model_hangs_is_not_ready_and_stops_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyco_export.server.engine.SETTLE_S", 0.2)
    release = threading.Event()

    class Hanging(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            assert release.wait(timeout=30)
            return super().prime(ids)

    engine = Engine(lambda: Hanging(ToyLanguageModel(stop_bias=-99.0)), FACTS, LIMITS)
    with TestClient(create_app(engine, INFO, calls=CallLimits(model_s=0.2)), headers=BODY) as client:
        for _ in range(3):
            answer = client.get("/readyz")
            assert (answer.status_code, answer.text) == (503, "the model has not answered for 0.2 s\n")
        assert engine.session_count == 0 and client.get("/healthz").status_code == 200
        release.set()
        assert client.get("/readyz").status_code == 200  # the one probe in flight came back
    release.clear()
    engine = Engine(lambda: Hanging(ToyLanguageModel(stop_bias=-99.0)), FACTS, LIMITS)  # the first one has stopped
    codes: list[str] = []

    def caller() -> None:
        with pytest.raises(ProtocolError) as refusal:
            engine.prime(PRIME)
        codes.append(refusal.value.code)

    waiting = threading.Thread(target=caller)
    waiting.start()
    while not engine.session_count:
        time.sleep(0.01)
    engine.shut_down()
    waiting.join(timeout=30)
    assert codes == ["shutting_down"]
    release.set()


def test_a_model_that_fails_is_said_to_fail_and_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            raise RuntimeError("secret words")

    def none() -> ScriptedSession:
        raise MemoryError("secret words")

    for session in (lambda: Failing(ToyLanguageModel()), none):
        caplog.clear()
        with TestClient(create_app(Engine(session, FACTS, LIMITS), INFO), headers=BODY) as client:
            for _ in range(50):
                answer = client.get("/readyz")
                assert (answer.status_code, answer.text) == (503, "the model failed when it was asked for a pass\n")
        assert len(caplog.records) == 1 and "secret" not in caplog.text


def test_health_and_readiness(engine: Engine) -> None:
    client = TestClient(create_app(engine, INFO), headers=BODY)
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503  # the application has not started
    refused(client.post("/v1/sessions", content=wire.encode(PRIME)), "shutting_down")
    with client:
        assert client.get("/readyz").text == "ready\n"
        prime(client)
    assert engine.session_count == 0  # stopping frees every session


def test_metrics_count_calls_tokens_bytes_and_refusals(client: TestClient) -> None:
    reply = prime(client)
    body = round_body([*PROMPT, reply.root], [], [])
    client.post(f"/v1/sessions/{reply.session}/rounds/1", content=body)
    client.post("/v1/sessions", content=b"garbage")
    text = client.get("/metrics").text
    for line in (
        'hyco_requests_total{call="prime"} 1.0',
        'hyco_requests_total{call="verify"} 1.0',
        'hyco_refusals_total{code="malformed"} 1.0',
        "hyco_committed_tokens_total 2.0",
        f"hyco_body_bytes_up_total {float(len(wire.encode(PRIME)) + len(body))}",
        "hyco_sessions 1.0",
        "hyco_prefilled_ids 0.0",
        'hyco_server_ms_count{call="verify"} 1.0',
    ):
        assert line in text.splitlines(), line
    assert reply.session not in text


class BlockingSession(ScriptedSession):
    """Waits in its forward until the test lets it go."""

    entered = threading.Event()
    release = threading.Event()

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        self.entered.set()
        assert self.release.wait(timeout=30)
        return super().verify(root, tokens, parents)


def test_the_loop_answers_while_the_model_works() -> None:
    model = ToyLanguageModel(stop_bias=-99.0)
    with TestClient(create_app(Engine(lambda: BlockingSession(model), FACTS, LIMITS), INFO), headers=BODY) as client:
        reply = prime(client)
        body = round_body([*PROMPT, reply.root], [], [])
        path = f"/v1/sessions/{reply.session}/rounds/1"
        answers: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: answers.append(client.post(path, content=body)))
        caller.start()
        assert BlockingSession.entered.wait(timeout=30)
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/info").status_code == 200
        assert not answers
        BlockingSession.release.set()
        caller.join(timeout=30)
        assert answers[0].status_code == 200


def test_a_model_fault_gets_500_and_the_server_lives_on() -> None:
    class Faulty(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            if ids[0] == 9:
                raise RuntimeError("out of memory")
            return super().prime(ids)

    model = ToyLanguageModel()
    with TestClient(create_app(Engine(lambda: Faulty(model), FACTS, LIMITS), INFO), headers=BODY) as client:
        bad = msgspec.structs.replace(PRIME, prompt=[9, 9])
        refusal = refused(client.post("/v1/sessions", content=wire.encode(bad)), "model_fault")
        assert refusal.message == "the model failed: RuntimeError"
        prime(client)


def dropped_call(url: httpx.URL, path: str, body: bytes, entered: threading.Event) -> None:
    """Send a call and close the connection while the model works."""
    lines = (f"POST {path} HTTP/1.1", "Host: here", f"Content-Type: {wire.MEDIA_TYPE}", f"Content-Length: {len(body)}")
    head = "\r\n".join([*lines, "", ""]).encode()
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head + body)
        assert entered.wait(timeout=30)


def test_a_caller_that_hangs_up_frees_a_prime_and_keeps_a_session() -> None:
    entered = threading.Event()
    opened: list[ScriptedSession] = []
    model = ToyLanguageModel(stop_bias=-99.0)

    class Slow(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            if self is not opened[0]:
                entered.set()
                time.sleep(0.03)
            return super().prime(ids)

    def open_session() -> ScriptedSession:
        opened.append(Slow(model))
        return opened[-1]

    engine = Engine(open_session, FACTS, LIMITS, batching=Batching(prefill_rows=1))
    process = uvicorn.Server(uvicorn.Config(create_app(engine, INFO), port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    while not process.started:
        thread.join(0.01)
    with httpx.Client(
        base_url=f"http://127.0.0.1:{process.servers[0].sockets[0].getsockname()[1]}", headers=BODY
    ) as http:
        answer = http.post("/v1/sessions", content=wire.encode(PRIME))
        kept = wire.decode(answer.content, wire.PrimeReply)
        long = msgspec.structs.replace(PRIME, prompt=[4] * 100)  # 3 s of passes
        dropped_call(http.base_url, "/v1/sessions", wire.encode(long), entered)
        while engine.session_count == 2:
            time.sleep(0.01)
        assert opened[1].closed and len(opened[1].ids) < 50
        body = round_body([*PROMPT, kept.root], [], [])
        assert http.post(f"/v1/sessions/{kept.session}/rounds/1", content=body).status_code == 200
        assert 'hyco_refusals_total{code="cancelled"} 1.0' in http.get("/metrics").text
    process.should_exit = True
    thread.join(timeout=30)


def test_every_refusal_code_raised_in_the_runtime_has_a_status() -> None:
    package = Path(wire.__file__).parents[1]
    modules = sorted(path for room in ("protocol", "server") for path in (package / room).glob("*.py"))
    raised = set()
    for module in modules:
        raised |= set(re.findall(r'ProtocolError\(\s*"(\w+)"', module.read_text()))
    assert len(raised) > 15
    assert raised <= set(STATUS_OF), raised - set(STATUS_OF)


def test_an_address_that_cannot_be_bound_is_named(client: TestClient) -> None:
    with pytest.raises(ServerError, match=r"cannot listen on 127\.0\.0\.1:99999") as caught:
        serve(create_app(toy_engine(), INFO), port=99999)
    assert caught.value.hint == "choose another --host or --port"


def test_replies_do_not_wait_for_acknowledgements() -> None:
    # a headers packet and a body packet: with Nagle's algorithm every round would take 40 ms longer
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.server.test_http import INFO, toy_engine
from hyco_export.server.http import create_app
from hyco_export.server.serving import serve
serve(create_app(toy_engine(), INFO), on_ready=lambda host, port: print(host, port, flush=True))
print("stopped", flush=True)
"""


def test_as_a_process_it_binds_to_loopback_picks_a_port_and_stops_when_told() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        assert host == "127.0.0.1" and int(port) > 0
        with httpx.Client(base_url=f"http://{host}:{port}", headers=BODY) as http:
            reply = wire.decode(http.post("/v1/sessions", content=wire.encode(PRIME)).content, wire.PrimeReply)
            body = round_body([*PROMPT, reply.root], [], [])
            answer = http.post(f"/v1/sessions/{reply.session}/rounds/1", content=body)
            assert answer.status_code == 200 and http.get("/readyz").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(timeout=30) == 0


def test_decoding_refuses_what_is_nested_too_deep() -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode(b"\x91" * 200_000, wire.PrimeRequest)
    assert caught.value.code == "malformed"
