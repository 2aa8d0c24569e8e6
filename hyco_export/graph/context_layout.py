"""Memory layout of what `libQnnSystem.so` returns about a context binary (QAIRT 2.51, system API 1.15, x86-64).

The wheel ships no headers: the layout was read from the library's own structures and confirmed on v73, v79 and v81
binaries; `graph.context_binary` refuses another structure version instead of guessing. Knows offsets only.
"""

import ctypes as c

BINARY_INFO_VERSION = 3
GRAPH_INFO_VERSION = 3
SYSTEM_FUNCTIONS = 4  # create, getBinaryInfo, getMetaData, free
CREATE, GET_BINARY_INFO, FREE = 0, 1, 3

# 32-bit words of a graph's own blob
SPILL_FILL_WORD = 2  # a 64-bit number
VTCM_WORD = 4
OPTIMISATION_WORD = 5
GRAPH_BLOB_BYTES = 4 * (OPTIMISATION_WORD + 1)

QUANTISATION_DEFINED = 1
SCALE_OFFSET_ENCODING = 0

# Qnn_DataType_t: plain and fixed-point integers that a graph of ours may exchange
DTYPE_NAMES = {
    0x0008: "int8",
    0x0016: "int16",
    0x0032: "int32",
    0x0064: "int64",
    0x0108: "uint8",
    0x0116: "uint16",
    0x0132: "uint32",
    0x0216: "float16",
    0x0232: "float32",
    0x0304: "int4",
    0x0308: "int8",
    0x0316: "int16",
    0x0332: "int32",
    0x0404: "uint4",
    0x0408: "uint8",
    0x0416: "uint16",
    0x0432: "uint32",
    0x0508: "bool",
}


class Provider(c.Structure):
    """One entry of QnnSystemInterface_getProviders: a header, then the function table."""

    _fields_ = [
        ("backend_id", c.c_uint32),
        ("name", c.c_char_p),
        ("version", c.c_uint32 * 3),
        ("functions", c.c_void_p * SYSTEM_FUNCTIONS),
    ]


class QuantParams(c.Structure):
    """Per-tensor scale and offset; other encodings use the same 32 bytes for pointers."""

    _fields_ = [
        ("defined", c.c_uint32),
        ("encoding", c.c_uint32),
        ("scale", c.c_float),
        ("offset", c.c_int32),  # = -zero_point
        ("other", c.c_uint64 * 3),
    ]


class Tensor(c.Structure):
    """One input or output: 144 bytes, whichever version."""

    _fields_ = [
        ("version", c.c_uint32),
        ("id", c.c_uint64),  # 32 bits, then padding before the pointer
        ("name", c.c_char_p),
        ("type", c.c_uint32),
        ("format", c.c_uint32),
        ("dtype", c.c_uint32),
        ("quantisation", QuantParams),
        ("rank", c.c_uint32),
        ("dims", c.POINTER(c.c_uint32)),
        ("memory_type", c.c_uint32),
        ("data", c.c_void_p),
        ("data_bytes", c.c_uint32),
        ("is_dynamic", c.c_void_p),
        ("sparse", c.c_uint32 * 3),
        ("is_produced", c.c_uint8),
    ]


class Graph(c.Structure):
    """One graph of a binary: 88 bytes."""

    _fields_ = [
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("input_count", c.c_uint32),
        ("inputs", c.POINTER(Tensor)),
        ("output_count", c.c_uint32),
        ("outputs", c.POINTER(Tensor)),
        ("updatable_count", c.c_uint32),
        ("updatables", c.POINTER(Tensor)),
        ("blob_bytes", c.c_uint32),
        ("blob", c.POINTER(c.c_uint32)),
        ("reserved", c.c_void_p),
    ]


class ContextBlob(c.Structure):
    """The HTP's own part of a binary's description."""

    _fields_ = [("version", c.c_uint32), ("htp_arch", c.c_uint32)]


class BinaryInfoBody(c.Structure):
    """Version 3 of a binary's description."""

    _fields_ = [
        ("backend_id", c.c_uint32),  # 6 = HTP
        ("build_id", c.c_char_p),
        ("core_api", c.c_uint32 * 3),
        ("backend_api", c.c_uint32 * 3),
        ("soc_version", c.c_char_p),
        ("blob_version", c.c_uint32 * 3),
        ("blob_bytes", c.c_uint64),
        ("context_tensor_count", c.c_uint32),
        ("context_tensors", c.POINTER(Tensor)),
        ("graph_count", c.c_uint32),
        ("graphs", c.POINTER(Graph)),
        ("reserved", c.c_void_p),
        ("context_blob_bytes", c.c_uint32),
        ("context_blob", c.POINTER(ContextBlob)),
        ("soc_model", c.c_uint32),
    ]


class BinaryInfo(c.Structure):
    """A binary's description: the version says what follows."""

    _fields_ = [("version", c.c_uint32), ("body", BinaryInfoBody)]


CreateFunction = c.CFUNCTYPE(c.c_uint64, c.POINTER(c.c_void_p))
BinaryInfoFunction = c.CFUNCTYPE(
    c.c_uint64, c.c_void_p, c.c_void_p, c.c_uint64, c.POINTER(c.POINTER(BinaryInfo)), c.POINTER(c.c_uint64)
)
FreeFunction = c.CFUNCTYPE(c.c_uint64, c.c_void_p)
