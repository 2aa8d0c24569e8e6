"""A server of two replicas with toy engines, as a process: prints its URL, then waits for a signal.

The toy model takes its time, so that a test can kill a replica in the middle of a generation.
"""

import socket
import sys
import time
from pathlib import Path

REPOSITORY = str(Path(__file__).parents[2])


def build() -> object:
    """A replica's application, in the replica's own process; with an argument one that cannot start."""
    print("a word at the start")
    sys.path.insert(0, REPOSITORY)
    import numpy as np

    from hyco_export.protocol import wire
    from hyco_export.server.admission import Facts, Limits
    from hyco_export.server.engine import Engine
    from hyco_export.server.http import create_app
    from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

    model = ToyLanguageModel(seed=5, stop_bias=-1e9)

    class Slow(ScriptedSession):
        def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
            time.sleep(0.03)
            return super().verify(root, tokens, parents)

    engine = Engine(lambda: Slow(model), Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4), Limits())
    info = wire.ServerInfo(
        1, "replica", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "k", 64, 4096, 4, ["exact"], "thread-cpu"
    )
    return create_app(engine, info)


def slow() -> object:
    time.sleep(300.0)
    return build()


def broken() -> object:
    from hyco_export.errors import CheckpointError

    raise CheckpointError("model.safetensors is damaged", "fetch it again")


if __name__ == "__main__":
    from hyco_export.errors import ServerError
    from hyco_export.server.replicas import serve_replicas

    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    made = {"broken": broken, "slow": slow}.get(sys.argv[-1], build)
    try:
        serve_replicas(made, 2, "127.0.0.1", free, lambda host, port: print(f"http://{host}:{port}", flush=True))  # type: ignore[arg-type]
    except ServerError as error:
        print(f"refused: {error}", flush=True)
    print("stopped", flush=True)
