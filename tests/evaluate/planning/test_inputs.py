"""Inputs of a plan: files of every form, systems' shapes, and refusals."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.core.device_profile import DeviceProfile, GraphProfile, read_profile_file
from hyco_export.device.systems import SYSTEMS
from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.inputs import (
    DeviceTimes,
    LinkPoint,
    LinkTimes,
    ServerTimes,
    SystemInput,
    acceptance_of,
    paper_inputs,
    plannable,
    read_curve,
    read_link,
    read_parts,
    shape_of,
    with_profile,
)


def test_a_curve_is_linear_between_its_points_and_beyond() -> None:
    server = ServerTimes(pass_ms=((5.0, 10.0), (25.0, 20.0), (33.0, 21.0)))
    rows = (1, 5, 15, 33, 66)
    assert [server.verify_ms(count) for count in rows] == pytest.approx([10.0, 10.0, 15.0, 21.0, 21.0 + 33 / 8])
    assert ServerTimes(pass_ms=((33.0, 21.0),)).verify_ms(66) == 21.0


def test_a_link_over_time_starts_anew() -> None:
    points = tuple(LinkPoint(from_s=start, rtt_ms=10.0) for start in (0.0, 2.0, 3.0))
    link = LinkTimes(name="three", points=points)  # a period of 4 s
    assert [link.at(1000 * s) for s in (0.0, 1.9, 2.0, 3.5, 3.99, 4.0, 6.1, 7.2)] == [0, 0, 1, 2, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "rows", "passes", "deepest"),
    [
        ("plain", 1, 0, 0), ("cloud-mtp", 5, 0, 4), ("specedge", 33, 4, 4), ("specedge-pd", 33, 4, 8),
        ("hyco", 33, 1, 5), ("hyco-2p", 33, 2, 6), ("hyco-server-head", 33, 1, 5),
    ],
)  # fmt: skip
def test_a_systems_name_says_its_work(name: str, rows: int, passes: int, deepest: int) -> None:
    shape = shape_of(name, SystemInput(), budget=32, steps=4)
    assert (shape.rows, shape.passes, shape.deepest) == (rows, passes, deepest)
    assert shape.device_head == (name in ("hyco", "hyco-2p"))
    assert shape.server_head == (name in ("cloud-mtp", "hyco-server-head"))


def test_what_commits_unasked_or_decides_its_passes_is_refused() -> None:
    refused = {name for name, system in SYSTEMS.items() if not plannable(system)}
    assert refused >= {"on-device", "sled", "synera"}
    for name in (*refused, "hyco-3p"):
        with pytest.raises(HycoError, match="cannot be planned"):
            shape_of(name, SystemInput(), 32, 4)


def test_a_mat_alone_gives_every_depth_the_same_share() -> None:
    shape = shape_of("hyco", SystemInput(), 32, 4)
    shares = [share for depth in acceptance_of(SystemInput(mat=3.0), shape) for share in depth.values()]
    assert len(shares) == 5
    assert len(set(shares)) == 1
    assert sum(shares[0] ** depth for depth in range(6)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SystemInput(), "neither"),
        (SystemInput(mat=6.5), "commits 6 tokens at most"),
        (SystemInput(acceptance=({"chain": 0.7, "slm": 0.4},)), "more than 1"),
    ],
)
def test_impossible_acceptance_is_refused(given: SystemInput, message: str) -> None:
    with pytest.raises(HycoError, match=message):
        acceptance_of(given, shape_of("hyco", SystemInput(), 32, 4))


def test_a_file_holds_any_of_the_sections(tmp_path: Path) -> None:
    path = tmp_path / "phone.yaml"
    path.write_text("device: {head_ms: 9.5, slm_pass_ms: 4.0}\nworkload: {answer_tokens: 300}\n")
    parts = read_parts(path)
    assert set(parts) == {"device", "workload"}
    assert parts["device"] == DeviceTimes(head_ms=9.5, slm_pass_ms=4.0)
    as_json = tmp_path / "phone.json"
    as_json.write_bytes(msgspec.json.encode({"device": parts["device"]}))
    assert read_parts(as_json) == {"device": parts["device"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phone: {}", "unknown section 'phone'"),
        ("device: {head_ms: 1.0}", "missing required field `slm_pass_ms`"),
        ("device: {head_ms: 1.0, slm_pass_ms: 1.0, fan: 2}", "unknown field `fan`"),
        ("server: {pass_ms: []}", "length >= 1"),
        ("[]", "no section"),
        ("device: {", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "inputs.yaml"
    path.write_text(text)
    with pytest.raises(HycoError, match=message) as caught:
        read_parts(path)
    assert "docs/" not in caught.value.hint  # an installed wheel has none


def test_links_are_presets_or_tables(tmp_path: Path) -> None:
    assert read_link("lte").points == (LinkPoint(rtt_ms=70.0, down_mbit_s=13.0, up_mbit_s=6.0),)
    assert read_link("paper") == paper_inputs().link
    path = tmp_path / "walk.csv"
    path.write_text("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,50,20,5\n10,200,1,0.5\n")
    assert [point.rtt_ms for point in read_link(str(path)).points] == [50.0, 200.0]
    for text, message in (
        ("rtt_ms\n50\n", "is no table of"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n5,50,20,5\n", "must start with 0"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n", "no line"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,50,0,5\n", "down_mbit_s"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,1e308,20,5\n", "<= 3600000.0 - at .*rtt_ms"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,nan,20,5\n", "rtt_ms"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,50,inf,5\n", "<= 1000000.0 - at .*down_mbit_s"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,50,20,1e-300\n", "up_mbit_s"),
        ("from_s,rtt_ms,down_mbit_s,up_mbit_s\n0,50,20,5\ninf,50,20,5\n", "from_s"),
    ):
        path.write_text(text)
        with pytest.raises(HycoError, match=message):
            read_link(str(path))
    with pytest.raises(HycoError, match="unknown link"):
        read_link("6g")


def test_a_servers_curve_is_a_list_or_a_table(tmp_path: Path) -> None:
    listed, table = tmp_path / "curve.json", tmp_path / "curve.csv"
    listed.write_text("[[1, 12.5], [33, 21.7]]")
    table.write_text("rows,ms\n1,12.5\n33,21.7\n")
    assert read_curve(listed) == read_curve(table) == ((1.0, 12.5), (33.0, 21.7))
    for text, message in (
        ("[]", "rows must grow"),
        ("[[33, 1], [1, 2]]", "rows must grow"),
        ("[[1, .inf]]", "<= 3600000.0"),
        ('{"a": 1}', "array"),
    ):
        listed.write_text(text)
        with pytest.raises(HycoError, match=message):
            read_curve(listed)


def test_a_profile_replaces_the_graphs_times(tmp_path: Path) -> None:
    graph = GraphProfile(8.0, 10, None, None, 1, None, "job", ())
    graphs = {"head": graph, "slm_tree": msgspec.structs.replace(graph, npu_ms=3.0)}
    profile = DeviceProfile("a phone", "15", "sm8850", "k" * 64, "hub", graphs)
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    before = DeviceTimes(head_ms=20.0, slm_pass_ms=15.0, host_ms=6.0)
    assert with_profile(before, read_profile_file(path)) == DeviceTimes(head_ms=8.0, slm_pass_ms=3.0, host_ms=6.0)
    with pytest.raises(HycoError, match="no times of head"):
        with_profile(before, msgspec.structs.replace(profile, graphs={"slm_tree": graph}))
