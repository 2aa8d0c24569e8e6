"""The NPU targets this package compiles for: the numbers the vendor's compiler needs, and the widths graphs may use.

Sources: SoC model and architecture were read back from binaries that onnxruntime-qnn 2.7
(QAIRT 2.51) compiled for each target. 8 MB of VTCM is the figure of ExecuTorch's public SoC table for SM8550, SM8650,
SM8750 and SM8850; for SM8845, X Elite and X2 Elite it is assumed from their siblings of the same architecture.
"""

import difflib

import msgspec

from hyco_export.errors import CompileError

BYTES_PER_MIB = 1024 * 1024
DEFAULT_TARGET = "sm8850"


class Target(msgspec.Struct, frozen=True):
    """One SoC with a Hexagon NPU.

    `weight_bits` are the widths that compile from a QDQ graph. HTP also computes true 2-bit weights, but the ONNX route
    gives wrong results for INT2, so 2-bit integers travel in 4-bit carriers (their values stay exact).
    """

    name: str  # what the user types
    marketing_name: str
    soc: str  # the vendor's name, as the compiler writes it into a binary
    soc_model: int
    htp_arch: int  # 81 = Hexagon v81
    vtcm_mb: int = 8
    weight_bits: tuple[int, ...] = (4, 8)
    activation_bits: tuple[int, ...] = (8, 16)  # 8 for K/V and tables, 16 for everything else

    @property
    def vtcm_bytes(self) -> int:
        return self.vtcm_mb * BYTES_PER_MIB


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm8850", "Snapdragon 8 Elite Gen 5", "SM8850", 87, 81),
        Target("sm8845", "Snapdragon 8 Gen 5", "SM8845", 97, 81),
        Target("sm8750", "Snapdragon 8 Elite", "SM8750", 69, 79),
        Target("sm8650", "Snapdragon 8 Gen 3", "SM8650", 57, 75),
        Target("sm8550", "Snapdragon 8 Gen 2", "SM8550", 43, 73),
        Target("x-elite", "Snapdragon X Elite", "SC8380XP", 60, 73),
        Target("x2-elite", "Snapdragon X2 Elite", "SC8480XP", 88, 81),
    )
}


def find_target(name: str) -> Target:
    """The target called `name`, case ignored.

    The compiler silently builds for another SoC when it does not know a name, so an unknown one stops here.

    Raises:
        CompileError: no such target; the hint lists the known ones, the closest first.
    """
    key = name.strip().lower()
    if key in TARGETS:
        return TARGETS[key]
    closest = difflib.get_close_matches(key, TARGETS, n=1)
    guess = f"did you mean {closest[0]}? " if closest else ""
    raise CompileError(f"unknown target {name!r}", f"{guess}known targets: {', '.join(TARGETS)}")
