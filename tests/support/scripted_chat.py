"""A conversation with the scripted server in the words of the embedded verifier's tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyco_export.core.files import resource_path
from hyco_export.device.driver import Generation
from hyco_export.device.interfaces import Request
from hyco_export.errors import ServerError
from hyco_export.evaluate.chat.conversation import Conversation, How
from hyco_export.evaluate.connect import Prompt
from hyco_export.evaluate.runs import GREEDY
from hyco_export.models.verifier import load_tokenizer
from hyco_export.protocol.wire import EXACT, Sampling, VerifyReply, VerifyRequest
from tests.support.scripted import STOP_ID, ScriptedHead, ScriptedServer, ScriptedSlm, ToyLanguageModel, hybrid_of

VERIFIER = resource_path("hyco_export/dev/tiny/checkpoints/verifier")
WORDS = 256  # a hand-off's rows hold ids below that
FIRST_BYTE = 7  # id of the byte 0
SAID = np.array([FIRST_BYTE + ord(sign) for sign in "abcdefghijklmnopqrstuvwxyz ,.\n"])  # whole characters
NEVER = 99.0  # below every logit of a character that is said
HOW = How("hyco-exact", "scripted", GREEDY, 24)


class LastTokenModel(ToyLanguageModel):
    """Says letters; each depends on the one before alone, so that the scripted head, whose ring is short, is right."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(WORDS, seed, stop_bias=-NEVER)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        values = super().logits(ids[-1:])
        values[np.setdiff1d(np.arange(WORDS), SAID)] -= NEVER
        return values


class ChatServer(ScriptedServer):
    """Fails or does something else at chosen rounds.

    Args:
        at: what happens before a round, by its number over all sessions.
    """

    def __init__(self, at: dict[int, object] | None = None) -> None:
        super().__init__(LastTokenModel())
        self.at = at or {}
        self.rounds = 0

    def verify(self, session: str, round_number: int, request: VerifyRequest) -> VerifyReply:
        self.rounds += 1
        happens = self.at.get(self.rounds)
        if isinstance(happens, Exception):
            raise happens
        if callable(happens):
            happens()
        return super().verify(session, round_number, request)


class ScriptedStarter:
    """`conversation.Starter` without a device or a network."""

    def __init__(self, server: ChatServer) -> None:
        self.server = server
        self.drafter = hybrid_of(
            ScriptedHead(server.model), ScriptedSlm(server.model, np.arange(WORDS)), np.arange(WORDS)
        )
        self.started: list[Prompt] = []
        self.same_server = True
        self.checks = 0

    def start(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> Generation:
        self.started.append(prompt)
        request = Request(system, prompt.id, sampling, EXACT, 7, max_new_tokens, stop_ids=(STOP_ID,), vocab_size=WORDS)
        return Generation(prompt.ids, request, self.drafter, self.server)

    def require_same_server(self) -> None:
        self.checks += 1
        if not self.same_server:
            raise ServerError("another server answers", "begin again")


def scripted_conversation(at: dict[int, object] | None = None) -> tuple[Conversation, ScriptedStarter]:
    """A conversation and what it goes through."""
    starter = ScriptedStarter(ChatServer(at))
    return Conversation(starter, HOW, load_tokenizer(VERIFIER)), starter


def main(folder: Path) -> int:
    """`chat` over it in a process of its own: in the second round the file `hanging` appears, and it goes on when
    `go_on` does."""
    import time

    from hyco_export.cli.console import output
    from hyco_export.cli.measure.chat import Chat

    def hang() -> None:
        (folder / "hanging").touch()
        while not (folder / "go_on").exists():
            time.sleep(0.01)

    conversation, _ = scripted_conversation({2: hang})
    backend = load_tokenizer(VERIFIER).backend_tokenizer
    return Chat(conversation, backend, folder, HOW.system, output).run()


if __name__ == "__main__":
    import sys

    sys.exit(main(Path(sys.argv[1])))
