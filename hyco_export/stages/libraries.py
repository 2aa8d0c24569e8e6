"""The libraries that can change an artifact's bytes, and which versions of them are installed."""

from collections.abc import Mapping, Sequence
from importlib import metadata

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",  # chat templates
    "datasets",
    "pyarrow",
    "aimet-torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-qnn",
    "numpy",
    "gguf",
)


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the libraries that can change an artifact's bytes."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_changes(built_with: Mapping[str, str]) -> str:
    """What an artifact's manifest says it was built with, beside what is installed now; "" where nothing changed.

    Libraries that either does not name are passed over: nothing is known of them.
    """
    now = library_versions(list(built_with))
    changed = [name for name, version in built_with.items() if now.get(name, version) != version]
    if not changed:
        return ""
    before = ", ".join(f"{name} {built_with[name]}" for name in changed)
    return f"built with {before}, now {', '.join(now[name] for name in changed)}"
