"""All that hears of a fleet's events, as one callback.

::

    with outlets(store, warn=progress.warn, metrics_file=Path("/var/lib/node_exporter/quantmint.prom")) as told:
        fleet.run(requests, options, on_event=told.hear)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.fleet.events import Event
from pipeline.notices.webhook import SECRET, Webhook, address_in

if TYPE_CHECKING:
    from pipeline.notices.metrics import Metrics


class Outlets:
    """A webhook, and metrics where somebody reads them. Neither `hear` nor `plan` raises."""

    def __init__(self, hook: Webhook | None, metrics: Metrics | None) -> None:
        self._hook, self._metrics = hook, metrics

    def hear(self, event: Event) -> None:
        """Pass an event on."""
        if self._hook is not None:
            self._hook.send(event)
        if self._metrics is not None:
            self._metrics.hear(event)

    def plan(self, fires: Mapping[str, float]) -> None:
        """Pass on when each recipe's schedule comes next (seconds since the epoch)."""
        if self._metrics is not None:
            self._metrics.plan(fires)


@contextmanager
def outlets(
    store: Path,
    *,
    warn: Callable[[str], None],
    metrics_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Outlets]:
    """Everything that is asked for; at the exit, what is still to be sent has a few seconds.

    The webhook comes from the environment: QUANTMINT_WEBHOOK, and QUANTMINT_WEBHOOK_SECRET for its signature. Raises
    `UserError` for an address or a file that cannot be used.
    """
    variables = os.environ if environ is None else environ
    address = address_in(variables)
    metrics = None
    if metrics_file is not None:
        from pipeline.notices.metrics import Metrics

        metrics = Metrics(metrics_file, store, warn=warn)
    hook = None
    if address is not None:
        hook = Webhook(address, secret=variables.get(SECRET, "").encode() or None, warn=warn)
    try:
        yield Outlets(hook, metrics)
    finally:
        if hook is not None:
            hook.close()
