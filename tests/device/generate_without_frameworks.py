"""A script: one `hyco` generation on the back end onnx-cpu in a process that cannot import the frameworks.

Arguments: run folder, URL, prompt ids with commas, new tokens. Prints tokens, rounds and imported modules as JSON.
"""

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

BLOCKED = ("torch", "transformers", "onnx", "starlette", "uvicorn", "matplotlib", "pyarrow", "datasets", "scipy")


class Blocker:
    """An import hook that refuses the frameworks."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked on the device")
        return None


def main(run: str, url: str, prompt: str, max_new_tokens: str) -> None:
    from hyco_export.core.artifact import HEAD, read_manifest
    from hyco_export.core.recipe import Drafting
    from hyco_export.device.backends import open_device
    from hyco_export.device.client import HttpTransport
    from hyco_export.device.driver import generate
    from hyco_export.device.systems import Settings, find_system, make_drafter, make_policy, make_request
    from hyco_export.protocol.wire import Sampling

    transport = HttpTransport(url)
    info = transport.info()
    settings = Settings(
        drafting=Drafting(budget=8, chain_acceptance=0.66, candidates_per_row=4),
        epsilon=0.005,
        server_steps=3,
        head_digest=read_manifest(Path(run) / HEAD).key,
        vocab_size=info.vocab_size,
        stop_ids=frozenset(info.stop_ids),
    )
    system = find_system("hyco")
    request = make_request(system, settings, "p", Sampling(0.0, 0, 1.0), seed=1, max_new_tokens=int(max_new_tokens))
    ids = [int(token) for token in prompt.split(",")]
    with open_device(Path(run), "onnx-cpu") as device:
        drafter = make_drafter(system, settings, device)
        trace = generate(ids, request, drafter, transport, policy=make_policy(system, settings))
    rounds = [
        {"nodes": len(record.tree), "sources": sorted(set(map(int, record.tree.sources)))} for record in trace.rounds
    ]
    print(json.dumps({"tokens": trace.tokens, "rounds": rounds, "modules": sorted(sys.modules)}))


def run(arguments: Sequence[str]) -> None:
    sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]  # a finder needs no more than find_spec
    main(*arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
