"""The files of weights in a model folder, by its index where there is one; a single file beside an index is stale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from quantmint.calibration.errors import CalibrationError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """Return the names of a folder's weight files, sorted, and the file of each tensor by the index (None without one).

    Raises `CalibrationError` for an index that is malformed or names files outside the folder, for files that are
    missing, and for weights that are not safetensors; a second line of the message may say what to do.
    """
    if (folder / INDEX_NAME).is_file():
        return _indexed(folder)
    if (folder / SINGLE_NAME).is_file():
        return (SINGLE_NAME,), None
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CalibrationError(
            f"{folder}: its weights are pickled ({pickled[0]}), which can run code; only safetensors are read.\n"
            "Use a revision that has *.safetensors, or convert the weights on a machine you can afford to lose."
        )
    raise CalibrationError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there.")


def _indexed(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    path = folder / INDEX_NAME
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}.") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise CalibrationError(f"{path}: expected a non-empty 'weight_map'.")
    files = tuple(sorted(set(map(str, places.values()))))
    outside = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise CalibrationError(f"{path}: {outside[0]!r} is not the name of a safetensors file beside it.")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CalibrationError(
            f"{folder}: the index names {len(files)} files, {len(missing)} are missing: {', '.join(missing[:5])}.\n"
            "Fetch the missing files; an interrupted download can be resumed."
        )
    return files, {str(name): str(file) for name, file in places.items()}
