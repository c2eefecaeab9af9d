"""All that hears of a fleet's events, as one callback.

::

    with outlets(store, warn=progress.warn, metrics_file=Path("/var/lib/node_exporter/quantmint.prom")) as told:
        fleet.run(requests, options, on_event=told.hear)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.fleet.events import Event
from pipeline.notices.body import is_told
from pipeline.notices.webhook import SECRET, Webhook, addresses

if TYPE_CHECKING:
    from pipeline.notices.exposition import Address, Textfile
    from pipeline.notices.metrics import Board

CLOSE_S: Final = 5.0


class Outlets:
    """Webhooks, and metrics where somebody reads them. Neither `hear` nor `plan` waits or raises."""

    def __init__(
        self, hooks: tuple[Webhook, ...], board: Board | None, textfile: Textfile | None, address: Address | None
    ) -> None:
        self._hooks = hooks
        self._board = board
        self._textfile = textfile
        self.metrics_port = None if address is None else address.port

    def hear(self, event: Event) -> None:
        """Pass an event on."""
        if is_told(event):
            for hook in self._hooks:
                hook.send(event)
        if self._board is not None:
            self._board.hear(event)
            self._touch()

    def plan(self, fires: Mapping[str, float]) -> None:
        """Pass on when each recipe's schedule comes next (seconds since the epoch)."""
        if self._board is not None:
            self._board.plan(fires)
            self._touch()

    def _touch(self) -> None:
        if self._textfile is not None:
            self._textfile.touch()


@contextmanager
def outlets(
    store: Path,
    *,
    warn: Callable[[str], None],
    metrics_file: Path | None = None,
    metrics_port: int | None = None,
    metrics_host: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Outlets]:
    """Everything that is asked for; at the exit, what is still to be sent has a few seconds.

    Webhooks come from the environment: QUANTMINT_WEBHOOK, and QUANTMINT_WEBHOOK_SECRET for their signature. Raises
    `UserError` for an address, a file or a port that cannot be used.
    """
    variables = os.environ if environ is None else environ
    secret = variables.get(SECRET, "").encode() or None
    wanted = addresses(variables)
    with ExitStack() as stack:
        board, textfile, address = None, None, None
        if metrics_file is not None or metrics_port is not None:
            from pipeline.notices.exposition import LOOPBACK, Address, Textfile
            from pipeline.notices.metrics import Board

            board = Board(store, warn=warn)
            if metrics_port is not None:
                address = Address(board, port=metrics_port, host=metrics_host or LOOPBACK)
                stack.callback(address.close)
            if metrics_file is not None:
                textfile = Textfile(metrics_file, board, warn=warn)
                stack.callback(textfile.close)
        hooks = tuple(Webhook(one, secret=secret, warn=warn) for one in wanted)
        stack.callback(_close, hooks)
        yield Outlets(hooks, board, textfile, address)


def _close(hooks: tuple[Webhook, ...]) -> None:
    import time

    end = time.monotonic() + CLOSE_S  # for all together
    for hook in hooks:
        hook.close(max(0.0, end - time.monotonic()))
