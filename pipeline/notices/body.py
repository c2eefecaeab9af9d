"""What a webhook is sent: one JSON object, and the signature that shows that it is ours.

>>> signature_of(b'{"schema": 1}', b"secret")
'sha256=63c977ecf49b30cb57506cfc2a07d5d2df62859c25b006331456f99f0d7d55e3'

``docs/notices.md`` tells receivers what each field is; a field that is added changes no number, one that changes its
meaning raises ``schema``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from dataclasses import asdict
from typing import Final

from pipeline import __version__
from pipeline.fleet.events import Event

SCHEMA: Final = 1
_QUIET_KINDS: Final = frozenset({"stage", "waiting"})


def is_told(event: Event) -> bool:
    """Whether receivers hear of it: neither of each stage, nor of every time at which nothing was due."""
    return event.kind not in _QUIET_KINDS and event.state != "current"


def body_of(event: Event, identity: str) -> bytes:
    """The body for an event, UTF-8. ``identity`` is the notice's own: the same when it is sent again."""
    fields = asdict(event)
    del fields["stage"]  # of events that are not told
    head = {"schema": SCHEMA, "id": identity, "event": fields.pop("kind"), "host": socket.gethostname()}
    text = json.dumps(head | {"quantmint": __version__} | fields, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then


def signature_of(body: bytes, secret: bytes) -> str:
    """``sha256=`` and the HMAC-SHA256 of the body in hex (RFC 2104), as GitHub writes it."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()
