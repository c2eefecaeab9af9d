"""Who hears how rounds go, as one callback: a webhook, and Prometheus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.upkeep.fleet.events import Event

if TYPE_CHECKING:
    from pipeline.upkeep.notices.metrics import Metrics
    from pipeline.upkeep.notices.webhook import Webhook


@dataclass(frozen=True)
class Outlets:
    """A webhook, and metrics, where somebody wants them. Neither `hear` nor `plan` raises."""

    hook: Webhook | None
    metrics: Metrics | None

    def hear(self, event: Event) -> None:
        """Pass an event on."""
        if self.hook is not None:
            self.hook.send(event)
        if self.metrics is not None:
            self.metrics.hear(event)

    def plan(self, fires: Mapping[str, float]) -> None:
        """Pass on when each recipe's schedule comes next (seconds since the epoch)."""
        if self.metrics is not None:
            self.metrics.plan(fires)


@contextmanager
def outlets(
    store: Path,
    *,
    warn: Callable[[str], None],
    metrics_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Outlets]:
    """Everything that is wanted; at the exit, what is still to be sent has a few seconds.

    The webhook comes from the environment: QUANTMINT_WEBHOOK, and QUANTMINT_WEBHOOK_SECRET for its signature. Raises
    `UserError` for an address or a file that cannot be used.
    """
    metrics = hook = None
    if metrics_file is not None:
        from pipeline.upkeep.notices.metrics import Metrics

        metrics = Metrics(metrics_file, store, warn=warn)
    if address := environ.get("QUANTMINT_WEBHOOK", "").strip():
        from pipeline.upkeep.notices.webhook import Webhook

        hook = Webhook(address, secret=environ.get("QUANTMINT_WEBHOOK_SECRET", "").encode() or None, warn=warn)
    try:
        yield Outlets(hook, metrics)
    finally:
        if hook is not None:
            hook.close()
