"""When a checkpoint is looked at again, and what then makes it anew."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from pipeline.recipe.section import Section, wrong

Cause = Literal["base", "dataset", "recipe", "toolchain", "serving"]
"""What can change between two releases of a recipe."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


def _cron(expression: str) -> str:
    from pipeline.schedule.cron import fault_of

    fault = fault_of(expression)
    if fault is not None:
        raise wrong(f"a cron expression of five fields ({fault})")
    return expression


def _zone(name: str) -> str:
    from zoneinfo import ZoneInfo, available_timezones

    from pipeline.recipe.faults import did_you_mean

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        near = did_you_mean(name, sorted(available_timezones()))
        raise wrong(f"a time zone of the IANA database, such as Europe/Paris{near}") from None
    return name


class Refresh(Section):
    """When `quantmint schedule` looks whether the recipe is due, and what `requantize` may spend on it."""

    schedule: Annotated[str, AfterValidator(_cron)] | None = Field(
        default=None,
        description="Cron expression of five fields (minute, hour, day of month, month, day of week), with Debian "
        "cron's meaning: 0 3 * * 6 (null: only when somebody asks).",
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", description="Time zone of the expression, by its IANA name: Europe/Berlin."
    )
    missed: Literal["run", "skip"] = Field(
        default="run",
        description="A time at which no scheduler ran. run: once, when one runs again, however many were missed. skip: "
        "the next time is waited for.",
    )
    triggers: tuple[Cause, ...] = Field(
        default=CAUSES,
        strict=False,
        min_length=1,
        description="What makes it due. base: a new commit of the model. dataset: of a calibration or evaluation "
        "set. recipe: the recipe itself. toolchain: quantmint or a library that shapes bytes or scores. serving: vLLM, "
        "its image or the launch plan.",
    )
    priority: int = Field(default=0, ge=-100, le=100, description="What is due is run highest first, then by name.")
    max_hours: float | None = Field(
        default=None, gt=0, description="Hours that one attempt may take before it is ended (null: no limit)."
    )
