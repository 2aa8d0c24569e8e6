"""Judges a server by its hand-offs: each tensor against the golden values under every named hypothesis.

A hypothesis is taken when it explains the values, and clearly better than "all is right" does.

Legend: n rows, D values of a row, H the verifier's hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HandoffSpec, HiddenNorm
from hyco_export.core.ring import rotary_tables
from hyco_export.evaluate.diagnosis.finding import Fault, Finding
from hyco_export.evaluate.diagnosis.handoff_comparison import (
    KV_TENSORS,
    TENSORS,
    GoldenText,
    Part,
    Predict,
    explained_db,
    fitted_line,
    parts_of,
    window_finding,
)
from hyco_export.evaluate.diagnosis.server_probe import PRIME, ROUND, Call, Seen

RIGHT_DB = 25.0  # float32 gives equal integers; bfloat16 on another machine was never below 30 dB
UNIT_TOLERANCE = 0.1  # of a normed state's mean square: bfloat16 and the added epsilon move it by less
EXPLAINS_DB = 12.0  # of a hypothesis: a wrong one stays near 0
GAIN_DB = 6.0  # over "all is right"
SLOPE_TOLERANCE = 0.01  # thousands of values: rounding moves a slope by far less
OFFSET_TOLERANCE = 0.5  # steps of the encoding
SHIFTS = (-2, -1, 1, 2)
RESTART = "restart the server on this run folder's artifacts and recipe; if it stays, report it: the server is at fault"


@dataclass(frozen=True)
class Norm:
    """The verifier's final norm: weight [H], and what is added to the mean square."""

    weight: np.ndarray
    epsilon: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [n, H] normed."""
        squares = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(squares + self.epsilon) * self.weight)


@dataclass(frozen=True)
class HandoffReference:
    """What hand-offs are judged by: golden values of every text, the encodings that the graph reads, the layout."""

    golden: Sequence[GoldenText]
    encodings: Mapping[str, Encoding]
    spec: HandoffSpec
    inv_freq: Mapping[str, Sequence[float]]
    norm: Norm
    window: int  # of the verifier's sliding layers

    @property
    def side(self) -> HiddenNorm:
        """Where the golden h come from: after the norm, what is left without its weight has a mean square of 1."""
        usable = self.norm.weight != 0
        states = np.concatenate([text["h"] for text in self.golden])[:, usable] / self.norm.weight[usable]
        powers = np.mean(states.astype(np.float64) ** 2, axis=1)
        return "post" if float(np.median(np.abs(powers - 1.0))) < UNIT_TOLERANCE else "pre"


def handoff_findings(seen: Sequence[Seen], reference: HandoffReference) -> list[Finding]:
    """Faults of the server that these hand-offs show, PRIME's and those of rounds told apart."""
    window = window_finding(
        {name: parts_of(name, seen, reference.golden, reference.encodings[name]) for name in KV_TENSORS},
        reference.window,
    )
    if window is not None:
        return [window]
    by_call: dict[Call, list[Finding]] = {}
    for call in (PRIME, ROUND):
        chosen = [one for one in seen if one.call == call]
        by_call[call] = list(_tensor_findings(chosen, reference, "the server")) if chosen else []
    if by_call[ROUND] and not by_call[PRIME]:
        return list(
            _tensor_findings([one for one in seen if one.call == ROUND], reference, "the server's verify rounds")
        )
    return by_call[PRIME] or by_call[ROUND]


def _tensor_findings(seen: Sequence[Seen], reference: HandoffReference, where: str) -> Iterator[Finding]:
    verdicts = {
        name: _judge(name, parts_of(name, seen, reference.golden, reference.encodings[name]), reference)
        for name in TENSORS
    }
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    unrelated = [name for name, verdict in wrong.items() if verdict.fault == "verifier"]
    if "h" in unrelated and len([name for name in unrelated if name in KV_TENSORS]) >= 2:
        figures = ", ".join(f"{name} {wrong[name].figure}" for name in unrelated)
        seen_text = f"hand-offs have nothing in common with the golden ones ({figures})"
        hint = "serve the checkpoint of $.models.verifier; a server that names its digest may still have loaded another"
        yield Finding("verifier", where, seen_text, hint)
        return
    moved = [name for name, verdict in wrong.items() if verdict.fault == "K/V rows"]
    if moved:
        shifts = {wrong[name].figure for name in moved}
        yield Finding("K/V rows", where, f"rows of {', '.join(moved)} are {' or '.join(sorted(shifts))}", RESTART)
    for name, verdict in wrong.items():
        if name not in moved:
            yield _single(name, verdict, where, reference)


def _single(name: str, verdict: "_Verdict", where: str, reference: HandoffReference) -> Finding:
    """The finding of one tensor on its own."""
    if verdict.fault == "verifier":
        part = "e" if name == "e" else "h" if name == "h" else "K/V of a layer"
        return Finding(
            "hand-off", where, f"{name} is not the golden {part} at any position ({verdict.figure})", RESTART
        )
    if verdict.fault == "norm side":
        side, other = ("before", "after") if reference.side == "post" else ("after", "before")
        seen = f"h arrives from {side} the final norm ({verdict.figure}), the head was trained on h from {other} it"
        return Finding(
            "norm side", where, seen, "make the server's hidden_norm and the recipe's $.models.hidden_norm one"
        )
    return Finding(verdict.fault, where, f"{name} {verdict.figure}", RESTART)


@dataclass(frozen=True)
class _Verdict:
    fault: Fault
    figure: str


def _judge(name: str, parts: Sequence[Part], reference: HandoffReference) -> _Verdict | None:
    """None: as it should be."""
    if not parts:
        return None
    encoding = reference.encodings[name]
    right_db = explained_db(parts, Part.reference)
    line = fitted_line(parts)
    if right_db >= RIGHT_DB:
        return _scale_verdict(line.slope, line.offset, encoding) if line.db >= RIGHT_DB - GAIN_DB else None
    parts = [part for part in parts if explained_db([part], Part.reference) < RIGHT_DB]  # some sessions may be right
    right_db, line = explained_db(parts, Part.reference), fitted_line(parts)
    others = {hypothesis: explained_db(parts, predict) for hypothesis, predict in _hypotheses(name, reference)}
    if abs(line.slope) > 0:
        others[_Verdict("scale", _line_text(line.slope, line.offset, encoding))] = line.db
    best = max(others, key=lambda hypothesis: others[hypothesis])
    if others[best] >= max(EXPLAINS_DB, right_db + GAIN_DB):
        return _Verdict(best.fault, best.figure if best.fault != "norm side" else f"{others[best]:.0f} dB so explained")
    return _Verdict("verifier", f"{right_db:.0f} dB")


def _scale_verdict(slope: float, offset: float, encoding: Encoding) -> _Verdict | None:
    off = abs(slope - 1.0) > SLOPE_TOLERANCE or abs(offset) > OFFSET_TOLERANCE * encoding.scale
    return _Verdict("scale", _line_text(slope, offset, encoding)) if off else None


def _line_text(slope: float, offset: float, encoding: Encoding) -> str:
    steps = offset / encoding.scale
    text = f"arrives {slope:.4g} times as large as it should"
    return text if abs(steps) <= OFFSET_TOLERANCE else f"{text}, {steps:+.1f} steps off zero"


def _hypotheses(name: str, reference: HandoffReference) -> Iterator[tuple[_Verdict, Predict]]:
    """Every other explanation of one tensor."""
    fault: Fault = "K/V rows" if name in KV_TENSORS else "positions"
    for shift in SHIFTS:
        yield _Verdict(fault, f"those of {_distance(shift)}"), lambda part, shift=shift: part.reference(shift)  # type: ignore[misc]
    if name == "h":
        yield _Verdict("norm side", ""), _other_side(reference)
    if name.startswith("k."):
        layer_type = name.removeprefix("k.")
        for shift in SHIFTS:
            yield _Verdict("positions", f"is rotated for {_distance(shift)}"), _rotated(reference, layer_type, shift)


def _distance(shift: int) -> str:
    return f"{abs(shift)} position{'s' if abs(shift) > 1 else ''} {'later' if shift > 0 else 'earlier'}"


def _other_side(reference: HandoffReference) -> Predict:
    """h from the side of the final norm that head.json does not name."""

    def after(part: Part) -> tuple[np.ndarray, np.ndarray]:
        wanted, exists = part.reference()
        return reference.norm(wanted), exists

    def before(part: Part) -> tuple[np.ndarray, np.ndarray]:
        # the norm hides how long a state was: its direction is known, its length fits best where nothing is clipped
        wanted, exists = part.reference()
        weight = reference.norm.weight
        direction = np.divide(wanted, weight, out=np.zeros_like(wanted), where=weight != 0)
        projected = np.sum(part.live * direction * part.inside, axis=1)
        length = projected / np.maximum(np.sum(direction**2 * part.inside, axis=1), np.finfo(np.float32).tiny)
        return direction * length[:, None], exists

    return before if reference.side == "post" else after


def _rotated(reference: HandoffReference, layer_type: str, shift: int) -> Predict:
    """Keys of the right rows, rotated for another position."""
    heads, dim = reference.spec.kv[layer_type].heads, reference.spec.kv[layer_type].dim
    cos, sin = rotary_tables(np.array([shift]), reference.inv_freq[layer_type])

    def predict(part: Part) -> tuple[np.ndarray, np.ndarray]:
        wanted, exists = part.reference()
        keys = wanted.reshape(len(wanted), heads, dim)
        swapped = np.concatenate([keys[..., dim // 2 :], keys[..., : dim // 2]], axis=-1)
        return (keys * cos + swapped * sin).reshape(len(wanted), -1), exists

    return predict
