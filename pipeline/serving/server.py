"""A running vLLM server, as seen over HTTP on the loopback interface.

Plain `http.client`: a proxy that the environment names must not see, or answer, what we ask our own machine.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ServingError
from pipeline.serving.logscan import LogScan, scan_log

HOST = "127.0.0.1"
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One line of a Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered. `started_seconds` is the time from its start to the first healthy answer."""

    model_name: str
    port: int
    pid: int
    log_path: Path
    started_seconds: float

    @property
    def base_url(self) -> str:
        """Address without a path: ``http://127.0.0.1:PORT``."""
        return f"http://{HOST}:{self.port}"

    def version(self) -> str:
        """vLLM's version as the server tells it."""
        return str(json.loads(self.get("/version"))["version"])

    def metrics(self) -> tuple[Sample, ...]:
        """Every sample of /metrics, in its order."""
        return parse_metrics(self.get("/metrics"))

    def cache_config(self) -> Mapping[str, str]:
        """Labels of ``vllm:cache_config_info``: block_size, num_gpu_blocks, ...

        Its cache_dtype may say "auto" where the cache is FP8: ask the log for that.
        """
        for sample in self.metrics():
            if sample.name == "vllm:cache_config_info":
                return sample.labels
        return {}

    def scan_log(self) -> LogScan:
        """What the log says up to now: KV tokens, backend, kernels, and what makes a measurement void."""
        return scan_log(self.log_path.read_text(encoding="utf-8", errors="replace"))

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Body of a GET; ServingError unless the answer is 200 within ``timeout`` seconds."""
        try:
            status, body = fetch(self.port, path, timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(
                f"the server does not answer {path}: {error}", hint=f"its log: {self.log_path}"
            ) from error
        if status != 200:
            raise ServingError(f"the server answers {path} with {status}", hint=f"its log: {self.log_path}")
        return body


def fetch(port: int, path: str, *, timeout: float) -> tuple[int, str]:
    """Status and body of one GET on the loopback interface."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()


def served_models(body: str) -> dict[str, str | None]:
    """Name and root (the checkpoint's folder) of each model in an answer of /v1/models."""
    answer: dict[str, Any] = json.loads(body)
    return {model["id"]: model.get("root") for model in answer["data"]}


def parse_metrics(text: str) -> tuple[Sample, ...]:
    """Parse the Prometheus text format; comments are skipped."""
    found = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
    return tuple(
        Sample(sample["name"], dict(_LABEL.findall(sample["labels"] or "")), float(sample["value"]))
        for sample in found
        if sample is not None
    )
