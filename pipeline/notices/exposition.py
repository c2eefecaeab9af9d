"""Where Prometheus finds the metrics: a file of the node exporter's textfile collector, or an address.

A file suits what ends (`quantmint requantize`), an address what stays (`quantmint schedule run`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prometheus_client import start_http_server, write_to_textfile

from pipeline.errors import UserError
from pipeline.notices.metrics import Board

SUFFIX: Final = ".prom"
LOOPBACK: Final = "127.0.0.1"
_REFRESH_S: Final = 60.0


class Textfile:
    """Keeps a file up to date, by a thread of its own: after each `touch`, every minute, and at the end.

    The collector reads whole files whose name ends in ``.prom``; what is written beside it first has another ending.
    Raises `UserError` for a name that the collector would pass over, and for a folder that cannot be written to.
    """

    def __init__(self, path: Path, board: Board, *, warn: Callable[[str], None], refresh_s: float = _REFRESH_S) -> None:
        if path.suffix != SUFFIX:
            raise UserError(
                f"the metrics file {path} would not be read: the textfile collector takes files that end in {SUFFIX}",
                hint=f"{path.with_suffix(SUFFIX)}",
            )
        self._path, self._board, self._warn, self._refresh_s = path, board, warn, refresh_s
        self._away = False
        self._closing = False
        self._changed = threading.Event()
        try:
            write_to_textfile(str(path), board.registry)
        except OSError as error:
            raise UserError(f"the metrics file {path} cannot be written: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._work, name=f"metrics in {path.name}", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something changed: returns at once."""
        self._changed.set()

    def close(self, within_s: float = 5.0) -> None:
        """Write what is known at the end; a disk that hangs is waited for ``within_s`` seconds."""
        self._closing = True
        self._changed.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        while not self._closing:
            self._changed.wait(self._refresh_s)
            self._changed.clear()
            try:
                write_to_textfile(str(self._path), self._board.registry)
            except OSError as error:
                if not self._away:
                    self._warn(f"the metrics file {self._path} cannot be written: {error.strerror or error}")
                self._away = True
            else:
                self._away = False


class Address:
    """Answers HTTP requests with the metrics until it is closed; port 0 takes a free one.

    Raises `UserError` for a port that is taken or a host that is not this machine's.
    """

    def __init__(self, board: Board, *, port: int, host: str = LOOPBACK) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, board.registry)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(
                f"cannot answer Prometheus at {host}:{port}: {why}",
                hint="Give another --metrics-port or --metrics-host.",
            ) from None
        self.port = self._server.server_port

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
