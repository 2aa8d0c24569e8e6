"""The artifacts of a run that a device needs, read and checked against each other before anything is driven.

Knows the files of the `build-keepset`, `convert-head`, `convert-slm` and `compile` artifacts; opens no graph.
"""

from dataclasses import dataclass
from pathlib import Path

from hyco_export.core.artifact import Manifest, verify
from hyco_export.core.devicespec import HEAD_SPEC_FILE, SLM_SPEC_FILE, HeadSpec, SlmSpec, read_spec
from hyco_export.core.keepset import KeepSet, read_keepset
from hyco_export.core.layout import COMPILE, HEAD, KEEPSET, SLM, artifact_name
from hyco_export.core.recipe import Recipe
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.compatibility import Expected
from hyco_export.runtime.systems import find_system


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
        node_limit=recipe.drafting.budget,
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
