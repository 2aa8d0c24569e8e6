"""What `run` does: build the whole chain, serve it, validate against the server."""

from contextlib import nullcontext
from pathlib import Path

import msgspec

from hyco_export.cli.build import build_chain, show_plan
from hyco_export.cli.connection import connect_options
from hyco_export.cli.console import output
from hyco_export.cli.invocation import is_main
from hyco_export.cli.options import open_run, require_readable_twice
from hyco_export.cli.server_process import server_process
from hyco_export.cli.validation import validate_in
from hyco_export.errors import interrupt_keeps
from hyco_export.stages.table import stages_of


def run_everything(
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    device: str | None,
    dry_run: bool,
    rebuild: bool = False,
) -> int:
    """The whole chain, then serve and validate; the exit code of the validation."""
    if not dry_run:
        require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir, target)
    if dry_run:
        show_plan(run, stages_of(run.recipe), "run", rebuild)
        return 0
    if run.recipe.models.head is None:
        build_chain(run, stages_of(run.recipe), rebuild)
        output.print("\nno head in the recipe: nothing to serve or to validate")
        return 0
    with run.lock() if is_main() else nullcontext():  # nobody builds what is being validated
        build_chain(run, stages_of(run.recipe), rebuild)

        def kept() -> str:
            return f"all artifacts in {run.root}, not the validation"

        with interrupt_keeps(kept), server_process(recipe_path, run.root, kept, device) as server:
            # with the environment's token, which the server asks for
            connecting = connect_options(None, None, False, None, False)
            return validate_in(run, server.url, msgspec.structs.replace(connecting, still_there=server.require_running))
