"""Nothing of a prompt in the logs, whatever is refused or fails; and no pickles in anything that the package runs."""

import ast
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

import hyco_export
from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens
from hyco_export.server.engine import Engine
from hyco_export.server.http import Service, create_app
from hyco_export.server.metrics import place_of
from tests.support.scripted import VOCAB_SIZE, ScriptedSession
from tests.support.toy_chat import CHAT
from tests.support.toy_service import ALICE, FACTS, INFO, LIMITS, MODEL, PRIME, bearer, first_round

SECRET = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SECRET_TEXTS = ("3, 1, 4, 1", "[3 1 4 1", "3141592", "secret of the model")


class Talkative(ScriptedSession):
    """Says what it was given when it fails."""

    def prime(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) == len(SECRET):
            raise RuntimeError(f"secret of the model: {list(map(int, ids))} {ids}")
        return super().prime(ids)

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        try:
            raise KeyError(f"secret of the model: {SECRET}")
        except KeyError as error:
            raise IndexError(f"{SECRET}") from error


def test_refusals_and_faults_log_no_prompt(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    secret = msgspec.structs.replace(PRIME, prompt=SECRET)
    engine = Engine(lambda: Talkative(MODEL), FACTS, LIMITS)
    with TestClient(create_app(engine, INFO, Tokens([ALICE])), headers={"Content-Type": wire.MEDIA_TYPE}) as client:

        def post(path: str, body: bytes) -> int:
            return client.post(path, content=body, headers=bearer(ALICE)).status_code

        assert post("/v1/sessions", wire.encode(secret)) == 500
        for changes in ({"prompt": [*SECRET, VOCAB_SIZE]}, {"prompt": SECRET * 20}, {"seed": -1}, {"version": 9}):
            assert post("/v1/sessions", wire.encode(msgspec.structs.replace(secret, **changes))) in (400, 413, 422)
        assert post("/v1/sessions", wire.encode(secret)[:-3]) == 400
        reply = wire.decode(
            client.post("/v1/sessions", content=wire.encode(PRIME), headers=bearer(ALICE)).content, wire.PrimeReply
        )
        path = f"/v1/sessions/{reply.session}/rounds/1"
        assert post(path, first_round(reply, tokens=SECRET, parents=[-1] * len(SECRET))) == 400
        assert post(path, first_round(reply)) == 500

        def broken(*_: object) -> None:
            raise ValueError(f"secret of the model {SECRET}")

        monkeypatch.setattr(wire, "decode", broken)
        assert post("/v1/sessions", wire.encode(secret)) == 500
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert sum("failed" in record.getMessage() for record in ours) == 3  # faults are logged
    for record in ours:
        text = logging.Formatter().format(record)
        assert not any(secret_text in text for secret_text in (*SECRET_TEXTS, ALICE, reply.session)), text
    assert any("test_secrecy.py" in record.getMessage() and "KeyError" in record.getMessage() for record in ours)


def test_the_place_of_an_error_names_causes_but_no_messages() -> None:
    try:
        try:
            raise KeyError("secret of the model")
        except KeyError as error:
            raise ValueError("secret of the model") from error
    except ValueError as error:
        place = place_of(error)
    assert place.startswith("ValueError") and "caused by KeyError" in place and "test_secrecy.py" in place
    assert "secret of the model" not in place


PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_no_pickles_anywhere() -> None:
    files = sorted(Path(hyco_export.__file__).parent.rglob("*.py"))
    assert len(files) > 150 and any(path.name == "wire.py" for path in files)
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names if alias.name.split(".")[0] in PICKLING]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING:
                found.append((path, node.module))
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                found.append((path, ast.unparse(node)))
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append((path, "allow_pickle"))
    assert not found


def test_no_handler_but_the_probes_runs_unguarded() -> None:
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS)
    unguarded = {
        route.path
        for route in create_app(engine, INFO, chat=CHAT).routes
        if getattr(route, "endpoint", None) and route.endpoint.__qualname__.split(".")[1] != Service.guarded.__name__
    }
    assert unguarded == {"/healthz", "/readyz"}
