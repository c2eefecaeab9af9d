"""Nodes of Ray without what serves its dashboard, which takes most of the time that a node starts.

On a busy machine a node gives up where those processes take longer than a quarter of a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Nodes that are started within are as those of a Ray that was installed without its dashboard."""
    with mock.patch("ray._private.utils.get_dashboard_dependency_error", return_value=ImportError("left out")):
        yield
