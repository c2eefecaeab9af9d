"""As much of the Kubernetes API as a Job needs, in memory: the controller follows the manifest that it was given.

A pod ends when somebody read its log. What comes then is what the manifest's own podFailurePolicy and backoffLimit say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

_JOBS = re.compile(r"/apis/batch/v1/namespaces/(?P<namespace>[^/]+)/jobs(?:/(?P<name>[^/]+))?")
_PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(?:/(?P<name>[^/]+)/log)?")


@dataclass
class Pod:
    """``code`` None is a pod that was evicted."""

    name: str
    code: int | None
    log: bytes
    ended: bool = False


@dataclass
class Job:
    manifest: dict[str, Any]
    namespace: str
    tries: list[tuple[int | None, bytes]]
    pods: list[Pod] = field(default_factory=list)
    failures: int = 0
    condition: tuple[str, str] | None = None

    def begin(self) -> None:
        code, log = self.tries[len(self.pods)]
        self.pods.append(Pod(f"pod-{len(self.pods)}", code, log))

    def end(self, pod: Pod) -> None:
        """What the Job controller does when a pod has ended."""
        pod.ended = True
        if pod.code == 0:
            self.condition = ("Complete", "")
            return
        for rule in self.manifest["spec"]["podFailurePolicy"]["rules"]:
            exits = rule.get("onExitCodes")
            if (exits and pod.code in exits["values"]) or (pod.code is None and "onPodConditions" in rule):
                if rule["action"] == "FailJob":
                    self.condition = ("Failed", "PodFailurePolicy")
                    return
                if rule["action"] == "Ignore":
                    self.begin()
                    return
        self.failures += 1
        if self.failures > self.manifest["spec"]["backoffLimit"]:
            self.condition = ("Failed", "BackoffLimitExceeded")
        else:
            self.begin()


class Api:
    """``tries`` is what each pod of the next Job comes to: its exit code and its log.

    ``waits`` are the statuses that pods have before they run, one for each time that they are asked for. ``cuts`` are
    numbers of bytes after which the next logs break off, with their pods running on; ``faults`` are what the next
    requests are answered with, None for what they ask for, and ``fault`` is what all others are. ``asked`` are dryRun
    and fieldValidation of each Job that was sent.
    """

    def __init__(self) -> None:
        self.tries: list[tuple[int | None, bytes]] = [(0, b"")]
        self.jobs: dict[str, Job] = {}
        self.fault: int | None = None
        self.faults: list[int | None] = []
        self.cuts: list[int] = []
        self.waits: list[dict[str, Any]] = []
        self.asked: list[tuple[str | None, str | None]] = []

    def create(self, namespace: str, manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["generateName"] + "x7k2p"
        self.jobs[name] = Job(manifest, namespace, list(self.tries))
        self.jobs[name].begin()
        return self.shown(name)

    def shown(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        met = [{"type": job.condition[0], "status": "True", "reason": job.condition[1]}] if job.condition else []
        runs = int(not met and not self.waits)
        status = {"conditions": met, "active": int(not met), "ready": runs}
        return {**job.manifest, "metadata": {"name": name, "namespace": job.namespace}, "status": status}

    def pods(self, job: str) -> list[dict[str, Any]]:
        if self.waits:
            metadata = {"name": "pod-0", "uid": "pod-0", "creationTimestamp": "2026-01-01T00:00:00Z"}
            return [{"metadata": metadata, "status": {"phase": "Pending", **self.waits.pop(0)}}]
        beside = [name for name in names_of(self.jobs[job].manifest) if name != "quantmint"]
        return [self._pod(number, pod, beside) for number, pod in enumerate(self.jobs[job].pods)]

    def _pod(self, number: int, pod: Pod, beside: list[str]) -> dict[str, Any]:
        state: dict[str, Any] = {"running": {}}
        if pod.ended:
            state = {"terminated": {"exitCode": 137 if pod.code is None else pod.code}}
        common = {"image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        told_to_stop = {"terminated": {"exitCode": 143}} if pod.ended else {"running": {}}
        containers = [{"name": name, "state": told_to_stop, **common} for name in beside]
        containers.append({"name": "quantmint", "state": state, **common})
        made = f"2026-01-01T00:00:{number:02d}Z"
        phase = "Running" if not pod.ended else "Succeeded" if pod.code == 0 else "Failed"
        return {
            "metadata": {"name": pod.name, "uid": pod.name, "creationTimestamp": made},
            "status": {"phase": phase, "containerStatuses": containers},
        }

    def of_pod(self, name: str) -> tuple[Job, Pod]:
        return next((job, pod) for job in reversed(self.jobs.values()) for pod in job.pods if pod.name == name)


def names_of(manifest: dict[str, Any]) -> list[str]:
    """The containers of a pod."""
    return [container["name"] for container in manifest["spec"]["template"]["spec"]["containers"]]


@contextmanager
def served(api: Api) -> Iterator[str]:
    """The API's address for this block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found = _JOBS.fullmatch(urlsplit(self.path).path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            query = parse_qs(urlsplit(self.path).query)
            dry_run, validation = (query.get(name, [None])[0] for name in ("dryRun", "fieldValidation"))
            if not self._refused() and found:
                api.asked.append((dry_run, validation))
                self._answer(201, body if dry_run else api.create(found["namespace"], body))

        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            if self._refused():
                return
            if (found := _JOBS.fullmatch(path)) and found["name"] in api.jobs:
                self._answer(200, api.shown(found["name"]))
            elif (found := _PODS.fullmatch(path)) and found["name"]:
                job, pod = api.of_pod(found["name"])
                names = names_of(job.manifest)
                if query.get("container", names) != ["quantmint"]:
                    self._answer(400, {"message": f"a container name must be specified, choose one of: {names}"})
                    return
                cut = api.cuts.pop(0) if api.cuts else None
                self.send_response(200)
                if cut is not None and cut % 2:  # noticed by the client, or not
                    self.send_header("Content-Length", str(len(pod.log)))
                self.end_headers()
                for start in range(0, len(pod.log[:cut]), 3):  # cut where it comes, characters as well
                    self.wfile.write(pod.log[:cut][start : start + 3])
                    self.wfile.flush()
                if not pod.ended and cut is None:
                    job.end(pod)
            elif found:
                wanted = query["labelSelector"][0].removeprefix("job-name=")
                self._answer(200, {"items": api.pods(wanted)})
            else:
                self._answer(404, {"message": f'jobs.batch "{path.rpartition("/")[2]}" not found'})

        def _refused(self) -> bool:
            fault = api.faults.pop(0) if api.faults else api.fault
            if fault is None:
                return False
            self._answer(fault, {"message": "said by the API"})
            return True

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
