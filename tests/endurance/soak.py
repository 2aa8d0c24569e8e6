"""Many clients at once on bad connections for a long time: every text must be the plain greedy one.

Run: `make soak` (the embedded family behind `hyco-export serve`, 32 clients with a token each, 10 minutes, 1 % resets,
1 % expiries). It fails on a wrong token, a generation that ends in an error, an expiry that was none, or memory that
grows.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil

from hyco_export.device.calls import RetryingTransport
from hyco_export.device.client import Access, HttpTransport
from hyco_export.device.drafters import Draft, NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Given, Request
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, Source, Tree
from tests.endurance.saboteur import Saboteur

GREEDY = wire.Sampling(0.0, 0, 1.0)
PATIENCE_S = 120.0
WATCH_S = 5.0
IDLE_S = 4.0  # until the server forgets a session
MB = 1e6

Texts = Mapping[tuple[int, ...], tuple[int, ...]]  # prompt -> plain greedy tokens


@dataclass(frozen=True)
class Naps:
    """How often a device falls asleep before it drafts, and for how long: longer than its session lives."""

    share: float
    seconds: float


class KnowingDrafter:
    """Drafts trees around a known text: a chain of right tokens that turns wrong somewhere, and wrong siblings."""

    def __init__(self, prompt: Sequence[int], text: Sequence[int], vocab_size: int, seed: int, naps: Naps) -> None:
        self._answer = [*prompt, *text]
        self._vocab_size = vocab_size
        self._dice = np.random.default_rng(seed)
        self._naps = naps
        self.slept = 0

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        if self._dice.random() < self._naps.share:
            self.slept += 1
            time.sleep(self._naps.seconds)
        chain = self._answer[len(ids) : len(ids) + int(self._dice.integers(0, 6))]
        tokens, parents = [], []
        above = ROOT
        for token in chain:
            wrong = (token + int(self._dice.integers(1, self._vocab_size))) % self._vocab_size
            pair = [token, wrong] if self._dice.random() < 0.8 else [wrong]
            tokens += pair
            parents += [above] * len(pair)
            above = len(tokens) - len(pair)
        count = len(tokens)
        return Draft(Tree(tuple(tokens), tuple(parents), (0.0,) * count, (Source.SLM,) * count))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass


@dataclass
class Outcome:
    """What all clients saw together."""

    generations: int = 0
    tokens: int = 0
    primes: int = 0
    mismatches: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    misfortunes: Counter[str] = field(default_factory=Counter)
    memory_mb: list[float] = field(default_factory=list)

    def growth_mb(self) -> float:
        """Memory's highest in the last quarter over its highest in the quarter after the first."""
        quarter = len(self.memory_mb) // 4
        return max(self.memory_mb[-quarter:]) - max(self.memory_mb[quarter : 2 * quarter])


def soak(
    url: str,
    texts: Texts,
    vocab_size: int,
    accesses: Sequence[Access],
    go_on: Callable[[int, float], bool],
    resets: float,
    naps: Naps,
    process: psutil.Process,
) -> Outcome:
    """One client a thread, each with its token, until `go_on(generations done, seconds)` says no.

    `process` is the server, whose memory is watched.
    """
    outcome, lock = Outcome(), threading.Lock()
    started = time.monotonic()

    def client(number: int) -> None:
        transport = Saboteur(url, number, resets, accesses[number])
        patient = RetryingTransport(transport, PATIENCE_S)
        prompts = list(texts)
        done = 0
        while go_on(done, time.monotonic() - started):
            prompt = prompts[(number + done) % len(prompts)]
            request = Request("soak", str(number), GREEDY, wire.EXACT, done, len(texts[prompt]))
            drafter = KnowingDrafter(prompt, texts[prompt], vocab_size, number * 100_000 + done, naps)
            done += 1
            try:
                trace = generate(prompt, request, drafter, patient)
            except Exception as error:  # of any kind: a client that dies silently would prove nothing
                with lock:
                    outcome.errors.append(f"client {number}: {type(error).__name__}: {error}")
                continue
            with lock:
                outcome.generations += 1
                outcome.misfortunes["sessions expired"] += drafter.slept
                outcome.tokens += len(trace.tokens)
                outcome.primes += len(trace.primes)
                outcome.round_ms += [entry.wait_ms for entry in trace.rounds]
                if trace.tokens != texts[prompt]:
                    outcome.mismatches.append(f"client {number}: {trace.tokens} instead of {texts[prompt]}")
        with lock:
            outcome.misfortunes += transport.done

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(accesses))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outcome.memory_mb.append(process.memory_info().rss / MB)
        threads[0].join(WATCH_S) if threads[0].is_alive() else time.sleep(WATCH_S / 10)
    return outcome


def plain_texts(url: str, access: Access, prompts: Sequence[tuple[int, ...]], tokens: int) -> Texts:
    """The server's own greedy texts, one token a round."""
    transport = HttpTransport(url, access=access)
    request = Request("plain", "p", GREEDY, wire.EXACT, 0, tokens)
    return {prompt: generate(prompt, request, NullDrafter(), transport).tokens for prompt in prompts}


def embedded_prompts(count: int) -> list[tuple[int, ...]]:
    """First questions of the embedded family's validation prompts, as its verifier reads them."""
    from hyco_export.cli.options import open_run
    from hyco_export.models.text.tokenizer import encode_prompt
    from hyco_export.models.verifier import load_tokenizer

    run = open_run(None, None)
    tokenizer = load_tokenizer(run.source("verifier", run.recipe.models.verifier))
    prompts = []
    for line in run.source("validation", run.recipe.data.validation).read_bytes().splitlines()[:count]:
        messages = msgspec.json.decode(line)["messages"]
        question = next(number for number, message in enumerate(messages, 1) if message["role"] == "user")
        prompts.append(tuple(encode_prompt(tokenizer, messages[:question])))
    return prompts


def show(outcome: Outcome, seconds: float) -> None:
    p50, p99 = np.percentile(outcome.round_ms, [50, 99])
    rows = {
        "generations": f"{outcome.generations:,}",
        "tokens": f"{outcome.tokens:,}",
        "rounds": f"{len(outcome.round_ms):,}",
        "sessions primed": f"{outcome.primes:,}",
        **{name: f"{count:,}" for name, count in sorted(outcome.misfortunes.items())},
        "texts that differ": f"{len(outcome.mismatches)}",
        "generations that failed": f"{len(outcome.errors)}",
        "round p50 / p99": f"{p50:.1f} / {p99:.1f} ms",
        "tokens per second": f"{outcome.tokens / seconds:.0f}",
        "server memory": f"{outcome.memory_mb[0]:.0f} MB at first, {outcome.memory_mb[-1]:.0f} MB at last, "
        f"{outcome.growth_mb():+.1f} MB from the second quarter to the last",
    }
    for name, value in rows.items():
        print(f"{name:26}{value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--resets", type=float, default=0.01)
    parser.add_argument("--expiries", type=float, default=0.01)
    options = parser.parse_args()
    tokens = [secrets.token_urlsafe(32) for _ in range(options.clients)]
    accesses = [Access(token) for token in tokens]
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "tokens"
        token_file.touch(mode=0o600)
        token_file.write_text("\n".join(tokens))
        command = [sys.executable, "-m", "hyco_export", "serve", "--port", "0", "--token-file", str(token_file)]
        command += ["--sessions", str(4 * options.clients), "--idle-s", str(IDLE_S), "--run", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as server:
            assert server.stdout is not None
            url = next(match[1] for line in server.stdout if (match := re.search(r"serving on (\S+)", line)))
            try:
                vocab_size = HttpTransport(url, access=accesses[0]).info().vocab_size
                texts = plain_texts(url, accesses[0], embedded_prompts(12), 48)
                started = time.monotonic()
                outcome = soak(
                    url, texts, vocab_size, accesses, lambda _, s: s < 60 * options.minutes, options.resets,
                    Naps(options.expiries, 1.5 * IDLE_S), psutil.Process(server.pid),
                )  # fmt: skip
                show(outcome, time.monotonic() - started)
                for line in (*outcome.mismatches, *outcome.errors)[:10]:
                    print(line)
            finally:
                server.terminate()
    assert not outcome.mismatches and not outcome.errors
    expired = outcome.misfortunes["sessions expired"]
    assert outcome.primes >= outcome.generations + expired, "a session outlived its time"
    assert outcome.growth_mb() < 32.0, "memory grew"


if __name__ == "__main__":
    main()
