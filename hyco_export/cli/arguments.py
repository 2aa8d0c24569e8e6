"""Options that several commands take, and the recipe that may be given in two ways."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from msgspec import Meta

from hyco_export.errors import HycoError
from hyco_export.protocol import wire

RECIPE_HELP = "Recipe (YAML), or the name of one that ships. Default: the embedded tiny family."
RecipeArgument = Annotated[Path | None, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="The same, as an option.", show_default=False)]
RunOption = Annotated[Path | None, typer.Option("--run", help="Where artifacts live. Default: runs/<recipe name>.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="NPU target, e.g. sm8850. Default: the recipe's.")]
ServerTokensOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File of bearer tokens, one a line. Default: the one in HYCO_TOKEN, or none."),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the bearer token. Default: the one in HYCO_TOKEN, or none."),
]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Authority of the server's certificate (PEM).")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Send the token without TLS.")]
LinkOption = Annotated[str | None, typer.Option("--link", help="Count times as over lte, 5g-nsa or wifi.")]
LinkWaitsOption = Annotated[
    bool, typer.Option("--link-waits", help="Sleep what the link takes; specedge-pd drafts meanwhile.")
]
PromptSetOption = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="SET",
        help="A number of the recipe's validation prompts (default: its own), spec-bench:FILE, "
        "infinitebench-sum[:FILE], or a file: conversations (.jsonl, .parquet), a prompt a paragraph (.txt, .md). "
        "FILE: a path or hf:// address.",
        show_default=False,
    ),
]
PerCategoryOption = Annotated[
    int | None, typer.Option(help="The first so many questions of each category.", min=1, show_default=False)
]
PromptLimitOption = Annotated[
    int | None, typer.Option("--limit", help="The first so many of those.", min=1, show_default=False)
]
TruncateOption = Annotated[
    int | None,
    typer.Option(
        help="Ids of a prompt, at most: the middle of its longest message is cut out; of a novel its end.",
        min=16,
        show_default=False,
    ),
]
OwnServerOption = Annotated[
    str | None,
    typer.Option("--server", help="URL of a running server. Default: one of its own.", show_default=False),
]
SystemsOption = Annotated[str, typer.Option("--systems", help="Names, the baseline first.")]
BackendOption = Annotated[str, typer.Option("--backend", help="Device back end: torch, onnx-cpu, qnn.")]
ServerDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where the verifier runs: cpu, cuda, cuda:1. Default: cuda where there is a GPU.",
        show_default=False,
    ),
]
HubDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Device of AI Hub. Default: Samsung Galaxy S26 Ultra.", show_default=False),
]
RebuildOption = Annotated[
    bool, typer.Option("--rebuild", help="Build anew, too, what was built with other versions of libraries.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and build nothing.")]


def only(path: Path | None, option: Path | None) -> Path | None:
    """The recipe, whichever way it was given.

    Raises:
        HycoError: both ways.
    """
    if path is not None and option is not None:
        raise HycoError(f"two recipes: {path} and --recipe {option}", "give one")
    return path or option


def with_rule_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for every described field of `wire.Acceptance`, passed on by its name, None where it
    is not given: a rule's new option needs no word here."""
    signature = inspect.signature(command, eval_str=True)
    own = [given for given in signature.parameters.values() if given.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = get_type_hints(wire.Acceptance, include_extras=True)
    extra = [_rule_option(name, kind) for name, kind in fields.items() if _description(kind)]

    def called(**values: Any) -> None:
        command(**values)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]  # typer reads it
    called.__annotations__ = {given.name: given.annotation for given in (*own, *extra)}
    return called


def _rule_option(name: str, kind: Any) -> inspect.Parameter:
    text = f"{_description(kind)} Default: {getattr(wire.EXACT, name)}."
    option = Annotated[kind.__origin__ | None, typer.Option(help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def _description(kind: Any) -> str | None:
    """What a field's `Meta` says of it."""
    notes = (note for note in getattr(kind, "__metadata__", ()) if isinstance(note, Meta))
    return next((note.description for note in notes), None)
