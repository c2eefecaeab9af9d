"""Compare a release with a plan of now, and name the kind of each change.

Pure: a manifest and a plan's payloads go in, changes come out. The place of a difference decides its cause:

    settings of source                        base
    a data set's commit, a file's digest      dataset
    versions of tools, stages and quantmint   toolchain; of vLLM: serving
    a key that the release did not know yet   toolchain, as a new default
    a stage that came or went                 recipe where that was edited, else toolchain
    launch and image of the servers           serving
    a line of the recipe                      recipe, and whatever else of the settings follows from it

A fingerprint of an input only follows from a change elsewhere and is none; nor is what draws a page: report, package,
sign and publish.
`what_changed` says it in words: ``base 3f2a1c0 -> 91be07a``, ``vLLM 0.32.0 -> 0.33.0``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantmint.pipeline.base.canonical import ABSENT, Json, difference
from quantmint.pipeline.publish.manifest import Manifest
from quantmint.pipeline.recipe.faults import YamlPath
from quantmint.pipeline.recipe.sections import Cause

RECIPE: Final = "recipe"
"""The ``stage`` of a change that is a line of the recipe."""
_VLLM: Final = "vllm"
_QUANTMINT: Final = "quantmint"
_DRAWN: Final = ("report", "package", "sign", "publish")
"""Stages after the gate: of their settings the manifest holds the recipe, and their tools shape no number."""
_SERVED: Final = ("serve", "target", "evaluation", "quantization", "trust_remote_code")
"""Sections of a recipe that a launch follows from."""
_HEX: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"(?<=@sha256:)([0-9a-f]{7})[0-9a-f]{57}")
_LONGEST: Final = 40
_NAMES: Final = {"vllm": "vLLM"}
_PART: Final = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]|\[(?P<quoted>\"(?:[^\"\\]|\\.)*\")\]")


@dataclass(frozen=True, slots=True)
class DueChange:
    """A difference between a release and the present plan.

    ``stage`` is the key of the stage whose payload holds it, "recipe" for a line of the recipe itself. ``path`` is as
    in `pipeline.base.canonical.JsonDifference` (``$.settings.commit``), or the recipe's key (``gate.accuracy.margin``).
    ``before`` or ``after`` is `pipeline.base.canonical.ABSENT` on a side without a value at the path.
    """

    cause: Cause
    stage: str
    path: str
    before: Any
    after: Any

    def to_json(self) -> dict[str, Json]:
        """Return a mapping of the fields; ``before`` or ``after`` is left out if that side has no value."""
        sides = {"before": self.before, "after": self.after}
        return {
            "cause": self.cause,
            "stage": self.stage,
            "path": self.path,
            **{side: value for side, value in sides.items() if value is not ABSENT},
        }


def changes(
    released: Manifest,
    payloads: Mapping[str, Mapping[str, Any]],
    recipe: Mapping[str, Any],
    *,
    written: Collection[YamlPath],
    quantmint: str,
) -> tuple[DueChange, ...]:
    """Return the differences between what a release was made from and the present plan.

    ``payloads`` are the plan's by the keys of its stages, ``recipe`` is `LoadedRecipe.text_proven` as a mapping,
    ``written`` are the paths that the recipe states instead of leaving them to a default, ``quantmint`` is this
    version.
    """
    due: list[DueChange] = []
    for line in difference(released.recipe, recipe):
        at = keys(line.path)
        # A key that the release's quantmint did not know yet, and that nobody has written, is a new default.
        fresh = line.old is ABSENT and not any(place[: len(at)] == at for place in written)
        why: Cause = "toolchain" if fresh else "recipe"
        due.append(DueChange(why, RECIPE, line.path.removeprefix("$."), line.old, line.new))
    edited = frozenset(keys(change.path) for change in due if change.cause == "recipe")
    if released.quantmint != quantmint:
        due.append(DueChange("toolchain", "package", f"$.tools.{_QUANTMINT}", released.quantmint, quantmint))
    follows: Cause = "recipe" if edited else "toolchain"
    for key in (*payloads, *(key for key in released.stages if key not in payloads)):
        if key in _DRAWN:
            continue
        before, payload = released.stages.get(key), payloads.get(key)
        if before is None or payload is None:
            sides = (ABSENT if before is None else key, ABSENT if payload is None else key)
            due.append(DueChange(follows, key, "$", *sides))
            continue
        moved = any(change.cause == "base" for change in due)
        for setting in difference(_by_name(before.payload), _by_name(payload)):
            at = keys(setting.path)
            if at[0] != "inputs":
                due.append(DueChange(_cause(key, at, edited, moved), key, setting.path, setting.old, setting.new))
    return tuple(due)


def keys(path: str) -> YamlPath:
    """Return the parts of a path: ``$.tools["lm-eval"]`` is ("tools", "lm-eval"), ``a[0]`` is ("a", 0)."""
    parts = _PART.finditer(path if path.startswith("$") else f".{path}")
    return tuple(
        int(part["index"]) if part["index"] else part["key"] or str(json.loads(part["quoted"])) for part in parts
    )


def tool_of(change: DueChange) -> str | None:
    """Return the name of the tool whose version changed; None for a change of another kind."""
    match keys(change.path):
        case ("tools", str(name)) if change.stage != RECIPE:
            return name
    return None


def apart_from_unknown(due: Collection[DueChange]) -> tuple[frozenset[str], tuple[DueChange, ...]]:
    """Return the tools that are not installed here, and the changes without those that only their absence causes.

    A version that is absent here cannot be compared. Without vLLM, changes of the launch are left out too, because they
    follow from its version.
    """
    tools = frozenset(tool for change in due if change.after == "absent" and (tool := tool_of(change)) is not None)
    launched = _VLLM in tools
    return tools, tuple(
        change
        for change in due
        if tool_of(change) not in tools and not (launched and keys(change.path)[:2] == ("settings", "launch"))
    )


def _cause(stage: str, at: YamlPath, edited: Collection[YamlPath], moved: bool) -> Cause:
    """Return the cause of a difference at the path ``at`` in a stage's payload.

    ``edited`` are the lines of the recipe that were changed, ``moved`` says whether the source model has a new commit.
    """
    line: YamlPath | None = None  # which chooses the data whose content stands there
    match at:
        case ("tools", tool, *_):
            return "serving" if tool == _VLLM else "toolchain"
        case ("version",):
            return "toolchain"
        case ("settings", "image"):
            return "serving"
        case ("settings", "launch", *_):
            follows: Cause = "base" if moved else "serving"
            return "recipe" if any(_touched((section,), edited) for section in _SERVED) else follows
        case ("settings", "set", "revision" | "file") | ("settings", "calibration", "set", "revision" | "file"):
            line = ("calibration", "set")
        case ("settings", "tasks", _, "files" | "data", *_) | ("settings", "prompts"):
            line = ("evaluation", "suite")
    if stage == "source":
        return "recipe" if _touched(("source",), edited) else "base"
    return "dataset" if line is not None and not _touched(line, edited) else "recipe"


def _touched(line: YamlPath, edited: Collection[YamlPath]) -> bool:
    return any(place[: len(line)] == line or line[: len(place)] == place for place in edited)


def _by_name(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = payload["settings"]
    tasks = settings.get("tasks")
    if not (isinstance(tasks, list | tuple) and all(isinstance(task, dict) for task in tasks)):
        return payload
    return {**payload, "settings": {**settings, "tasks": {str(task["task"]): task for task in tasks}}}


def what_changed(changes: Sequence[DueChange]) -> tuple[str, ...]:
    """Return a phrase for each change, without repetitions.

    Changes that follow from an edited line of the recipe, from another version of vLLM or from a new source model are
    left out beside it.
    """
    edited = any(change.stage == RECIPE and change.cause == "recipe" for change in changes)
    upgraded = any(keys(change.path) == ("tools", "vllm") for change in changes)

    def follows(change: DueChange) -> bool:
        if change.stage == RECIPE:
            return False
        launched = keys(change.path)[:2] == ("settings", "launch")
        return (change.cause == "recipe" and edited) or (launched and upgraded) or (launched and change.cause == "base")

    return tuple(dict.fromkeys(phrase(change) for change in changes if not follows(change)))


def phrase(change: DueChange) -> str:
    """Return one change in words, such as ``base 3f2a1c0 -> 91be07a``."""
    subject, is_stage = _subject(change), not keys(change.path)
    if change.before is ABSENT:
        return f"{subject} is new" if is_stage else f"{subject} is new: {shown(change.after)}"
    if change.after is ABSENT:
        return f"{subject} is gone" if is_stage else f"{subject} is gone: {shown(change.before)}"
    return f"{subject} {shown(change.before)} -> {shown(change.after)}"


def _subject(change: DueChange) -> str:
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
        case ("settings", "set", "revision" | "file") | ("settings", "calibration", "set", "revision" | "file"):
            return "calibration data"
        case ("settings", "tasks", str(task), "data", *path):
            return f"data of {task}{''.join(f', {key}' for key in path)}"
        case ("settings", "tasks", str(task), "files", *_):
            return f"data of {task}"
    if change.cause == "base":
        return "base"
    stage = change.stage.removesuffix("-baseline").removesuffix("-candidate")  # launched alike, and told once
    return f"{stage}: {'.'.join(map(str, at[1:]))}"


def shown(value: object) -> str:
    """Return a value as short text; digests are cut to their first digits."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    if _HEX.fullmatch(text):
        return text[:7]
    text = _DIGEST.sub(r"\1", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
