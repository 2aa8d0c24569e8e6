"""The soak, small: clients with tokens of their own over broken connections, on a toy engine behind a real server."""

import psutil

from hyco_export.device.client import Access
from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.endurance.soak import Naps, plain_texts, soak
from tests.support.live_server import running
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

CLIENTS, GENERATIONS, CAP, IDLE_S = 8, 5, 24, 0.5
MODEL = ToyLanguageModel(seed=3, stop_bias=-1.0)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "", WINDOW, 0)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "", "", 32, 64, 0, ["exact"], "thread-cpu")
PROMPTS = [(5, 9, 2, 7), (3, 3), (8, 2, 9, 9, 4), (6,)]


def test_many_clients_on_bad_connections_get_plain_greedy_texts() -> None:
    engine = Engine(
        lambda: ScriptedSession(MODEL),
        FACTS,
        Limits(sessions=256, sessions_per_token=32, prompt_limit=64, idle_s=IDLE_S),
    )
    tokens = [f"token-of-client-{number:04}" for number in range(CLIENTS)]
    app = create_app(engine, INFO, Tokens(tokens))
    with running(app) as url:
        texts = plain_texts(url, Access(tokens[0]), PROMPTS, CAP)
        assert {prompt: list(text) for prompt, text in texts.items()} == {
            prompt: MODEL.answer(prompt, CAP) for prompt in PROMPTS
        }
        outcome = soak(
            url, texts, VOCAB_SIZE, [Access(token) for token in tokens], lambda done, _: done < GENERATIONS,
            resets=0.1, naps=Naps(0.05, 1.2 * IDLE_S), process=psutil.Process(),
        )  # fmt: skip
    assert not outcome.errors and not outcome.mismatches
    assert outcome.generations == CLIENTS * GENERATIONS
    assert set(outcome.misfortunes) == {"sessions expired", "resets after the request", "replies lost"}
    assert outcome.primes >= outcome.generations + outcome.misfortunes["sessions expired"]  # each was primed again
    assert len(outcome.round_ms) > 2 * outcome.generations
