"""Structured mutation: valid messages with a field, an element or a byte made wrong, so that bodies reach every check.

Random bytes end in the decoder. A message that is right but for one value ends wherever that value is looked at.
"""

import copy
from typing import Any

import msgspec
import numpy as np

INTEGERS = (
    -(2**63),
    -(2**31) - 1,
    -2,
    -1,
    0,
    1,
    2,
    15,
    16,
    99,
    101,
    255,
    256,
    65_536,
    2**31 - 1,
    2**31,
    2**63,
    2**64 - 1,
)
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e-9, 0.5, 1.0000001, 1e308, -1.0)
OTHERS = (
    None,
    True,
    False,
    "",
    "exact",
    "epsilon",
    "server",
    "device",
    "\x00",
    "é" * 40,
    b"",
    b"\xff" * 8,
    [],
    {},
    [[]],
)
DEEPEST = 1_400  # arrays in arrays, of a body


class Mutator:
    """Mutations by seed."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)

    def body(self, message: msgspec.Struct) -> bytes:
        """A message's bytes: as they are, with values changed, or with bytes changed."""
        fate = self.dice.random()
        plain = msgspec.msgpack.encode(message)
        if fate < 0.1:
            return plain
        if fate < 0.8:
            tree = msgspec.msgpack.decode(plain)
            for _ in range(1 + int(self.dice.geometric(0.6))):
                tree = self._change(tree)
            return msgspec.msgpack.encode(tree)
        return self._bytes(plain)

    def number(self, right: int) -> str:
        """A round's number as it stands in a path: mostly the right one."""
        fate = self.dice.random()
        if fate < 0.85:
            return str(right)
        if fate < 0.95:
            return str(right + int(self.dice.integers(-2, 3)))
        return str(self._pick(("", "0", "-1", "1.0", "²", "1e3", "9" * 30, "%00", "٣")))

    def _change(self, tree: Any) -> Any:
        """The same tree with one change somewhere below; lists are changed in place."""
        if not isinstance(tree, list) or not tree or self.dice.random() < 0.02:
            return self._value(tree)
        place = int(self.dice.integers(len(tree)))
        if isinstance(tree[place], list) and tree[place] and self.dice.random() < 0.7:
            tree[place] = self._change(tree[place])
            return tree
        fate = int(self.dice.integers(7))
        if fate == 0:
            del tree[place]
        elif fate == 1:
            tree.insert(place, self._value(tree[place]))
        elif fate == 2:
            tree.append(tree[place])
        elif fate == 3:
            other = int(self.dice.integers(len(tree)))
            tree[place], tree[other] = tree[other], tree[place]
        elif fate == 4 and isinstance(tree[place], int):
            tree[place] = max(-(2**63), min(2**64 - 1, tree[place] + int(self.dice.integers(-3, 4))))
        else:
            tree[place] = self._value(tree[place])
        return tree

    def _value(self, old: Any) -> Any:
        """Another value, mostly of the old one's type."""
        if self.dice.random() < 0.25:
            return copy.deepcopy(self._pick((*INTEGERS, *FLOATS, *OTHERS)))  # changed in place later, by itself even
        if isinstance(old, bool) or old is None:
            return copy.deepcopy(self._pick(OTHERS))
        if isinstance(old, int):
            return self._pick(INTEGERS)
        if isinstance(old, float):
            return self._pick(FLOATS)
        if isinstance(old, bytes):
            return self.dice.bytes(int(self.dice.integers(0, 12)))
        if isinstance(old, str):
            return self._pick(("", "exact", "epsilon", "typical", "server", "device", "x" * 300, old + "x"))
        if isinstance(old, list):
            return [int(value) for value in self.dice.integers(-1, 17, int(self.dice.integers(0, 120)))]
        return old

    def _bytes(self, plain: bytes) -> bytes:
        fate = int(self.dice.integers(6))
        if fate == 0:
            return self.dice.bytes(int(self.dice.integers(0, 200)))
        if fate == 1:
            return plain[: int(self.dice.integers(0, len(plain)))]
        if fate == 2:
            return plain + plain
        if fate == 3:
            return b"\x91" * int(self.dice.integers(1, DEEPEST)) + plain[:50]
        changed = bytearray(plain)
        for _ in range(int(self.dice.integers(1, 5))):
            changed[int(self.dice.integers(len(changed)))] = int(self.dice.integers(256))
        at = int(self.dice.integers(len(changed)))
        return (
            bytes(changed[:at]) + (self.dice.bytes(int(self.dice.integers(1, 20))) if fate == 4 else b"") + changed[at:]
        )

    def _pick(self, values: tuple[Any, ...]) -> Any:
        return values[int(self.dice.integers(len(values)))]
