"""What a bundle takes of a run: graphs, tables and the tokenizer are copied, and `bundle.json` is begun: all of it but
golden vectors and hashes.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import hyco_export
from hyco_export.bundle.graph_names import copy_named
from hyco_export.bundle.spec import (
    FORMAT,
    GRAPHS,
    Bundle,
    Chat,
    Drafting,
    Graph,
    Server,
    Tolerance,
    Toolchain,
)
from hyco_export.bundle.tensors import described
from hyco_export.core.artifact import (
    COMPILE,
    HEAD,
    KEEPSET,
    SLM,
    SLM_SINK_FILE,
    Manifest,
    artifact_name,
    file_digest,
    read_manifest,
)
from hyco_export.core.device_profile import graphs_key
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_PREFILL_GRAPH, SLM_TREE_GRAPH, GraphSpec
from hyco_export.core.keepset import KEEPSET_FILE
from hyco_export.core.recipe import Recipe
from hyco_export.core.tables import TABLES_FILE
from hyco_export.core.targets import find_target
from hyco_export.core.token_bridge import BRIDGE_FILE
from hyco_export.device.systems import Settings, find_system, make_acceptance
from hyco_export.device.tree_builder import TreeRule
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import Subject, wire_sampling
from hyco_export.evaluate.runs import run_settings

TABLES, TOKENIZER, INTEGER_GRAPHS = "tables", "tokenizer", "integer"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE)


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
    drafting, rule = settings.drafting, TreeRule.of_hybrid(settings.drafting)
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
