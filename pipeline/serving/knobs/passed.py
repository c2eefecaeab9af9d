"""Arguments of ``vllm serve`` that the table has nothing to say about: parsers of tool calls, chat templates, ...

    >>> [reason.knob for reason in checked_arguments(["--reasoning-parser", "deepseek_r1"])]
    ['--reasoning-parser']

They are passed on as they are; whether a version of vLLM knows them is its own parser's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import UserError
from pipeline.serving.knobs.table import table
from pipeline.serving.plan import Reason

_KEYS = frozenset({"--api-key", "--hf-token"})


def checked_arguments(arguments: Sequence[str]) -> tuple[Reason, ...]:
    """Why each is there. UserError for a word that belongs to no flag, a knob of the table, and a secret."""
    found: list[Reason] = []
    for word in arguments:
        if not word.startswith("--"):
            if not found:
                raise UserError(
                    f"arguments for vllm serve: found {word!r} first, expected a flag such as --chat-template"
                )
            last = found[-1]
            found[-1] = last._replace(value=word if last.value == "on" else f"{last.value} {word}")
            continue
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _KEYS:
            raise UserError(
                f"{name} would stand in the process list, in logs and in records",
                hint="Servers listen on the loopback interface; a proxy before them asks for keys.",
            )
        knob = next((known for known in (name, f"--{name.removeprefix('--no-')}") if known in table()), None)
        if knob is not None:
            raise UserError(
                f"{name} is a knob of the plan, which would not know of it",
                hint=f"Say it with --set {knob.removeprefix('--')}=VALUE, or under `serve: knobs:` of the recipe.",
            )
        found.append(Reason(name, value or "on", "passed on as it was given", "given"))
    return tuple(found)
