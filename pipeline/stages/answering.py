"""What answered, on which device: as the server says it, and not as it was planned."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.serving.host.device import Device, device_here

if TYPE_CHECKING:
    from pipeline.serving.running.logscan import LogScan
    from pipeline.serving.running.server import Server

_LOGGED_DEVICE = re.compile(r"\bdevice_config=(\w+)")


@dataclass(frozen=True, slots=True)
class Answering:
    """``runtime`` are the words that a verdict names, ``version`` what both sides must have in common.

    ``kv_cache_dtype`` is that of the cache that is there ("auto", "fp8", ...), None where nobody says.
    """

    runtime: str
    version: str
    device: Device
    kv_cache_dtype: str | None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)


def runtime_of(runtime: str, server: Server, scan: LogScan, log: Path) -> Answering:
    """Ask a server, and read the ``log`` that was kept of it. Raises `ServingError` where it does not answer.

    vLLM logs the kind of its device, because a machine with GPUs may run its CPU build.
    """
    if runtime == "reference":
        facts = json.loads(server.get("/version"))
        return Answering(facts["runtime"], facts["version"], Device(**facts["device"]), facts["kv_cache_dtype"])
    version = f"vllm {server.version()}"
    return Answering(version, version, vllm_device(log), scan.kv_cache_dtype)


def vllm_device(log: Path) -> Device:
    """The device of this machine that a vLLM of this machine runs on, by its ``log``."""
    logged = _LOGGED_DEVICE.search(log.read_text(encoding="utf-8", errors="replace"))
    return device_here(logged[1] if logged else "cuda")
