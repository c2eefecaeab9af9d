"""What a resident scheduler says: lines for people, or a JSON object a line for programs that read logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from pipeline.fleet.events import Event, now_utc


@dataclass(frozen=True, slots=True)
class Journal:
    """``write`` takes a line without its end. Both forms say the same, and hold no address and no secret."""

    write: Callable[[str], None]
    as_json: bool = False

    def tell(self, event: str, text: str, **fields: object) -> None:
        """Something that the scheduler did or found: a word for programs, a sentence for people, the facts."""
        at = now_utc()
        self.write(json.dumps({"event": event, "at": at, **fields}) if self.as_json else f"{at} {text}")

    def warn(self, text: str) -> None:
        """Something that is not as it should be, and stops nothing."""
        self.tell("warning", f"warning: {text}", message=text)

    def hear(self, event: Event) -> None:
        """Something that the fleet did."""
        if self.as_json:
            facts = {name: value for name, value in asdict(event).items() if value not in (None, "", ())}
            self.write(json.dumps({"event": facts.pop("kind"), **facts}))
        elif event.kind != "stage":
            self.write(f"{event.at} {event.recipe}: {_words(event)}")


def shown(moment: datetime, zone: str) -> str:
    """A time for people, by the clock of a zone: ``Sat 2026-03-28 03:00 CET``."""
    return moment.astimezone(ZoneInfo(zone)).strftime("%a %Y-%m-%d %H:%M %Z")


def span(length: timedelta) -> str:
    """A length of time in its two largest units: ``2 d 3 h``, ``5 min``."""
    minutes = max(0, round(length.total_seconds() / 60))
    parts = ((minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min"))
    shown = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(shown[:2]) or "less than a minute"


def _words(event: Event) -> str:
    how = [event.kind if event.state in (None, "ran", "held") else f"{event.kind}, {event.state}"]
    how += [event.verdict] if event.verdict else []
    how += [f"exit {event.exit_code}"] if event.exit_code else []
    how += [f"after {span(timedelta(seconds=event.duration_s))}"] if event.duration_s else []
    how += [f"again in {event.wait_s:.0f} s"] if event.wait_s is not None else []
    how += [f"released as {event.tag}"] if event.tag else []
    how += [event.reason] if event.reason else []
    return ", ".join(how)
