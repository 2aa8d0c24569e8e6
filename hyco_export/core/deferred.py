"""A function named by its place, so that a table of functions loads no module before one of them is called."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Deferred:
    """The function at `place`, "module:function"; every call looks it up, the first one loads its module.

    A place that does not exist shows at the call: the tests of a table look up all of them.
    """

    place: str

    def find(self) -> Callable[..., Any]:
        """The function itself."""
        module, name = self.place.split(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.find()(*arguments, **named)
