"""BUNDLE.md and the input lists of qnn-net-run."""

import json
from pathlib import Path

from hyco_export.bundle.spec import INTEGER, load_arrays, open_bundle, read_bundle


def test_the_lists_of_qnn_net_run_name_files_that_are_there(bundle_folder: Path) -> None:
    bundle = open_bundle(bundle_folder)
    for name, graph in bundle.graphs.items():
        lines = (bundle_folder / "qnn-net-run" / f"{name}.txt").read_text().splitlines()
        listed = [case for case in bundle.cases if case.graph == name and INTEGER in case.outputs]
        assert len(lines) == len(listed) > 0
        for line, case in zip(lines, (case for case in bundle.cases if case.graph == name), strict=True):
            pairs = dict(part.split(":=") for part in line.split(" "))
            assert pairs == case.inputs
        arrays = load_arrays(bundle_folder, pairs, [tensor.spec for tensor in graph.inputs])
        assert set(arrays) == {tensor.name for tensor in graph.inputs}


def test_the_page_says_every_tensor_and_no_value_is_left_open(bundle_folder: Path) -> None:
    page, bundle = (bundle_folder / "BUNDLE.md").read_text(), read_bundle(bundle_folder)
    for graph in bundle.graphs.values():
        for tensor in (*graph.inputs, *graph.outputs):
            assert f"| `{tensor.name}` | {tensor.dtype} [{' x '.join(map(str, tensor.shape))}]" in page
    assert "{{" not in page and "{%" not in page and bundle.toolchain.qairt in page
    assert "`tolerance_steps`" in page and json.dumps(bundle.drafting.edge_log_prob)[:8] in page
