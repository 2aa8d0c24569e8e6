"""Figures of the paper that its traces alone give, beside those of `metrics.py`; a row for each system of a folder.

Shares are of VERIFY rounds. Rounds that the token cap or a stop token cut short are counted in them, as everywhere.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.metrics import SOURCE_NAMES, chain_acceptance, chain_rows, taken, timed_steps
from hyco_export.evaluate.quality.evaluation_folder import NOT_TRACES
from hyco_export.evaluate.traces import PLAN_FILE, read_traces
from hyco_export.protocol.trace import GenerationTrace, RoundTrace
from hyco_export.protocol.tree import Source

P90 = 9  # of the nine cuts between tenths, the last


class Row(msgspec.Struct, frozen=True):
    """A system of a folder. `cumulative[k - 1]`: share of rounds whose first k chain tokens were all taken.

    `extended`: rounds whose whole chain was taken and that committed a drafted token below it, of `whole_chains`.
    """

    folder: str
    system: str
    kept_tokens: int  # of the keep set; 0: the folder does not say
    answers: int
    rounds: int
    mat: float
    server_ms_per_token: float
    cumulative: tuple[float, ...]
    whole_chains: int
    extended: int
    threshold_only: dict[str, int]  # tokens that only the threshold took, by source
    first_token_mean_ms: float | None
    first_token_p50_ms: float | None
    first_token_p90_ms: float | None

    @property
    def extended_share(self) -> float:
        return self.extended / self.rounds if self.rounds else float("nan")


def folder_rows(folder: Path) -> list[Row]:
    """The systems of a folder of `bench`, `evaluate` or `validate --traces`; in the plan's order, if there is one.

    Raises:
        HycoError: no traces there, or a damaged file.
    """
    plan = _plan(folder)
    found = sorted(path.stem for path in folder.glob("*.jsonl") if path.name not in NOT_TRACES)
    names = plan.systems or tuple(found)
    files = [path for name in names if (path := folder / f"{name}.jsonl").exists()]
    if not files:
        raise HycoError(f"{folder} holds no traces", "give a folder of hyco-export bench, or evaluate")
    return [table_row(str(folder), path.stem, read_traces(path), plan.kept_tokens) for path in files]


class _Plan(msgspec.Struct, frozen=True):
    """What a folder's plan says that is needed here."""

    systems: tuple[str, ...] = ()
    kept_tokens: int = 0


def _plan(folder: Path) -> _Plan:
    path = folder / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Plan) if path.exists() else _Plan()
    except msgspec.DecodeError as error:
        raise HycoError(f"{path} cannot be read: {error}", "give another folder") from error


def table_row(folder: str, system: str, traces: Sequence[GenerationTrace], kept_tokens: int) -> Row:
    """The figures of one system."""
    rounds = [record for trace in traces for record in trace.rounds]
    timed = timed_steps(traces)
    server_ms = sum(call.server_ms for call in timed.primes) + sum(call.server_ms for call in timed.rounds)
    depths = chain_acceptance(rounds)
    waits = timed.first_token_ms
    return Row(
        folder=folder,
        system=system,
        kept_tokens=kept_tokens,
        answers=len(traces),
        rounds=len(rounds),
        mat=sum(len(record.tokens) for record in rounds) / len(rounds) if rounds else float("nan"),
        server_ms_per_token=server_ms / timed.tokens if timed.tokens else float("nan"),
        cumulative=tuple(depth.accepted / depths[0].trials for depth in depths),
        whole_chains=sum(map(_whole_chain, rounds)),
        extended=sum(map(_extended, rounds)),
        threshold_only=threshold_only_by_source(rounds),
        first_token_mean_ms=statistics.fmean(waits) if waits else None,
        first_token_p50_ms=statistics.median(waits) if waits else None,
        first_token_p90_ms=percentile_90(waits) if waits else None,
    )


def percentile_90(values: Sequence[float]) -> float:
    """The 90th percentile, linear between the two values that enclose it."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=P90 + 1, method="inclusive")[P90 - 1]


def _whole_chain(record: RoundTrace) -> bool:
    chain = chain_rows(record)
    return bool(chain) and set(chain) <= set(taken(record))


def _extended(record: RoundTrace) -> bool:
    return _whole_chain(record) and len(taken(record)) > len(chain_rows(record))


def threshold_only_by_source(rounds: Sequence[RoundTrace]) -> dict[str, int]:
    """Tokens that no draw, only the threshold took, by who proposed them."""
    counts = dict.fromkeys(SOURCE_NAMES.values(), 0)
    for record in rounds:
        for row, drawn in zip(taken(record), record.drawn, strict=False):
            if not drawn:
                source = Source.CHAIN if record.drafted else record.tree.sources[row]
                counts[SOURCE_NAMES[Source(source)]] += 1
    return counts
