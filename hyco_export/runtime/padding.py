"""Replies padded to multiples of one size: whoever watches a TLS link sees sizes, and sizes tell how many drafts were
accepted, which tells what is written (Wei et al., "Privacy Risks of Speculative Decoding in LLMs", arXiv 2411.01076).

Padding is one more element behind a message's array, which readers ignore (PROTOCOL.md, chapter 2). It hides no times.
"""

FIXARRAY = 0x90  # MessagePack: an array of n < 16 elements begins with 0x90 + n
FIXARRAY_MOST = 15
BIN32 = b"\xc6"
BIN32_HEADER_BYTES = 5  # whatever the length: a shorter header would make some sizes unreachable
HEADER = "Hyco-Padding"
LARGEST_STEP_BYTES = 1 << 24  # above every reply there is (6.3 MB in the paper); clients take no answer of 64 MiB
HEADER_DIGITS = 9  # always so many: the header must not tell what the padding hides


def pad(body: bytes, step_bytes: int) -> bytes:
    """A message (an array) of the next multiple of `step_bytes`.

    Raises:
        ValueError: the body is no array, or has no room for one more element.
    """
    count = body[0] - FIXARRAY
    if not 0 <= count < FIXARRAY_MOST:
        raise ValueError(f"a body that begins with 0x{body[0]:02x} is no array with room for its padding")
    size = padded_size(len(body), step_bytes)
    zeros = size - len(body) - BIN32_HEADER_BYTES
    return bytes([body[0] + 1]) + body[1:] + BIN32 + zeros.to_bytes(4, "big") + bytes(zeros)


def padding_bytes(header: str) -> int:
    """How many bytes of a body are padding by its header; 0 where that is none of ours."""
    return int(header) if len(header) == HEADER_DIGITS and header.isascii() and header.isdecimal() else 0


def padded_size(size_bytes: int, step_bytes: int) -> int:
    """Size of a padded body of `size_bytes`."""
    return -(-(size_bytes + BIN32_HEADER_BYTES) // step_bytes) * step_bytes
