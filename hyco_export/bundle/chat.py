"""`python driver.pyz chat --bundle DIR --server URL`: a conversation with a verifier server over a bundle's graphs.

Needs numpy, msgspec, safetensors, tokenizers and onnxruntime; onnxruntime-qnn for `--backend qnn`. The systems are
those of `device.systems`; trees are scored and cut as the bundle says.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hyco_export.bundle.graphs import BACKENDS, BundleGraph, assemble_device
from hyco_export.bundle.spec import Bundle, open_bundle
from hyco_export.core.recipe import Drafting
from hyco_export.device.backends import Device
from hyco_export.device.calls import RetryingTransport
from hyco_export.device.client import Access, HttpTransport
from hyco_export.device.driver import Generation
from hyco_export.device.interfaces import Transport
from hyco_export.device.systems import Settings, find_system, make_drafter, make_policy, make_request
from hyco_export.errors import HycoError, ServerError
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import Sampling, ServerInfo

SYSTEMS = ("hyco", "hyco-exact", "hyco-2p", "plain")
GREEDY = Sampling(0.0, 0, 1.0)
PATIENCE_S = 60.0  # a server that is started again is waited for that long
PROOFS = ("golden/", "qnn-net-run/")  # of a bundle: a device in use need not have them
UNUSED_GRAPHS = "integer/"  # by the back end `qnn`
TOKEN_VARIABLE = "HYCO_TOKEN"


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2, with one line, for what a user can mend."""
    options = _parser().parse_args(arguments)
    try:
        _chat(options)
    except HycoError as error:
        sys.exit(_refusal(error))
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)


def _refusal(error: HycoError) -> int:
    sys.stderr.write(f"error: {error.message}\n" + (f"next: {error.hint}\n" if error.hint else ""))
    return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="driver.pyz", description="The device's half of HyCo over a bundle.")
    chat = parser.add_subparsers(dest="command", required=True).add_parser("chat", help="Talk to a verifier server.")
    chat.add_argument("--bundle", type=Path, required=True, help="The bundle's folder.")
    chat.add_argument("--server", required=True, help="URL of a running server.")
    chat.add_argument("--backend", choices=BACKENDS, default="cpu", help="cpu: integer graphs; qnn: context binaries.")
    chat.add_argument("--system", choices=SYSTEMS, default="hyco")
    chat.add_argument("--prompt", action="append", default=[], help="A question; may be repeated. Default: ask.")
    chat.add_argument("--tokens", type=int, default=256, help="Tokens of an answer, at most.")
    chat.add_argument("--seed", type=int, default=1, help="Of the verifier's draws.")
    chat.add_argument("--greedy", action="store_true", help="Temperature 0 in place of the bundle's sampling.")
    chat.add_argument("--ca", type=Path, help="Authority of the server's certificate (PEM).")
    chat.add_argument("--insecure", action="store_true", help=f"Send the token of {TOKEN_VARIABLE} without TLS.")
    return parser


def _chat(options: argparse.Namespace) -> None:
    bundle = open_bundle(options.bundle, (*PROOFS, UNUSED_GRAPHS) if options.backend == "qnn" else PROOFS)
    access = Access(os.environ.get(TOKEN_VARIABLE, ""), options.ca, options.insecure)
    direct = HttpTransport(options.server, access=access)
    info = direct.info()
    require_fitting(info, bundle, options.server)
    tokenizer = Tokenizer.from_file(str(options.bundle / bundle.tokenizer))
    graphs = {name: BundleGraph(options.bundle, bundle, name, options.backend) for name in bundle.graphs}
    transport = RetryingTransport(direct, PATIENCE_S)
    with assemble_device(options.bundle, bundle, graphs) as device:
        text = ""
        for number, prompt in enumerate(_prompts(options.prompt)):
            text += (bundle.chat.between if number else bundle.chat.before) + prompt.strip() + bundle.chat.after
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            trace = answer(ids, bundle, options, device, transport, info)
            said = tokenizer.decode(list(trace.tokens)).strip()
            rounds = len(trace.rounds)
            print(f"{said}\n[{len(trace.tokens)} tokens, {rounds} rounds, {trace.total_ms / 1000:.1f} s]", flush=True)
            text += said


def _prompts(given: Sequence[str]) -> Iterator[str]:
    yield from given
    while not given:
        asked = input("> ")
        if not asked.strip():
            return
        yield asked


def answer(
    ids: Sequence[int],
    bundle: Bundle,
    options: argparse.Namespace,
    device: Device,
    transport: Transport,
    info: ServerInfo,
) -> GenerationTrace:
    """One generation."""
    system = find_system(options.system)
    settings = bundle_settings(bundle, info)
    sampling = GREEDY if options.greedy else bundle.server.sampling
    request = make_request(system, settings, "chat", sampling, options.seed, options.tokens)
    generation = Generation(
        ids, request, make_drafter(system, settings, device), transport, policy=make_policy(system, settings)
    )
    try:
        while not generation.finished:
            generation.step()
    finally:
        generation.close()
    return generation.trace()


def bundle_settings(bundle: Bundle, info: ServerInfo) -> Settings:
    """The bundle's drafting, and the server's facts."""
    tree = bundle.drafting
    drafting = Drafting(
        budget=tree.budget,
        chain_acceptance=tree.chain_acceptance,
        candidates_per_row=tree.candidates_per_row,
        slm_temperature=tree.temperature,
        stop_needs_draw=bundle.server.acceptance.stop_needs_draw,
    )
    return Settings(
        drafting=drafting,
        epsilon=bundle.server.acceptance.epsilon,
        server_steps=info.server_steps,
        head_digest=bundle.server.head_digest,
        vocab_size=info.vocab_size,
        stop_ids=frozenset(info.stop_ids),
    )


def require_fitting(info: ServerInfo, bundle: Bundle, url: str) -> None:
    """With wrong scales or ids drafts are merely rejected, and nothing else tells.

    Raises:
        ServerError: names everything that differs.
    """
    names = ("verifier_digest", "tokenizer_digest", "keepset_digest", "head_digest", "vocab_size")
    different = [
        f"{name} is {getattr(info, name) or 'none'} there, {getattr(bundle.server, name)} here"
        for name in names
        if getattr(info, name) != getattr(bundle.server, name)
    ]
    if info.node_limit < bundle.drafting.budget:
        different.append(
            f"it verifies {info.node_limit} nodes a round, the bundle's trees have {bundle.drafting.budget}"
        )
    if different:
        raise ServerError(
            f"the server at {url} does not belong to this bundle: {'; '.join(different)}",
            "start it on the run folder that the bundle was made from: hyco-export serve",
        )
