"""What a lint check yields, and how it names places in a graph."""

from typing import NamedTuple

import onnx


class Breach(NamedTuple):
    """One place that breaks a rule."""

    where: str
    what: str


def place(node: onnx.NodeProto) -> str:
    """A node by name, or by its first output."""
    return node.name or node.output[0]
