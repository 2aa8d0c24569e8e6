"""Synthetic traces: rounds whose outcome is written down by hand."""

from hyco_export.protocol.trace import GenerationTrace, LocalTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.tree import Source, Tree
from hyco_export.protocol.wire import Traffic

CHAIN, RUNNER_UP, SLM = Source.CHAIN, Source.RUNNER_UP, Source.SLM

HYBRID_TREE = Tree(
    tokens=(10, 11, 12, 20, 21, 30, 31),
    parents=(-1, 0, 1, -1, 0, 3, 2),  # chain 0-1-2, runner-ups 3 (depth 1) and 4 (depth 2), SLM leaves 5 and 6
    log_probs=(-0.4, -0.8, -1.2, -0.8, -1.2, -1.9, -2.0),
    sources=(CHAIN, CHAIN, CHAIN, RUNNER_UP, RUNNER_UP, SLM, SLM),
)
EMPTY = Tree((), ())


def round_trace(accepted=(), tokens=None, drawn=None, tree=HYBRID_TREE, drafted=0, finished="", number=1, **fields):
    """A round of `tree` whose bonus is token 99."""
    committed = tuple(tree.tokens[row] for row in accepted) if not drafted else tuple(50 + row for row in accepted)
    defaults = {
        "start_ms": 10.0 * number,
        "length": 5,
        "head_ms": 1.0,
        "slm_ms": 2.0,
        "draft_ms": 4.0,
        "wait_ms": 6.0,
        "commit_ms": 0.5,
        "server_ms": 3.0,
        "traffic": Traffic(60, 400, 260, 700),
    }
    return RoundTrace(
        round=number,
        tree=EMPTY if drafted else tree,
        accepted=tuple(accepted),
        drawn=tuple(drawn) if drawn is not None else (True,) * len(accepted),
        tokens=tuple(tokens) if tokens is not None else (*committed, 99),
        finished=finished,
        drafted=drafted,
        **{**defaults, **fields},
    )


def prime_trace(continue_from=0, server_ms=7.0, lost_ms=None):
    traffic = Traffic(40, 9000, 240, 9300)
    return PrimeTrace(0.0, 4 + continue_from, continue_from, 1, "", 9.0, 5.0, server_ms, traffic, lost_ms)


def local_trace(tokens, draft_ms=2.0):
    """Tokens that the device kept, of a chain of as many."""
    chain = Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (-0.1,) * len(tokens), (SLM,) * len(tokens))
    return LocalTrace(1.0, 5, chain, tuple(range(len(tokens))), tuple(tokens), "", 0.0, 1.5, draft_ms)


def generation(*rounds, system="hyco", prompt_id="p1", primes=None, total_ms=100.0, first_token_ms=20.0, locals=()):
    primes = primes if primes is not None else (prime_trace(),)
    tokens = (1,) * len(primes) + tuple(token for record in (*locals, *rounds) for token in record.tokens)
    finished = (rounds[-1].finished if rounds else "") or "length"
    return GenerationTrace(
        system, prompt_id, 7, 4, tokens, finished, total_ms, first_token_ms, primes, rounds, locals=locals
    )
