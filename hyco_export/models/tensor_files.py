"""Tensors of a checkpoint folder by name, read one at a time from one or several safetensors files.

`weight_files` decides which files hold a checkpoint's weights, in transformers' order: a file that the config names,
else `model.safetensors`, else the shards of the index. Other files in the folder are ignored.
"""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
NAMED_WEIGHTS = "transformers_weights"  # field of a config: the file, or index, that transformers then takes
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = f"model{INDEX_SUFFIX}"
ADAPTER_NAME = "adapter_config.json"
FETCH_HINT = "fetch or save the checkpoint again"
MULTIMODAL_PART = "language_model."  # in tensor names of a checkpoint that also has vision and audio towers
IGNORED = (r"\.[kv]_cache_scale$", r"\brotary_emb\.(\w+_)?inv_freq$")  # tensors that transformers does not use
SAVE_HINT = "load it with transformers and save it with save_pretrained, which writes safetensors"


class TensorFiles:
    """Opened shards of one folder.

    Raises:
        CheckpointError: no safetensors, a shard missing, cut short or damaged, one tensor twice; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = {path.name: _opened(path) for path in weight_files(folder)}
        self._owner: dict[str, str] = {}
        for file, shard in self._shards.items():
            for name in shard.keys():  # noqa: SIM118  # a handle, not a dict
                if name in self._owner:
                    raise CheckpointError(f"{folder}: both {self._owner[name]} and {file} hold {name}", FETCH_HINT)
                self._owner[name] = file
        if absent := sorted(_indexed(folder, self._shards) - set(self._owner)):
            raise CheckpointError(f"{folder}: the index names {absent[0]}, which none of its files holds", FETCH_HINT)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError: no such tensor."""
        return tuple(self._shard(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of the element type: U8, I8, F32, BF16. Raises CheckpointError: no such tensor."""
        return str(self._shard(name).get_slice(name).get_dtype())

    def get(self, name: str) -> np.ndarray:
        """A whole tensor; floating-point ones as float32.

        Raises:
            CheckpointError: no such tensor; names it.
        """
        with self._mapped(name) as shard:
            tensor = shard.get_tensor(name)
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a floating-point tensor as float32, without reading the others.

        Raises:
            CheckpointError: no such tensor; names it.
        """
        with self._mapped(name) as shard:
            return shard.get_slice(name)[start:stop].float().numpy().copy()

    def require_finite(self, names: Iterable[str] | None = None) -> None:
        """Refuse infinities and NaN in these tensors, or in all.

        Raises:
            CheckpointError: a tensor holds one; names file, tensor, the first such value and their number.
        """
        for name in sorted(self.names if names is None else names):
            with self._mapped(name) as shard:
                tensor = shard.get_tensor(name)
            if not all_finite(tensor):
                raise CheckpointError(
                    f"{self.folder / self._owner[name]}: {name} {_infinities(tensor)}; weights must be finite",
                    FETCH_HINT,
                )

    def path(self, name: str) -> Path:
        """The file that holds a tensor. Raises CheckpointError: no such tensor."""
        self._shard(name)
        return self.folder / self._owner[name]

    def _mapped(self, name: str) -> safe_open:
        """The shard, mapped anew: pages that a longer-lived map has read would stay in the process's memory."""
        return safe_open(self.path(name), framework="pt")

    def _shard(self, name: str) -> safe_open:
        if name not in self._owner:
            raise CheckpointError(f"checkpoint {self.folder} has no tensor {name}", FETCH_HINT)
        return self._shards[self._owner[name]]


def text_names(files: TensorFiles) -> dict[str, str]:
    """Stored names by the text model's own names; a multimodal checkpoint stores its tensors under longer ones.

    Raises:
        CheckpointError: two stored tensors have the same name in the text model, so that readers may differ.
    """
    found: dict[str, str] = {}
    for stored in sorted(files.names):
        name = stored.replace(MULTIMODAL_PART, "")
        if name in found:
            raise CheckpointError(f"{files.folder}: {found[name]} and {stored} are the same tensor", FETCH_HINT)
        found[name] = stored
    return found


def require_all_read(
    files: TensorFiles, names: Iterable[str], read: Collection[str], ignored: Iterable[str], whole: bool
) -> None:
    """Refuse tensors of a text model that none of its modules reads: the model would run without them.

    Args:
        names: of the checkpoint's tensors, as `text_names` gives them.
        read: names that the model's modules have.
        ignored: patterns of names that transformers ignores, beside `IGNORED`.
        whole: the checkpoint is a text model alone; else only parts that have tensors of the text model are checked.

    Raises:
        CheckpointError: tensors that no module reads; names the first and its file.
    """
    passed_over = [re.compile(pattern) for pattern in (*IGNORED, *ignored)]
    inside = {_part(name) for name in read}
    unread = [
        name
        for name in sorted(set(names) - set(read))
        if (whole or _part(name) in inside) and not any(pattern.search(name) for pattern in passed_over)
    ]
    if unread:
        raise CheckpointError(
            f"{files.folder} holds {len(unread)} tensors that the model of its config does not have, first {unread[0]}",
            "merge adapters into the weights, or correct config.json: the model would run without these tensors",
        )


def _part(name: str) -> str:
    """The part of a text model that a tensor belongs to, such as `model.layers` or `lm_head`."""
    names = name.split(".")
    return ".".join(names[: 2 if names[0] == "model" else 1])


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold a checkpoint's weights, in name order; none of them opened.

    Raises:
        CheckpointError: there are none, one that the index names is missing, or the folder holds an adapter.
    """
    if (folder / ADAPTER_NAME).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER_NAME}), a checkpoint's weights must be whole",
            "merge it into its base model (peft: merge_and_unload) and save that",
        )
    named = _named_weights(folder)
    if named is None:
        named = SINGLE_NAME if (folder / SINGLE_NAME).is_file() else INDEX_NAME
    _require_beside(folder, [named], CONFIG_NAME)
    path = folder / named
    if not path.is_file():
        others = sorted(
            file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern) if file.is_file()
        )
        rule = f"; weights are not read from {', '.join(others)}" if others else ""
        wanted = folder / SINGLE_NAME if named == INDEX_NAME else path
        raise CheckpointError(
            f"{wanted} does not exist, nor an index of its shards{rule}", SAVE_HINT if others else FETCH_HINT
        )
    if not named.endswith(INDEX_SUFFIX):
        return (path,)
    names = sorted(set(_weight_map(path).values()))
    _require_beside(folder, names, path.name)
    shards = tuple(folder / name for name in names)
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{missing[0]} does not exist; {path.name} names {len(shards)} files, {len(missing)} are missing",
            FETCH_HINT,
        )
    return shards


def _require_beside(folder: Path, names: Iterable[str], stated_in: str) -> None:
    """Refuse weights outside the checkpoint's folder: they are neither fetched nor part of its digest.

    Raises:
        CheckpointError: a name leads to another folder.
    """
    for name in names:
        if os.path.basename(name) != name:
            raise CheckpointError(
                f"{folder / stated_in} names {name!r}, weights are read from the checkpoint's folder alone",
                f"move the file into {folder} and correct {stated_in}, or save the checkpoint again",
            )


def _indexed(folder: Path, files: Collection[str]) -> set[str]:
    """Tensors that the index names; none without an index."""
    index = folder / (_named_weights(folder) or INDEX_NAME)
    if set(files) == {SINGLE_NAME} or not index.name.endswith(INDEX_SUFFIX):
        return set()
    return set(_weight_map(index))


def all_finite(tensor: "torch.Tensor") -> bool:
    """Is every value finite? One pass without a copy: a NaN or an infinity shows in the minimum or the maximum."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    values = tensor if tensor.element_size() > 1 else tensor.to(torch.float16)  # 8-bit floats have no such pass
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(values))


def _infinities(tensor: "torch.Tensor") -> str:
    """The first value that is not finite, its indices, and how many there are."""
    import torch

    places = torch.nonzero(~torch.isfinite(tensor.float()))
    value = float(tensor[tuple(places[0])])
    return f"holds {value} at {places[0].tolist()} ({len(places)} of {tensor.numel()} values are not finite)"


def _named_weights(folder: Path) -> str | None:
    """The file that the config names in place of the usual ones. A config that cannot be read is refused elsewhere."""
    try:
        config = msgspec.json.decode((folder / CONFIG_NAME).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    named: Any = config.get(NAMED_WEIGHTS) if isinstance(config, dict) else None
    return named if isinstance(named, str) else None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
        return msgspec.convert(found, dict[str, str])
    except (OSError, msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: no weight_map of names", FETCH_HINT) from error


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}", FETCH_HINT) from error
