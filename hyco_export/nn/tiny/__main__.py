"""`python -m hyco_export.nn.tiny OUT_DIR`: train the embedded family again, with progress, and print its model card."""

import argparse
from pathlib import Path

import transformers
from rich.progress import Progress, TaskID

from hyco_export.errors import HycoError
from hyco_export.nn.tiny.family import train_family


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hyco_export.nn.tiny", description=__doc__)
    parser.add_argument("out_dir", type=Path, help="new folder for the family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="same formats, a handful of steps")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with Progress() as progress:
        tasks: dict[str, TaskID] = {}

        def show(part: str, share: float) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=1.0)
            progress.update(tasks[part], completed=share)

        try:
            facts = train_family(arguments.out_dir, seed=arguments.seed, quick=arguments.quick, on_progress=show)
        except HycoError as error:
            raise SystemExit(f"error: {error}") from None
    print((arguments.out_dir / "MODEL_CARD.md").read_text(encoding="utf-8"))
    print(f"CPU-minutes, all processes together: {facts['cpu_minutes']:.1f}")


if __name__ == "__main__":
    main()
