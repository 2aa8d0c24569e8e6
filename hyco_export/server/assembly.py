"""Builds a verifier engine from a recipe's checkpoints and a run folder's artifacts, after checks that they belong
together, which come before any model is loaded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from hyco_export import __version__
from hyco_export.core.artifact import HEAD, KEEPSET, MANIFEST_NAME, verify
from hyco_export.core.device_spec import HEAD_SPEC_FILE, HeadSpec, read_spec
from hyco_export.core.keepset import KeepSet, read_keepset, require_keepset
from hyco_export.core.recipe import Recipe
from hyco_export.errors import ArtifactError, ServerError
from hyco_export.models.checkpoints import checkpoint_digest, checkpoint_folder, tokenizer_digest
from hyco_export.models.families.checks import check_family
from hyco_export.models.generation_rules import suppressed_ids
from hyco_export.models.process_group import ProcessGroup, load_sharded_verifier
from hyco_export.models.verifier import load_config, load_head, load_verifier, stop_ids
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import RULES
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Facts, Limits, ServeOptions
from hyco_export.server.engine import Engine
from hyco_export.server.interfaces import Clock, ProcessCpuClock, ThreadCpuClock
from hyco_export.server.passes.cache import HandoffEncoder
from hyco_export.server.passes.distributed import Followers, LeadingVerifier
from hyco_export.server.passes.head_drafter import ChainDrafter
from hyco_export.server.passes.row_times import USUAL_CONTEXT, Asked, measure_rows
from hyco_export.server.passes.verifier import Verifier

WARM_UP_ROWS, WARM_UP_NODES = 40, 32  # of a prompt, and of the paper's tree
CACHE_SHARE = 0.5  # of the free memory, for K/V; the rest is for activations and other programs


class CudaClock:
    """Times by CUDA events on the current stream of `device`, from the first kernel's launch to the last one's end."""

    name = "cuda-events"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> torch.cuda.Event:
        return self._record()

    def elapsed_ms(self, mark: torch.cuda.Event) -> float:
        end = self._record()
        end.synchronize()
        return float(mark.elapsed_time(end))

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device, threads: int) -> Clock:
    """The clock that counts all work of a model on this device, where torch computes with this many CPU threads."""
    if device.type == "cuda":
        return CudaClock(device)
    return ThreadCpuClock() if threads == 1 else ProcessCpuClock()


class HeadArtifact(msgspec.Struct, frozen=True):
    """The converted head whose encodings a hand-off uses."""

    key: str  # of its manifest
    spec: HeadSpec


def open_server_engine(
    recipe: Recipe,
    artifacts: Path | None = None,
    device: str = "cpu",
    recipe_folder: Path | None = None,
    options: ServeOptions | None = None,
    followers: Followers | None = None,
) -> tuple[Engine, wire.ServerInfo]:
    """The engine of a recipe's verifier, and what it says of itself.

    Hand-offs need a run folder that holds a converted head; the server's own head drafts without one.

    Args:
        artifacts: run folder.
        device: torch device, e.g. `cpu`, `cuda`, `cuda:1`.
        recipe_folder: where the recipe's relative paths start; None for the embedded recipe.
        options: sessions, batching and memory.
        followers: processes that hold shards of the verifier beside this one; each follows with an `open_shard`.

    Raises:
        CheckpointError: a checkpoint is missing, unreadable or does not belong with the others.
        ArtifactError: the head artifact or the keep set is damaged, or they are of others; before a model is loaded.
        ServerError: the device is not there.
    """
    options = options or ServeOptions()
    place = _own_device(device, followers.group, options) if followers else _device(device)
    folder = checkpoint_folder(recipe.models.verifier, recipe_folder)
    head_folder = checkpoint_folder(recipe.models.require_head(), recipe_folder)
    check_family(load_config(folder), load_config(head_folder))
    digest = checkpoint_digest(folder)
    artifact = read_head_artifact(artifacts, digest) if artifacts else None
    keepset = _keepset(artifacts, artifact)
    precision = recipe.models.verifier.dtype  # the server's head reads the verifier's states and K/V: one precision
    model, heads = (
        load_sharded_verifier(folder, precision, followers.group)
        if followers
        else (load_verifier(folder, precision, device), None)
    )
    head = load_head(head_folder, precision, str(place))
    facts = _facts(model, artifact, recipe.head.steps, options.context_limit, bool(artifact and keepset))
    processes = options.servers * (followers.group.size if followers and place.type == "cpu" else 1)
    limits = _limits(options, facts, free_bytes(place) // processes)
    drafter = partial(ChainDrafter, head, compiled=options.compiled, suppressed=suppressed_ids(model))
    verifier = (partial(LeadingVerifier, followers) if followers else Verifier)(
        model,
        drafter(),
        HandoffEncoder(artifact.spec.handoff) if artifact else None,
        _restricted(drafter, artifact, keepset, place),
        prefill_rows=options.batching.prefill_rows,
        node_limit=limits.node_limit,
        compiled=options.compiled,
        heads=heads,
    )
    if options.compiled:
        warm_up(verifier, recipe.head.steps)
    clock = clock_for(place, torch.get_num_threads())
    engine = Engine(verifier.open, facts, limits, clock, models=verifier, batching=options.batching)
    keepset_digest = artifact.spec.keepset_digest if artifact else (keepset.digest if keepset else "")
    info = describe(engine, digest, tokenizer_digest(folder), keepset_digest)
    return engine, _with_row_times(info, recipe, verifier, clock) if options.row_times else info


def _with_row_times(info: wire.ServerInfo, recipe: Recipe, verifier: Verifier, clock: Clock) -> wire.ServerInfo:
    """What a pass takes by its rows, judged as the recipe's devices will ask for it."""
    own = recipe.sampling
    sampling = wire.Sampling(own.temperature, own.top_k, own.top_p)
    asked = Asked(info.vocab_size, info.node_limit, min(USUAL_CONTEXT, info.prompt_limit), sampling)
    return msgspec.structs.replace(info, rows_ms=measure_rows(verifier, verifier.open, clock, asked))


def _restricted(
    drafter: Callable[..., ChainDrafter], artifact: HeadArtifact | None, keepset: KeepSet | None, device: torch.device
) -> ChainDrafter | None:
    """The server's head over the artifact's keep set and window, as the device's head would draft."""
    if artifact is None or keepset is None:
        return None
    return drafter(torch.from_numpy(keepset.ids.astype(np.int64)).to(device), artifact.spec.handoff.window)


def _limits(options: ServeOptions, facts: Facts, memory_bytes: int) -> Limits:
    """What a caller gets at most; `memory_bytes`: this server's part of what is free."""
    usual = Limits()
    return Limits(
        sessions=options.sessions or usual.sessions,
        idle_s=options.idle_s or usual.idle_s,
        prompt_limit=min(usual.prompt_limit, facts.context_limit - 1),
        cache_bytes=options.cache_bytes or int(CACHE_SHARE * memory_bytes),
    )


def open_shard(
    recipe: Recipe,
    group: ProcessGroup,
    device: str = "cpu",
    recipe_folder: Path | None = None,
    options: ServeOptions | None = None,
) -> Verifier:
    """This process's shard of the recipe's verifier, to follow the engine that the main process opens.

    Raises:
        CheckpointError: the verifier's checkpoint is missing or unreadable.
        ServerError: the device is not there, or an option that shards do not have.
    """
    options = options or ServeOptions()
    _own_device(device, group, options)
    folder = checkpoint_folder(recipe.models.verifier, recipe_folder)
    model, heads = load_sharded_verifier(folder, recipe.models.verifier.dtype, group)
    rows = options.batching.prefill_rows
    return Verifier(model, prefill_rows=rows, node_limit=Limits().node_limit, heads=heads)


def warm_up(verifier: Verifier, steps: int) -> None:
    """Passes of every kind, so that what is compiled at a first pass is compiled before a server is ready."""
    session = verifier.open()
    session.reserve(WARM_UP_ROWS + 1)
    session.prime(np.zeros(WARM_UP_ROWS, np.int64))
    session.draft(0, steps)
    for nodes in (0, WARM_UP_NODES):
        session.verify(0, np.arange(nodes), np.full(nodes, ROOT))
    session.close()


def describe(engine: Engine, verifier_digest: str, tokenizer: str, keepset_digest: str) -> wire.ServerInfo:
    """What a server with this engine says of itself."""
    facts, limits = engine.facts, engine.limits
    return wire.ServerInfo(
        version=wire.PROTOCOL_VERSION,
        server=f"hyco-export {__version__}",
        verifier_digest=verifier_digest,
        tokenizer_digest=tokenizer,
        vocab_size=facts.vocab_size,
        stop_ids=sorted(facts.stop_ids),
        head_digest=facts.head_digest,
        keepset_digest=keepset_digest,
        node_limit=limits.node_limit,
        prompt_limit=limits.prompt_limit,
        server_steps=facts.server_steps,
        rules=list(RULES),
        clock=engine.clock.name,
        context_limit=facts.context_limit,
    )


def read_head_artifact(run: Path, verifier_digest: str) -> HeadArtifact | None:
    """The run folder's converted head; None when it has none.

    Raises:
        ArtifactError: it is damaged, or was made for another verifier.
    """
    folder = run / HEAD
    if not (folder / MANIFEST_NAME).is_file():
        return None
    manifest = verify(folder)
    spec = read_spec(folder / HEAD_SPEC_FILE, HeadSpec)
    if spec.verifier_digest != verifier_digest:
        raise ArtifactError(
            f"{folder} was made for verifier {spec.verifier_digest[:12]}, the recipe's is {verifier_digest[:12]}",
            "give the run folder of this recipe, or build it again: hyco-export run",
        )
    return HeadArtifact(manifest.key, spec)


def _keepset(run: Path | None, artifact: HeadArtifact | None) -> KeepSet | None:
    """The run folder's keep set; None when it has none.

    Raises:
        ArtifactError: it is damaged, or the head was converted with another one.
    """
    if run is None or not (run / KEEPSET / MANIFEST_NAME).is_file():
        return None
    verify(run / KEEPSET)
    keepset = read_keepset(run / KEEPSET)
    if artifact is not None:
        require_keepset(HEAD, artifact.spec.keepset_digest, keepset)
    return keepset


def free_bytes(device: torch.device) -> int:
    """Memory that is free where the sessions' K/V will lie."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _facts(
    model: PreTrainedModel, artifact: HeadArtifact | None, server_steps: int, context_limit: int | None, restricts: bool
) -> Facts:
    config = model.config.get_text_config()
    return Facts(
        vocab_size=config.vocab_size,
        stop_ids=frozenset(stop_ids(model)),
        context_limit=context_limit or config.max_position_embeddings,
        head_digest=artifact.key if artifact else "",
        handoff_window=artifact.spec.handoff.window if artifact else 0,
        server_steps=server_steps,
        restricts=restricts,
    )


def _own_device(name: str, group: ProcessGroup, options: ServeOptions) -> torch.device:
    """Where this process of a sharded verifier computes; `name` is what the user asked for.

    Raises:
        ServerError: not what the launch gives each process, or an option that shards do not have.
    """
    if name != group.device.type:
        others = ", or hide the GPUs: CUDA_VISIBLE_DEVICES=" if name == "cpu" else ""
        raise ServerError(
            f"--device {name}, but the processes of this launch compute on {group.device.type}",
            f"give --device {group.device.type}{others}",
        )
    if options.compiled:
        raise ServerError("--compile: the layers of a sharded verifier are not compiled", "leave it out")
    return group.device


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ServerError(f"{name!r} is not a torch device", "use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ServerError(f"the verifier does not run on device {name}", "use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ServerError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs", "use cpu")
    return device
