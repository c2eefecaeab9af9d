"""A model folder: its configuration, its shards, and where each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.formats.header import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder in the Hugging Face layout; ``tensors`` maps each name to its shard's file name and place."""

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[str, ...]
    tensors: Mapping[str, tuple[str, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for _, info in self.tensors.values())

    def in_shard(self, shard: str) -> tuple[TensorInfo, ...]:
        """The tensors of one shard, in file order."""
        infos = [info for name, info in self.tensors.values() if name == shard]
        return tuple(sorted(infos, key=lambda info: info.start))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `UserError` with the line and column of a fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder and prove that configuration, index and shards agree.

    Raises `UserError` for a missing ``config.json``, weights that are not safetensors, shards that the index names
    but the folder lacks, tensors that the index places elsewhere than they are, and names that leave the folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.", hint="A model folder holds config.json and *.safetensors.")
    config = read_json(folder / "config.json")
    shards, placed = _shards(folder)
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise UserError(f"{folder}: tensor {name!r} is in {tensors[name][0]} as well as in {shard}.")
            tensors[name] = (shard, info)
    if placed is not None:
        _agree(folder, placed, tensors)
    return Checkpoint(folder, config, shards, tensors)


def _shards(folder: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    if (folder / INDEX_NAME).is_file():
        weight_map = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{folder / INDEX_NAME}: expected a non-empty 'weight_map'.")
        shards = tuple(sorted(set(map(str, weight_map.values()))))
        strange = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
        if strange:
            raise UserError(f"{folder / INDEX_NAME}: {strange[0]!r} is not the name of a safetensors file beside it.")
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder}: the index names {len(shards)} files, {len(missing)} are missing: {', '.join(missing[:5])}.",
                hint="Fetch the missing files; an interrupted download can be resumed.",
            )
        return shards, {str(name): str(shard) for name, shard in weight_map.items()}
    if (folder / SINGLE_NAME).is_file():
        return (SINGLE_NAME,), None
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"{folder}: its weights are pickled ({pickled[0]}), which can run code; only safetensors are read.",
            hint="Use a revision that has *.safetensors, or convert the weights on a machine you can afford to lose.",
        )
    raise UserError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there.")


def _agree(folder: Path, placed: Mapping[str, str], tensors: Mapping[str, tuple[str, TensorInfo]]) -> None:
    for name, shard in placed.items():
        if name not in tensors:
            raise UserError(f"{folder / INDEX_NAME}: places {name!r} in {shard}, which does not hold it.")
        if tensors[name][0] != shard:
            raise UserError(f"{folder / INDEX_NAME}: places {name!r} in {shard}; it is in {tensors[name][0]}.")
    unlisted = sorted(set(tensors) - set(placed))
    if unlisted:
        raise UserError(
            f"{folder / INDEX_NAME}: does not list {len(unlisted)} tensors that are there: {unlisted[0]!r}…"
        )
