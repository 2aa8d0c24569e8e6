"""Connects a run folder with a server: checks that they belong together and reads the prompts as the verifier does.

`validate` and `bench` begin here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.artifact import COMPILE, HEAD, KEEPSET, SLM, Manifest, artifact_name, verify
from hyco_export.core.data.conversations import prompt_messages
from hyco_export.core.data.prompts import PROMPT_COUNT, prompt_named, require_enough
from hyco_export.core.data.prompts import read_prompts as read_prompt_set
from hyco_export.core.device_spec import HEAD_SPEC_FILE, SLM_SPEC_FILE, HeadSpec, SlmSpec, read_spec
from hyco_export.core.keepset import KeepSet, read_keepset
from hyco_export.core.recipe import Recipe
from hyco_export.device.client import HttpTransport
from hyco_export.device.interfaces import Transport
from hyco_export.device.systems import find_system
from hyco_export.errors import ArtifactError, ServerError
from hyco_export.protocol.wire import PROTOCOL_VERSION, Sampling, ServerInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SHOWN_DIGITS = 12  # of a digest in a message
OnStep = Callable[[str, int, int], None]  # label, done, total


class Expected(msgspec.Struct, frozen=True):
    """What the run's artifacts demand of a server."""

    verifier_digest: str
    tokenizer_digest: str
    vocab_size: int
    keepset_digest: str
    head_digest: str  # manifest key of the head artifact whose encodings the hand-off uses
    node_limit: int  # nodes of the largest tree that will be sent
    server_steps: int  # chain length of the server's own head, for the baseline
    rules: tuple[str, ...]


def mismatches(info: ServerInfo, expected: Expected) -> list[str]:
    """The differences in words; empty when the server fits."""
    return [*_digest_mismatches(info, expected), *_ability_mismatches(info, expected)]


def require_compatible(info: ServerInfo, expected: Expected, url: str) -> None:
    """Check, before the first prompt is sent, that the server serves this run.

    Raises:
        ServerError: names every mismatch.
    """
    found = mismatches(info, expected)
    if found:
        raise ServerError(
            f"the server at {url} does not belong to this run: " + "; ".join(found),
            "start it with the same recipe and run folder: hyco-export serve",
        )


def require_room(info: ServerInfo, prompt_id: str, prompt_length: int, max_new_tokens: int) -> None:
    """Check that the server would not refuse a prompt for its length.

    Raises:
        ServerError: more ids than it takes, or more positions with the answer than its verifier has.
    """
    hint = "shorten the prompt or ask for fewer tokens"
    if prompt_length > info.prompt_limit:
        raise ServerError(f"prompt {prompt_id} has {prompt_length} ids, the server takes {info.prompt_limit}", hint)
    positions = prompt_length + max_new_tokens
    if info.context_limit and positions > info.context_limit:
        raise ServerError(
            f"prompt {prompt_id} and its answer need {positions} positions, the server's verifier has "
            f"{info.context_limit}",
            hint,
        )


def require_same(info: ServerInfo, before: ServerInfo) -> None:
    """Check after an outage that the same server is back: figures of two servers must not be pooled. What it measured
    when it started (`rows_ms`) differs from start to start.

    Raises:
        ServerError: names what the server says otherwise than before.
    """
    changed = [
        f"{name} was {getattr(before, name)}, is {getattr(info, name)}"
        for name in ServerInfo.__struct_fields__
        if name != "rows_ms" and getattr(info, name) != getattr(before, name)
    ]
    if changed:
        raise ServerError(
            f"another server answers than at the start of the run: {'; '.join(changed)}",
            "run the command again, with one server from its start to its end",
        )


def _digest_mismatches(info: ServerInfo, expected: Expected) -> Iterator[str]:
    if info.version != PROTOCOL_VERSION:
        yield f"it speaks protocol version {info.version}, this side {PROTOCOL_VERSION}"
    pairs = (
        ("verifier checkpoint", info.verifier_digest, expected.verifier_digest),
        ("tokenizer", info.tokenizer_digest, expected.tokenizer_digest),
        ("keep set", info.keepset_digest, expected.keepset_digest),
        ("head artifact (its encodings)", info.head_digest, expected.head_digest),
    )
    for name, seen, wanted in pairs:
        if seen != wanted:
            yield f"{name} is {_short(seen)} there, {_short(wanted)} here"
    if info.vocab_size != expected.vocab_size:
        yield f"its vocabulary has {info.vocab_size:,} tokens, the artifacts' {expected.vocab_size:,}"


def _ability_mismatches(info: ServerInfo, expected: Expected) -> Iterator[str]:
    if info.node_limit < expected.node_limit:
        yield f"it verifies at most {info.node_limit} nodes a round, the recipe sends {expected.node_limit}"
    if info.server_steps < expected.server_steps:
        yield f"its own head drafts {info.server_steps} tokens, the baseline needs {expected.server_steps}"
    for rule in expected.rules:
        if rule not in info.rules:
            yield f"it does not know the acceptance rule {rule!r}"


def _short(digest: str) -> str:
    return f"{digest[:SHOWN_DIGITS]}…" if digest else "none"


@dataclass(frozen=True)
class Checkpoints:
    """The folders that a run's artifacts were made from."""

    verifier: Path
    head: Path
    slm: Path


@dataclass(frozen=True)
class RunArtifacts:
    """What the device side of a run consists of."""

    root: Path
    head: HeadSpec
    slm: SlmSpec
    keepset: KeepSet
    head_key: str  # manifest key of the head artifact: what the server must serve
    compiled_key: str  # of the compiled graphs, which names all they were built from


def open_artifacts(root: Path, target: str) -> RunArtifacts:
    """Read the run folder's device artifacts; every file is compared with its manifest.

    Raises:
        ArtifactError: one is missing, altered, or was built from another than the one that lies beside it.
    """
    manifests = {stage: verify(root / folder) for stage, folder in folders(target).items()}
    _require_one_run(manifests, root)
    head = read_spec(root / HEAD / HEAD_SPEC_FILE, HeadSpec)
    slm = read_spec(root / SLM / SLM_SPEC_FILE, SlmSpec)
    keepset = read_keepset(root / KEEPSET)
    for name, digest in ((HEAD, head.keepset_digest), (SLM, slm.keepset_digest)):
        if digest != keepset.digest:
            raise ArtifactError(
                f"{root / name} was converted for another keep set than {root / KEEPSET}",
                f"build it again: hyco-export {name}",
            )
    return RunArtifacts(root, head, slm, keepset, manifests[HEAD].key, manifests[COMPILE].key)


def folders(target: str) -> dict[str, str]:
    """Folder of every device artifact in a run, by stage."""
    return {KEEPSET: KEEPSET, HEAD: HEAD, SLM: SLM, COMPILE: artifact_name(COMPILE, target)}


def expected_server(artifacts: RunArtifacts, tokenizer_digest: str, recipe: Recipe) -> Expected:
    """What a server must say of itself to belong to this run."""
    return Expected(
        verifier_digest=artifacts.head.verifier_digest,
        tokenizer_digest=tokenizer_digest,
        vocab_size=artifacts.head.vocab_size,
        keepset_digest=artifacts.keepset.digest,
        head_digest=artifacts.head_key,
        node_limit=recipe.drafting.largest_tree,
        server_steps=recipe.head.steps,
        rules=tuple(
            sorted({find_system(name).rule for name in (*recipe.validation.systems, *recipe.validation.greedy_systems)})
        ),
    )


def _require_one_run(manifests: dict[str, Manifest], root: Path) -> None:
    """Each artifact must have been built from the others that lie here."""
    for stage, manifest in manifests.items():
        for need, key in manifest.inputs.items():
            if need in manifests and manifests[need].key != key:
                raise ArtifactError(
                    f"{root / stage} was built from another {need} than {root / need}",
                    f"build it again: hyco-export {stage}",
                )


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as the verifier reads it, chat template applied."""

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A run on this machine: its folder, recipe and opened artifacts, and where the recipe's references lie."""

    root: Path
    recipe: Recipe
    artifacts: RunArtifacts
    checkpoints: Checkpoints  # what the artifacts were made from; the verifier's has the tokenizer
    prompts: Path  # JSONL of conversations


@dataclass(frozen=True)
class Connection:
    """A server and a run that belong together."""

    transport: Transport
    info: ServerInfo
    artifacts: RunArtifacts
    tokenizer: "PreTrainedTokenizerFast"


def connect(subject: Subject, url: str, transport: Transport | None = None) -> Connection:
    """Ask the server what it is, and compare that with the run; by plain calls without a transport.

    Raises:
        ServerError: nobody answers at `url`, or a server that does not belong to this run.
    """
    transport = transport or HttpTransport(url)
    info = transport.info()

    from hyco_export.models.checkpoints import (
        tokenizer_digest,  # after the server has answered: they take seconds to import
    )
    from hyco_export.models.verifier import load_tokenizer

    tokenizer = load_tokenizer(subject.checkpoints.verifier)
    expected = expected_server(subject.artifacts, tokenizer_digest(subject.checkpoints.verifier), subject.recipe)
    require_compatible(info, expected, url)
    return Connection(transport, info, subject.artifacts, tokenizer)


def wire_sampling(recipe: Recipe) -> Sampling:
    """The recipe's sampling as it travels."""
    return Sampling(recipe.sampling.temperature, recipe.sampling.top_k, recipe.sampling.top_p)


def read_prompts(
    path: Path, tokenizer: "PreTrainedTokenizerFast", count: int, asked_by: str = PROMPT_COUNT
) -> list[Prompt]:
    """The first `count` prompts of the validation set through the chat template; `asked_by` is the field or option that
    says how many.

    Raises:
        RecipeError: the set cannot be used, has fewer, or one that the chat template refuses.
    """
    from hyco_export.models.text.tokenizer import encode_prompt

    found = read_prompt_set(path, "$.data.validation")
    require_enough(len(found), count, path, asked_by)
    prompts = []
    for number, conversation in enumerate(found[:count], 1):
        messages = [{"role": m.role, "content": m.content} for m in prompt_messages(conversation)]
        with prompt_named(f"$.data.validation: {path}", number, conversation):
            prompts.append(Prompt(conversation.id, tuple(encode_prompt(tokenizer, messages))))
    return prompts
