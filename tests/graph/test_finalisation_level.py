"""The compiler's level 1 loses a whole network where levels 2 and 3 do not: why `graph.qnn` fixes level 3.

It takes a network to see it: a few linear layers come out right at every level. When this fails, an upgrade healed it.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from hyco_export.core.device_spec import to_integers
from hyco_export.core.network.host import SlmHost
from hyco_export.core.targets import TARGETS
from hyco_export.graph.parity import ReferenceSession, compare_sessions
from hyco_export.graph.qnn import open_context
from tests.support.slm_parts import MASK_VALUE, embedded_slm_parts

SM8850 = TARGETS["sm8850"]
COMPILE_AT = """
import sys
from hyco_export.core.targets import TARGETS
from hyco_export.graph import qnn, qnn_process
qnn.COMPILATION_OPTIONS["htp_graph_finalization_optimization_mode"] = sys.argv[3]
qnn.compile_here(qnn_process.CompileJob(sys.argv[1], sys.argv[2], TARGETS["sm8850"]))
"""


@pytest.mark.slow
def test_level_1_loses_the_embedded_slm(tmp_path: Path) -> None:
    parts = embedded_slm_parts()
    model = tmp_path / "slm_tree.onnx"
    onnx.save(parts.tree_model, model)
    rows = parts.tree.input("embeds").shape[0]
    host = SlmHost(parts.network, parts.tables, rows, MASK_VALUE)
    feeds = to_integers(parts.tree.inputs, host.feeds(np.arange(5, 5 + rows), range(-1, rows - 1)))
    worst_db = {}
    for level in ("1", "2", "3"):
        context_model = tmp_path / f"level{level}_ctx.onnx"
        command = [sys.executable, "-c", COMPILE_AT, str(model), str(context_model), level]
        subprocess.run(command, check=True, capture_output=True)
        with open_context(context_model, SM8850) as session:
            report = compare_sessions(ReferenceSession(model), session, parts.tree, [feeds])
        worst_db[level] = min(output.sqnr_db for output in report.outputs)
    assert worst_db["1"] < 10 < 30 < worst_db["2"] == worst_db["3"]  # -9 and 39 dB seen
