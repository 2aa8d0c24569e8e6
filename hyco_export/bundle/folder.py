"""Builds a bundle's folder from a run's artifacts: whole or not at all, and again from where a killed build was.

Everything is written into a folder beside the wanted one; `bundle.json` comes last, with the hash of every file, and
then the folder is renamed. A folder that is no bundle is never replaced.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

import hyco_export
from hyco_export.bundle.archive import write_driver
from hyco_export.bundle.document import LISTS, write_document
from hyco_export.bundle.goldens import emulate, record_goldens, with_tolerances
from hyco_export.bundle.graph_names import copy_named
from hyco_export.bundle.raw_files import input_list
from hyco_export.bundle.spec import (
    BUNDLE_FILE,
    FORMAT,
    GRAPHS,
    Bundle,
    Chat,
    Drafting,
    Graph,
    Server,
    Tolerance,
    Toolchain,
    open_bundle,
    read_bundle,
)
from hyco_export.bundle.tensors import described
from hyco_export.core.artifact import (
    COMPILE,
    DEBRIS,
    HEAD,
    KEEPSET,
    SLM,
    SLM_SINK_FILE,
    WORK_FOLDER,
    FileRecord,
    Manifest,
    artifact_name,
    content_digest,
    file_digest,
    read_manifest,
)
from hyco_export.core.device_profile import graphs_key
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_PREFILL_GRAPH, SLM_TREE_GRAPH, GraphSession, GraphSpec
from hyco_export.core.files import folder_lock, storage_errors, write_json
from hyco_export.core.keepset import KEEPSET_FILE
from hyco_export.core.recipe import Recipe
from hyco_export.core.tables import TABLES_FILE
from hyco_export.core.targets import find_target
from hyco_export.core.token_bridge import BRIDGE_FILE
from hyco_export.device.drafters.hybrid import TreeRule
from hyco_export.device.systems import Settings, find_system, make_acceptance
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import Subject, wire_sampling
from hyco_export.evaluate.runs import run_settings

PACKAGE = Path(__file__).parent
CONSUMER = "consumer.py"
TABLES, TOKENIZER, INTEGER_GRAPHS = "tables", "tokenizer", "integer"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE)
REVISION = 1  # of what is written here: another one makes another bundle
OnStep = Callable[[str, int, int], None]  # label, done, total


def build_bundle(subject: Subject, out: Path, on_step: OnStep) -> Bundle:
    """The bundle of a run in `out`; one that was made from the same artifacts is kept as it is.

    Raises:
        ArtifactError: `out` holds what is no bundle's, or somebody else builds there.
        StorageError: it cannot be written.
        CompileError: a renamed binary is not what it was.
    """
    key = bundle_key(subject)
    _require_ours(out)
    kept = _whole_bundle(out, key)
    if kept is not None:
        return kept
    _require_no_strays(out)
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        building = out.with_name(f".{out.name}.building")
        with folder_lock(building, "the folder of the build", "building a bundle", "--out"):
            work = building / key
            for stale in building.iterdir():
                if stale.is_dir() and stale != work:
                    shutil.rmtree(stale)
            bundle = _write(subject, key, work, on_step)
            _publish(work, out)
            shutil.rmtree(building, ignore_errors=True)
    return bundle


def bundle_key(subject: Subject) -> str:
    """Digest of the artifacts, the recipe's drafting, and what writes bundles."""
    artifacts, recipe = subject.artifacts, subject.recipe
    tokenizer = {
        name: file_digest(path) for name in TOKENIZER_FILES if (path := subject.checkpoints.verifier / name).is_file()
    }
    asked = msgspec.to_builtins([recipe.drafting, recipe.sampling, recipe.validation.epsilon, recipe.compile])
    code = {path.name: file_digest(path) for path in sorted(PACKAGE.glob("*.*")) if path.is_file()}
    made_of = [REVISION, hyco_export.__version__, recipe.target, artifacts.head_key, artifacts.compiled_key]
    return content_digest([*made_of, artifacts.keepset.digest, tokenizer, asked, code])


def _whole_bundle(out: Path, key: str) -> Bundle | None:
    """The bundle that lies there, if it is the wanted one and nothing of it is damaged."""
    if not (out / BUNDLE_FILE).is_file() or read_bundle(out).key != key:
        return None
    with suppress(ArtifactError):
        return open_bundle(out)
    return None


def _require_ours(out: Path) -> None:
    """Raises ArtifactError: `out` holds what no bundle command wrote."""
    if out.is_dir() and any(out.iterdir()) and not (out / BUNDLE_FILE).is_file():
        raise ArtifactError(f"{out} is a folder with other contents (no {BUNDLE_FILE})", "give --out a new folder")
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file", "give --out a new folder")
    if (out / BUNDLE_FILE).is_file():
        read_bundle(out)


def _require_no_strays(out: Path) -> None:
    """Raises ArtifactError: somebody put a file into the bundle that is about to be replaced."""
    if not out.exists() or not any(out.iterdir()):
        return
    present = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    strays = sorted(present - {BUNDLE_FILE, *read_bundle(out).files})
    if strays := [name for name in strays if not any(fnmatchcase(Path(name).name, debris) for debris in DEBRIS)]:
        raise ArtifactError(
            f"{out / strays[0]} is no file of the bundle that a new one would replace",
            "move it elsewhere, or give --out a new folder",
        )


def _write(subject: Subject, key: str, work: Path, on_step: OnStep) -> Bundle:
    work.mkdir(parents=True, exist_ok=True)
    bundle, settings = describe(subject, key, work)
    integer = {name: _integer_graph(work / graph.integer_graph) for name, graph in bundle.graphs.items()}
    goldens = record_goldens(
        subject.root,
        work,
        bundle,
        settings,
        integer.__getitem__,
        lambda done, total: on_step("golden sessions on the integer graphs", done, total),
    )
    integer.clear()  # their memory is the emulator's now
    cases = emulate(
        work,
        goldens.cases,
        {name: bundle.graph_spec(name) for name in bundle.graphs},
        lambda name: _emulated(work / bundle.graphs[name].model, subject.recipe.target),
        lambda done, total: on_step("golden vectors in the emulator", done, total),
    )
    bundle = msgspec.structs.replace(
        bundle, cases=tuple(cases), host_cases=tuple(goldens.host_cases), sessions=tuple(goldens.sessions)
    )
    bundle = with_tolerances(work, bundle)
    (work / LISTS).mkdir(exist_ok=True)
    for name in bundle.graphs:  # a line a golden vector
        order = [tensor.name for tensor in bundle.graphs[name].inputs]
        cases = [case for case in bundle.cases if case.graph == name]
        text = input_list({tensor: case.inputs[tensor] for tensor in order} for case in cases)
        (work / LISTS / f"{name}.txt").write_text(text, encoding="utf-8")
    write_document(work, bundle)
    shutil.copyfile(PACKAGE / CONSUMER, work / CONSUMER)
    write_driver(work / "driver.pyz")
    shutil.rmtree(work / WORK_FOLDER, ignore_errors=True)
    files = {
        path.relative_to(work).as_posix(): FileRecord(file_digest(path), path.stat().st_size)
        for path in sorted(work.rglob("*"))
        if path.is_file() and path.name != BUNDLE_FILE
    }
    bundle = msgspec.structs.replace(bundle, files=files)
    write_json(work / BUNDLE_FILE, bundle)
    return bundle


def describe(subject: Subject, key: str, work: Path) -> tuple[Bundle, Settings]:
    """Copy graphs and tables; the bundle without golden vectors, and the run's drafting options."""
    from hyco_export.models.verifier import load_tokenizer

    run, recipe, artifacts, verifier = subject.root, subject.recipe, subject.artifacts, subject.checkpoints.verifier
    specs = {
        HEAD_GRAPH: artifacts.head.graph,
        SLM_TREE_GRAPH: artifacts.slm.tree,
        SLM_PREFILL_GRAPH: artifacts.slm.prefill,
    }
    graphs, build_ids = {}, set()
    for name in GRAPHS:
        graphs[name], build_id = _copy_graph(run, name, specs[name], recipe.target, work)
        build_ids.add(build_id)
    tokenizer = load_tokenizer(verifier)
    _copy_tables(subject, work)
    (work / TOKENIZER / TEMPLATE).write_text(str(tokenizer.chat_template), encoding="utf-8")
    stop_ids = _stop_ids(verifier)
    settings = _settings(recipe, artifacts.head_key, artifacts.head.vocab_size, stop_ids)
    drafting, rule = settings.drafting, TreeRule.of(settings.drafting)
    compiled = read_manifest(run / artifact_name(COMPILE, recipe.target))
    bundle = Bundle(
        format=FORMAT,
        program=f"hyco-export {hyco_export.__version__}",
        name=recipe.name,
        key=key,
        target=find_target(recipe.target),
        toolchain=Toolchain(_compiler(compiled), ", ".join(sorted(build_ids))),
        graphs=graphs,
        head=_without(artifacts.head, "graph"),
        slm=_without(artifacts.slm, "tree", "prefill"),
        keepset=f"{TABLES}/{KEEPSET_FILE}",
        slm_tables=f"{TABLES}/{TABLES_FILE}",
        slm_sink=_present(work, f"{TABLES}/{SLM_SINK_FILE}"),
        slm_bridge=_present(work, f"{TABLES}/{BRIDGE_FILE}"),
        tokenizer=f"{TOKENIZER}/tokenizer.json",
        chat_template=f"{TOKENIZER}/{TEMPLATE}",
        chat=chat_parts(tokenizer),
        stop_ids=stop_ids,
        drafting=Drafting(
            rule.edge_log_prob, rule.budget, rule.candidates_per_row, rule.temperature, drafting.chain_acceptance
        ),
        server=_server(subject, settings),
        tolerance=Tolerance(
            recipe.compile.output_range_share, recipe.compile.max_outside_share, recipe.compile.min_id_agreement
        ),
        cases=(),
        sessions=(),
        graphs_key=graphs_key(compiled),
    )
    return bundle, settings


def _copy_tables(subject: Subject, work: Path) -> None:
    """Keep set, the SLM's tables, and the tokenizer's files."""
    _copy(subject.root / KEEPSET / KEEPSET_FILE, work / TABLES)
    for name in (TABLES_FILE, SLM_SINK_FILE, BRIDGE_FILE):
        _copy(subject.root / SLM / name, work / TABLES)
    for name in TOKENIZER_FILES:
        _copy(subject.checkpoints.verifier / name, work / TOKENIZER)


def _server(subject: Subject, settings: Settings) -> Server:
    from hyco_export.models.checkpoints import tokenizer_digest

    artifacts = subject.artifacts
    return Server(
        verifier_digest=artifacts.head.verifier_digest,
        tokenizer_digest=tokenizer_digest(subject.checkpoints.verifier),
        keepset_digest=artifacts.keepset.digest,
        head_digest=artifacts.head_key,
        vocab_size=artifacts.head.vocab_size,
        sampling=wire_sampling(subject.recipe),
        acceptance=make_acceptance(find_system("hyco"), settings),
    )


def _settings(recipe: Recipe, head_key: str, vocab_size: int, stop_ids: tuple[int, ...]) -> Settings:
    from hyco_export.protocol.wire import PROTOCOL_VERSION, ServerInfo

    info = ServerInfo(PROTOCOL_VERSION, "", "", "", vocab_size, list(stop_ids), head_key, "", 0, 0, 0, [], "")
    return run_settings(recipe, head_key, info)


def chat_parts(tokenizer: Any) -> Chat:
    """The template's text around questions and answers, read off what it makes of marked ones.

    Raises:
        ArtifactError: turns cannot be put together from parts: each changes the others.
    """
    marks = ("Q1Q", "A1A", "Q2Q")

    def rendered(count: int) -> str:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)][:count]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    before, _, after = rendered(1).partition(marks[0])
    _, _, rest = rendered(3).partition(marks[1])
    between, _, _ = rest.partition(marks[2])
    chat = Chat(before, after, between)
    if before + marks[0] + after + marks[1] + between + marks[2] + after != rendered(3):
        raise ArtifactError(
            "the chat template writes earlier turns otherwise than the last one",
            "use a template that writes each turn by itself",
        )
    return chat


def _copy_graph(run: Path, name: str, spec: GraphSpec, target: str, work: Path) -> tuple[Graph, str]:
    compiled = run / artifact_name(COMPILE, target) / f"{name}_ctx.onnx"
    compiled_name, build_id = copy_named(compiled, work / name, spec, find_target(target))
    converted = run / (HEAD if name == HEAD_GRAPH else SLM)
    for path in converted.glob(f"{name}.*"):  # the graph, and its external data
        _copy(path, work / INTEGER_GRAPHS)
    graph = Graph(
        model=f"{name}/{name}.onnx",
        binary=f"{name}/{name}.bin",
        integer_graph=f"{INTEGER_GRAPHS}/{name}.onnx",
        compiled_name=compiled_name,
        compiled_sha256=file_digest(compiled.with_name(f"{name}_ctx_qnn.bin")),
        inputs=described(spec, spec.inputs),
        outputs=described(spec, spec.outputs),
    )
    return graph, build_id


def _copy(path: Path, folder: Path) -> None:
    """Copy a file that may not exist."""
    if path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)


def _present(work: Path, name: str) -> str:
    return name if (work / name).is_file() else ""


def _without(spec: msgspec.Struct, *fields: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(spec).items() if name not in fields}


def _compiler(manifest: Manifest) -> str:
    return str(manifest.metrics.get("compiler", ""))


def _stop_ids(verifier: Path) -> tuple[int, ...]:
    """As the server has them (`models.verifier.stop_ids`), without its weights being loaded."""
    from hyco_export.models.generation_rules import read_generation_config
    from hyco_export.models.text.tokenizer import token_ids
    from hyco_export.models.verifier import load_config

    ids = read_generation_config(verifier).eos_token_id
    found: Iterable[int] = token_ids(load_config(verifier).get_text_config().eos_token_id if ids is None else ids)
    return tuple(sorted(set(found)))


def _integer_graph(path: Path) -> GraphSession:
    from hyco_export.graph.parity import ReferenceSession

    return ReferenceSession(path)


def _emulated(model: Path, target: str) -> GraphSession:
    from hyco_export.graph.qnn import open_context

    return open_context(model, find_target(target))


def _publish(work: Path, out: Path) -> None:
    """Rename the finished folder; an older bundle is there until the new one is whole."""
    for path in (work / BUNDLE_FILE, work):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if out.is_dir():
        retired = work.with_name(f"{work.name}.retired")
        out.rename(retired)
    work.rename(out)
