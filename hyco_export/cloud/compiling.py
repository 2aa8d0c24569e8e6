"""A graph compiled by AI Hub with the QAIRT version that a user's phone has, and the pair that comes back.

What is downloaded is a zip with one `.onnx` and the `.bin` it names; nothing else of it is unpacked.
"""

import tempfile
import zipfile
from pathlib import Path

from hyco_export.cloud.client import Device, HubClient, HubError, hub_errors
from hyco_export.cloud.jobs import OnState, stage_graph, submit_compile, wait_for
from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph.context_binary import read_context
from hyco_export.graph.context_check import require_io_spec, require_sound
from hyco_export.graph.qnn_process import ContextInfo

RUNTIME = "--target_runtime precompiled_qnn_onnx"
SIZE_LIMIT = 4_000_000_000  # bytes of a binary, unpacked; the largest known has 1 GB
PAIR = (".onnx", ".bin")


def compile_options(qairt: str | None) -> str:
    """The service's options: an EPContext pair, with this QAIRT version or the service's own."""
    return RUNTIME + (f" --qairt_version {qairt}" if qairt else "")


def compile_graph(
    client: HubClient,
    device: Device,
    model: Path,
    spec: GraphSpec,
    target: Target,
    qairt: str | None,
    out_dir: Path,
    on_state: OnState,
) -> ContextInfo:
    """Compile the integer graph `model` there; its pair is written to `out_dir` and read back.

    Raises:
        HubError: the job failed, or what came back is no pair.
        CompileError: the binary is for another target, or has other inputs and outputs than the graph.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = stage_graph(model, Path(name) / spec.name)
        job = submit_compile(client, folder, device, compile_options(qairt), f"hyco {spec.name}")
        wait_for(job, spec.name, on_state)
        with hub_errors(f"fetching {spec.name}"):
            place = job.download_target_model(str(Path(name) / f"{spec.name}.onnx.zip"))
        if place is None:
            raise HubError(
                f"job {job.job_id} of {spec.name} left no model", f"see its log on the page of job {job.job_id}"
            )
        binary = unpack_pair(Path(place), out_dir, spec.name)
    info = read_context(binary)
    require_sound(info, binary.name)
    if (info.htp_arch, info.soc_model) != (target.htp_arch, target.soc_model):
        raise CompileError(
            f"{binary.name} is for v{info.htp_arch}/SoC {info.soc_model}, asked for v{target.htp_arch}/SoC "
            f"{target.soc_model}",
            "give the --device that has the target's chip",
        )
    (graph,) = info.graphs
    require_io_spec(graph.spec, spec, binary.name)
    return info


def unpack_pair(archive: Path, out_dir: Path, graph: str) -> Path:
    """Write the pair of a downloaded zip as `graph`_ctx.onnx and the .bin under the name that the .onnx has for it.

    Raises:
        HubError: not exactly one of each, or larger than any binary.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            found = {suffix: [m for m in file.infolist() if m.filename.endswith(suffix)] for suffix in PAIR}
            if [len(members) for members in found.values()] != [1, 1]:
                raise HubError(f"{archive.name} of AI Hub holds no pair of .onnx and .bin", "see the job's page")
            members = [found[suffix][0] for suffix in PAIR]
            if any(member.file_size > SIZE_LIMIT for member in members):
                raise HubError(f"{archive.name} of AI Hub unpacks to more than {SIZE_LIMIT:,} B", "see the job's page")
            names = (f"{graph}_ctx.onnx", Path(members[1].filename).name)
            for member, name in zip(members, names, strict=True):
                with file.open(member) as source, (out_dir / name).open("wb") as sink:
                    while block := source.read(1 << 20):
                        sink.write(block)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise HubError(f"{archive.name} of AI Hub cannot be unpacked", "run the command again") from error
    return out_dir / names[1]
