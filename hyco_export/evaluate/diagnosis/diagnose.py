"""Names what is wrong with a server, a device or an artifact, before acceptance is measured and found to be low.

The order: files against what they were made from, the server's hand-offs at golden positions, then drafts. Each kind of
evidence is a file of `evaluate.diagnosis`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hyco_export.core.artifact import CAPTURE, FINAL_NORM_FILE, HEAD, SLM
from hyco_export.core.device_spec import HEAD_GRAPH, HEAD_SPEC_FILE, HeadSpec, read_spec
from hyco_export.core.golden import Golden, acceptance_by_depth, golden_text_file, read_golden
from hyco_export.core.recipe import Recipe
from hyco_export.core.token_bridge import BRIDGE_FILE, read_bridge
from hyco_export.device.interfaces import Transport
from hyco_export.evaluate.backend_parity import INTEGER
from hyco_export.evaluate.connect import Checkpoints, OnStep, RunArtifacts
from hyco_export.evaluate.diagnosis import drafts, head_weights, slm_weights, specs
from hyco_export.evaluate.diagnosis.distributions import distribution_findings
from hyco_export.evaluate.diagnosis.finding import Diagnosis, Finding, merged
from hyco_export.evaluate.diagnosis.handoff import HandoffReference, Norm, handoff_findings
from hyco_export.evaluate.diagnosis.handoff_comparison import GoldenText
from hyco_export.evaluate.diagnosis.server_probe import Probed, probe, server_head_findings
from hyco_export.models.capture import load_capture
from hyco_export.models.head.unroll import load_norm
from hyco_export.protocol.wire import ServerInfo

LABEL, STEPS = "diagnosis", 3  # files, hand-offs, drafts: one bar that fills
LEAST_ACCEPTED = 0.85  # of the expected tokens a round: integers and float differ at one root in thirty


@dataclass(frozen=True)
class GoldenRun:
    """A run's golden positions: their texts as ids, and the hand-off at every position of them."""

    golden: Golden
    ids: Sequence[Sequence[int]]
    texts: Sequence[GoldenText]


def diagnose(
    artifacts: RunArtifacts,
    recipe: Recipe,
    checkpoints: Checkpoints,
    tokenizer: "PreTrainedTokenizerFast",
    transport: Transport,
    info: ServerInfo,
    on_step: OnStep,
) -> Diagnosis:
    """Every finding about a server and a run's artifacts on this machine.

    Raises:
        ServerError, ProtocolError: the server cannot be reached, or refuses a call.
        ArtifactError, CheckpointError: a file is missing or damaged.
    """
    run = open_golden(artifacts.root)
    reference = open_reference(artifacts.root, artifacts.head, run)
    findings = list(file_findings(artifacts, recipe, checkpoints, tokenizer, run, reference))
    on_step(LABEL, 1, STEPS)
    probed = probe(run.golden, run.ids, transport, artifacts.head.handoff, info.head_digest)
    blamed = {finding.fault for finding in findings}
    served = [finding for finding in server_findings(probed, reference, run) if finding.fault not in blamed]
    if not served:
        served += [*distribution_findings(run.golden.trees, transport, info), *_own_head_findings(run, transport, info)]
    on_step(LABEL, 2, STEPS)
    findings += served
    if not findings:  # wrong files or hand-offs explain wrong drafts
        findings += _draft_findings(artifacts, recipe, run, reference)
    lengths = [] if probed.malformed else drafts.live_acceptance(
        probed.seen, run.ids, artifacts, INTEGER, recipe.target, run.golden.steps
    )  # fmt: skip
    if not findings:
        findings += _acceptance_findings(run.golden, lengths)
    findings += published_head_findings(run.golden, recipe)
    on_step(LABEL, 3, STEPS)
    return Diagnosis(
        positions=run.golden.root_count,
        expected_acceptance=run.golden.chain_acceptance,
        acceptance=acceptance_by_depth(lengths, run.golden.steps) if lengths else (),
        findings=merged(findings),
        notes=_notes(run, probed),
    )


def diagnose_server(root: Path, transport: Transport, info: ServerInfo) -> Diagnosis:
    """The part that concerns a server alone: what `serve` asks of itself before it is ready.

    Raises:
        ServerError: the server cannot be reached.
        ArtifactError: the run folder lacks golden positions or what belongs to them.
    """
    run, head = open_golden(root), read_spec(root / HEAD / HEAD_SPEC_FILE, HeadSpec)
    probed = probe(run.golden, run.ids, transport, head.handoff, info.head_digest)
    findings = list(server_findings(probed, open_reference(root, head, run), run))
    if not findings:
        findings += [
            *distribution_findings(run.golden.trees, transport, info),
            *_own_head_findings(run, transport, info),
        ]
    return Diagnosis(run.golden.root_count, run.golden.chain_acceptance, (), merged(findings), _notes(run, probed))


def _own_head_findings(run: GoldenRun, transport: Transport, info: ServerInfo) -> list[Finding]:
    """Of servers that draft themselves."""
    if info.server_steps < run.golden.steps:
        return []
    return server_head_findings(run.golden, run.ids, transport)


def open_golden(root: Path) -> GoldenRun:
    """The golden positions of a run folder.

    Raises:
        ArtifactError: missing or damaged.
    """
    import torch

    golden = read_golden(root / HEAD)
    files = [root / HEAD / golden_text_file(number) for number in range(len(golden.texts))]
    captures = [load_capture(path, torch.float32) for path in files]
    texts: list[GoldenText] = [
        {name: values.flatten(1).numpy() for name, values in capture.handoff_tensors().items()} for capture in captures
    ]
    return GoldenRun(golden, [capture.ids.tolist() for capture in captures], texts)


def open_reference(root: Path, head: HeadSpec, run: GoldenRun) -> HandoffReference:
    """What hand-offs are judged by: real golden values, and the encodings that stand in the graph itself.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    norm = load_norm(root / CAPTURE / FINAL_NORM_FILE)
    graph = specs.read_graph(root, HEAD, HEAD_GRAPH)
    return HandoffReference(
        golden=run.texts,
        encodings={name: encoding for name in head.handoff.encodings if (encoding := graph.input(name).encoding)},
        spec=head.handoff,
        inv_freq=head.inv_freq,
        norm=Norm(norm.weight.numpy(), norm.epsilon),
        window=run.golden.window,
    )


def server_findings(probed: Probed, reference: HandoffReference, run: GoldenRun) -> Iterator[Finding]:
    """What the server's hand-offs and texts show."""
    found = handoff_findings(probed.seen, reference)
    yield from found
    if probed.malformed and not found:
        yield Finding("hand-off", "the server", probed.malformed[0], "serve with the release that built the artifacts")
    sessions = len(run.golden.sessions)
    if not found and len(probed.departures) * 2 > sessions:
        seen = f"hand-offs are right, but the greedy text is another in {len(probed.departures)} of {sessions} sessions"
        hint = (
            "serve the checkpoint of $.models.verifier: its output layer is another, or positions in a tree are wrong"
        )
        yield Finding("verifier", "the server's output", f"{seen} (first: {probed.departures[0]})", hint)


def file_findings(
    artifacts: RunArtifacts,
    recipe: Recipe,
    checkpoints: Checkpoints,
    tokenizer: "PreTrainedTokenizerFast",
    run: GoldenRun,
    reference: HandoffReference,
) -> Iterator[Finding]:
    """Tokenizer, specs and weights against what they come from."""
    root, models = artifacts.root, recipe.models
    path = root / SLM / BRIDGE_FILE
    bridge = read_bridge(path) if path.exists() else None
    yield from specs.tokenizer_findings(run.golden, tokenizer, None if bridge else checkpoints.slm)
    yield from specs.interface_findings(root, artifacts.head, artifacts.slm, recipe.target)
    yield from specs.head_shape_findings(root, artifacts.head, checkpoints.head)
    yield from specs.slm_shape_findings(root, artifacts.slm, checkpoints.slm)
    kept = bridge.drafter_ids if bridge else artifacts.keepset.ids
    origins = [
        *head_weights.origin_findings(root, checkpoints.head, models.require_head().dtype),
        *head_weights.table_findings(root, checkpoints.verifier, models.verifier.dtype, artifacts.keepset),
    ]
    yield from origins
    for finding in head_weights.graph_findings(root, artifacts.head, artifacts.keepset):
        if not origins or finding.fault in ("keep set", "norm side"):  # others follow from what the graph is made of
            yield finding
    yield from slm_weights.slm_findings(root, checkpoints.slm, kept)
    if reference.side != models.hidden_norm:
        seen = f"captured h come from the side {reference.side}, $.models.hidden_norm says {models.hidden_norm}"
        yield Finding("norm side", CAPTURE, seen, "capture again: hyco-export capture")


def _draft_findings(
    artifacts: RunArtifacts, recipe: Recipe, run: GoldenRun, reference: HandoffReference
) -> list[Finding]:
    """Drafts from golden hand-offs."""

    def feeds_of(candidate: RunArtifacts) -> list[drafts.GoldenFeeds]:
        return drafts.golden_feeds(run.golden, run.texts, run.ids, reference.encodings, candidate)

    network = drafts.network_findings(feeds_of, artifacts)
    return network or list(drafts.backend_findings(feeds_of(artifacts), artifacts, recipe.target))


def _acceptance_findings(golden: Golden, lengths: Sequence[int]) -> Iterator[Finding]:
    """With no other finding: are drafts accepted as often as the artifact says?"""
    expected = sum(golden.chain_acceptance)
    seen = sum(lengths) / max(1, len(lengths))
    if lengths and seen < LEAST_ACCEPTED * expected:
        figures = f"{seen:.2f} chain tokens a round are taken at the golden positions, the manifest says {expected:.2f}"
        hint = "no known cause was found: compare release and files of both sides with those that built the artifacts"
        yield Finding("acceptance", "the device's drafts", figures, hint)


def published_head_findings(golden: Golden, recipe: Recipe) -> Iterator[Finding]:
    """Does the verifier accept drafts of the published head? If not, the head belongs to another verifier."""
    limit = recipe.validation.gates.min_head_tokens
    if golden.root_count and golden.server_accepted_mean < limit:
        seen = f"the verifier takes {golden.server_accepted_mean:.2f} tokens a round of the published head's chain"
        hint = "give the head that was published for this verifier; created checkpoints: set the gate to 0"
        yield Finding("head", "$.models.head", f"{seen}, $.validation.gates.min_head_tokens is {limit:g}", hint)


def _notes(run: GoldenRun, probed: Probed) -> tuple[str, ...]:
    """What could not be checked, and why."""
    lines = []
    if not run.golden.root_count:
        lines.append("No captured validation text is long enough for a golden position: the server was not compared.")
    if not run.golden.trees:
        lines.append("No captured validation answer is long enough for a golden tree: probabilities were not compared.")
    longest = max((one.root for one in probed.seen), default=0)
    if longest < run.golden.window + 4:
        lines.append(
            f"No golden text goes beyond the verifier's sliding window of {run.golden.window} positions by enough: "
            "its edge was not tested on the server."
        )
    if probed.departures:
        lines.append(f"The server's greedy text left the captured one in {len(probed.departures)} golden sessions.")
    return tuple(lines)
