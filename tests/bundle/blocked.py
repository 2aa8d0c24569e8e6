"""A script: runs another Python file or archive in a process that can import nothing but what a device installs.

Arguments: allowed top modules with commas, the script, its arguments. Prints nothing of its own.
"""

import runpy
import sys
from importlib.machinery import ModuleSpec


class Blocker:
    """An import hook that refuses every module that is neither the standard library's nor allowed."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top in self._allowed or top in sys.stdlib_module_names or top in ("__main__", "sitecustomize"):
            return None
        raise ImportError(f"{name} is blocked on the device")


if __name__ == "__main__":
    names, script, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Blocker(frozenset(names.split(","))))  # type: ignore[arg-type]  # find_spec is all it needs
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
