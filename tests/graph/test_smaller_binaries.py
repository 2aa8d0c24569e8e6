"""True 2-bit weights: the same outputs bit for bit from a smaller binary, and a clean way out without a compiler."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hyco_export.core.device_spec import to_integers
from hyco_export.core.network.host import SlmHost
from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph import smaller_binaries
from hyco_export.graph.qnn import CompiledContext, compile_context, open_context
from hyco_export.graph.qnn import two_bit_backend as build
from hyco_export.graph.qnn_process import TwoBit
from hyco_export.graph.smaller_binaries import LIBRARY, VENDOR_LIBRARIES, build_backend, find_compiler
from tests.support.qdq_builder import QdqBuilder, random_linear
from tests.support.slm_parts import MASK_VALUE, embedded_slm_parts

SM8850 = TARGETS["sm8850"]
WIDTH = 256
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def two_linears() -> QdqBuilder:
    """x -> `narrow`, integers in [-2, 1] -> `wide`, integers in [-8, 7] -> y; both INT4 in the graph."""
    rng = np.random.default_rng(0)
    builder = QdqBuilder()
    x = builder.input("x", (4, WIDTH), -4, 4)
    narrow = builder.weight("narrow", *random_linear(rng, WIDTH, WIDTH, -2, 1), axis=0)
    out = builder.node("Gemm", [builder.real(x), narrow], ["h_out"], transB=1)
    h = builder.quantize(out, "h", (4, WIDTH), -4, 4)
    wide = builder.weight("wide", *random_linear(rng, 32, WIDTH), axis=0)
    out = builder.node("Gemm", [builder.real(h), wide], ["y_out"], transB=1)
    builder.output(builder.quantize(out, "y", (4, 32), -8, 8))
    return builder


def outputs(context: CompiledContext) -> np.ndarray:
    feed = {"x": np.random.default_rng(1).integers(0, 65536, (4, WIDTH)).astype(np.uint16)}
    with open_context(context.context_model, SM8850) as session:  # the vendor's own backend loads either binary
        return session.run(feed)["y"]


@needs_compiler
def test_outputs_stay_bit_for_bit_and_the_binary_shrinks(tmp_path: Path, cache: Path) -> None:
    model = two_linears().save(tmp_path / "pair.onnx")
    plain = compile_context(model, tmp_path, "plain", SM8850, tmp_path / "log")
    two_bit = TwoBit(str(build(cache)), ("narrow",))
    small = compile_context(model, tmp_path, "small", SM8850, tmp_path / "log", two_bit)
    assert (plain.two_bit_weights, small.two_bit_weights) == (0, 1)
    assert np.array_equal(outputs(plain), outputs(small))
    saved = plain.binary_bytes - small.binary_bytes
    assert saved == pytest.approx(WIDTH * WIDTH / 4, rel=0.3)  # a quarter of a byte a weight


@needs_compiler
def test_the_embedded_slm_computes_the_same_bit_for_bit(tmp_path: Path, cache: Path) -> None:
    parts = embedded_slm_parts()
    model = tmp_path / "slm_tree.onnx"
    onnx.save(parts.tree_model, model)
    names = tuple(name for name, matrix in parts.weights.integer_matrices().items() if matrix.bits == 2)
    assert len(names) > 5
    host = SlmHost(parts.network, parts.tables, parts.tree.input("embeds").shape[0], MASK_VALUE)
    feeds = to_integers(parts.tree.inputs, host.feeds(range(5, 37), range(-1, 31)))
    found, sizes = [], []
    for two_bit in (None, TwoBit(str(build(cache)), names)):
        context = compile_context(model, tmp_path, "slm_tree", SM8850, tmp_path / "log", two_bit)
        sizes.append(context.binary_bytes)
        with open_context(context.context_model, SM8850) as session:
            found.append(session.run(feeds))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0]) and len(found[0]) > 1
    weights = sum(parts.weights.integer_matrices()[name].integers.size for name in names)
    assert sizes[0] - sizes[1] > 0.8 * weights / 4  # a quarter of a byte each


@needs_compiler
@pytest.mark.parametrize("name", ["wide", "absent"])
def test_a_weight_that_cannot_be_narrowed_is_an_error(name: str, tmp_path: Path, cache: Path) -> None:
    model = two_linears().save(tmp_path / "pair.onnx")
    two_bit = TwoBit(str(build(cache)), ("narrow", name))
    with pytest.raises(
        CompileError, match=r"1 of 2 weights of pair went into the binary with 2 bits .*two_bit_weights"
    ):
        compile_context(model, tmp_path, "pair", SM8850, tmp_path / "log", two_bit)
    assert not list(tmp_path.glob("pair_ctx*"))


@needs_compiler
def test_other_widths_are_left_alone(tmp_path: Path, cache: Path) -> None:
    builder = QdqBuilder()
    x = builder.input("x", (4, 32), -4, 4)
    weight = builder.weight("narrow", *random_linear(np.random.default_rng(0), 32, 32, -2, 1), 0, TensorProto.INT8)
    out = builder.node("Gemm", [builder.real(x), weight], ["y_out"], transB=1)
    builder.output(builder.quantize(out, "y", (4, 32), -8, 8))
    with pytest.raises(CompileError, match="0 of 1 weights"):
        compile_context(
            builder.save(tmp_path / "m.onnx"),
            tmp_path,
            "m",
            SM8850,
            tmp_path / "log",
            TwoBit(str(build(cache)), ("narrow",)),
        )


@needs_compiler
def test_built_once_beside_links_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(cache)
    assert sorted(path.name for path in library.parent.iterdir()) == sorted((LIBRARY, *VENDOR_LIBRARIES))
    assert all((library.parent / name).is_symlink() and (library.parent / name).exists() for name in VENDOR_LIBRARIES)
    monkeypatch.setattr(smaller_binaries, "find_compiler", lambda: None)
    assert build(cache) == library  # found, not built again
    assert [path.name for path in library.parent.parent.iterdir()] == [library.parent.name]


def test_another_vendor_library_is_another_backend(tmp_path: Path) -> None:
    folders = {
        smaller_binaries.backend_folder(vendor, version, tmp_path)
        for vendor in (tmp_path / "a", tmp_path / "b")
        for version in ("2.51.0", "2.52.0")
    }
    assert len(folders) == 4


def test_no_compiler_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smaller_binaries, "find_compiler", lambda: None)
    with pytest.raises(CompileError, match=r"no C compiler was found \(\$CC, cc\) \(install one"):
        build_backend(tmp_path / "vendor", "1", tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@needs_compiler
def test_source_that_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main(\n")
    monkeypatch.setattr(smaller_binaries, "SOURCE", broken)
    with pytest.raises(CompileError, match=r"cannot build broken\.c: "):
        build_backend(tmp_path / "vendor", "1", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
