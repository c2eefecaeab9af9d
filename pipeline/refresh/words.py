"""What has changed, in words: ``base 3f2a1c0 -> 91be07a``, ``vLLM 0.32.0 -> 0.33.0``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pipeline.canonical import ABSENT
from pipeline.refresh.causes import RECIPE, Change, keys

_HEX: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"(?<=@sha256:)([0-9a-f]{7})[0-9a-f]{57}")
_LONGEST: Final = 40
_NAMES: Final = {"vllm": "vLLM"}


def what_changed(changes: Sequence[Change]) -> tuple[str, ...]:
    """One phrase for each thing that is another now, each once, what all else follows from first.

    A stage whose settings follow from a line of the recipe is not told beside that line, nor a launch beside the
    version of vLLM that it is planned for.
    """
    edited = any(change.stage == RECIPE and change.cause == "recipe" for change in changes)
    upgraded = any(keys(change.path) == ("tools", "vllm") for change in changes)

    def follows(change: Change) -> bool:
        if change.stage == RECIPE:
            return False
        launched = keys(change.path)[:2] == ("settings", "launch")
        return (change.cause == "recipe" and edited) or (launched and upgraded) or (launched and change.cause == "base")

    told = [phrase(change) for change in changes if not follows(change)]
    return tuple(dict.fromkeys(told))


def phrase(change: Change) -> str:
    """One change for people."""
    return f"{_subject(change)} {_arrow(change)}"


def _subject(change: Change) -> str:
    at = keys(change.path)
    if change.stage == RECIPE:
        return f"recipe: {change.path}"
    match at:
        case ():
            return f"stage {change.stage}"
        case ("tools", str(tool)):
            return _NAMES.get(tool, tool)
        case ("version",):
            return f"quantmint's stage {change.stage}"
        case ("settings", "image"):
            return "image"
        case ("settings", "prompts"):
            return "canary prompts"
        case ("settings", "set", "revision" | "file") | ("settings", "calibration", "set", "revision" | "file"):
            return "calibration data"
        case ("settings", "tasks", str(task), "data", *more):
            return f"data of {task}{''.join(f', {one}' for one in more)}"
        case ("settings", "tasks", str(task), "files", *_):
            return f"data of {task}"
    if change.cause == "base":
        return "base"
    return f"{_family(change.stage)}: {'.'.join(map(str, at[1:]))}"


def _family(stage: str) -> str:
    """Both sides are launched alike, and told once."""
    return stage.removesuffix("-baseline").removesuffix("-candidate")


def _arrow(change: Change) -> str:
    if change.before is ABSENT:
        return f"is new: {shown(change.after)}" if keys(change.path) else "is new"
    if change.after is ABSENT:
        return f"is gone: {shown(change.before)}" if keys(change.path) else "is gone"
    return f"{shown(change.before)} -> {shown(change.after)}"


def shown(value: object) -> str:
    """A value in few characters: of a digest what tells it apart."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    if _HEX.fullmatch(text):
        return text[:7]
    text = _DIGEST.sub(r"\1", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
