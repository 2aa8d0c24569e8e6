"""Functions named by their place, so that a table of them loads no module before one is called."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def deferred(place: str) -> Callable[..., Any]:
    """The function at "module:function"; its module is loaded at the first call.

    Every call looks the function up again in its module. A place that does not exist shows at the call: whoever keeps a
    table of places tests all of them.
    """
    module, name = place.split(":")

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **named)

    call.__qualname__ = call.__name__ = name
    return call
