"""The libraries that can change an artifact's bytes, and which versions of them are installed."""

from collections.abc import Sequence
from importlib import metadata

LIBRARIES = ("torch", "transformers", "aimet-torch", "onnx", "onnxruntime", "onnxruntime-qnn", "numpy")


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the libraries that can change an artifact's bytes."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
