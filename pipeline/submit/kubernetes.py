"""Kubernetes as a place, through its own client and the user's kubeconfig (or the pod's service account)."""

from __future__ import annotations

import codecs
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from pipeline.errors import StageError, UserError
from pipeline.passing import passes
from pipeline.serving.render.comments import dump
from pipeline.submit.following import beyond
from pipeline.submit.job import Options, manifest
from pipeline.submit.place import BROKEN, State, Submitted
from pipeline.submit.pod import CONTAINER, SUBDOMAIN
from pipeline.submit.task import Task
from pipeline.submit.waiting import Waiting, in_kubernetes

_TIMEOUT_S = 60
_QUIET_S = 300
"""Seconds without a word after which a log is asked for again: a connection that is lost says nothing either."""
_PAUSE_S = 3.0
_MAKING = timedelta(minutes=1)  # which a Job has until its first pod, by clocks that may differ
_RUNNING = "Running"
_NO_LOG = (400, 404)
"""What is said of the log of a container that does not run yet, and of a pod that was evicted with it."""
_STARTED = (_RUNNING, "Succeeded", "Failed")


class Kubernetes:
    """A namespace of a cluster; ``namespace`` None is the one of the kubeconfig's context.

    ``options`` None is enough to ask for jobs that are there.
    """

    def __init__(self, options: Options | None, *, namespace: str | None = None, pause_s: float | None = None) -> None:
        self._options = options
        self._namespace = namespace
        self._pause_s = _PAUSE_S if pause_s is None else pause_s

    def text(self, task: Task) -> str:
        """The manifest, for `kubectl create -f -` as well."""
        return dump(self._manifest(task))

    def submit(self, task: Task) -> Submitted:
        """Create the Job."""
        body = self._manifest(task)
        jobs, _, namespace = self._connect()
        with _answers():
            made = jobs.create_namespaced_job(namespace, body, _request_timeout=_TIMEOUT_S)
        name = str(made.metadata.name)
        return Submitted(name, f"kubectl logs --namespace {namespace} --follow job/{name}")

    def state(self, identifier: str) -> State:
        """The Job's condition; of one that ended, the exit code of the pod that decided it."""
        _require_name(identifier)
        jobs, pods, namespace = self._connect()
        with _answers():
            job = jobs.read_namespaced_job(identifier, namespace, _request_timeout=_TIMEOUT_S)
        met = [item for item in job.status.conditions or () if item.status == "True"]
        for condition in met:
            if condition.type == "Complete":
                return State("Complete", 0)
            if condition.type == "Failed":
                code = _exit_code(self._newest(pods, namespace, identifier))
                return State(f"Failed ({condition.reason})" if condition.reason else "Failed", code)
        if job.spec.suspend:
            return State("Suspended", waits=Waiting("the Job is suspended until what manages its queue resumes it"))
        if job.status.active and job.status.ready != 0:
            return State("Running")
        return State("Pending", waits=self._waits(pods, namespace, identifier, job.status.start_time))

    def lines(self, identifier: str, seen: Callable[[State], None] | None = None) -> Iterator[str]:
        """The logs of its pods, one after the other as they are tried. One that breaks off is read again."""
        shown: Counter[str] = Counter()  # characters
        whole: set[str] = set()
        while True:
            state, fresh = self.state(identifier), False
            if seen is not None:
                seen(state)
            _, pods, namespace = self._connect()
            for pod in self._pods(pods, namespace, identifier):
                uid, phase = str(pod.metadata.uid), pod.status.phase
                if uid in whole or phase not in _STARTED:
                    continue
                log = _log(pods, namespace, pod.metadata.name, grows=phase == _RUNNING)
                for piece in filter(None, beyond(shown[uid], log)):
                    shown[uid] += len(piece)
                    fresh = True
                    yield piece
                if phase != _RUNNING:
                    whole.add(uid)
            if state.ended:
                return
            if not fresh:  # else reading took as long as the pod ran: how is it now?
                time.sleep(self._pause_s)

    def cancel(self, identifier: str) -> None:
        """Delete the Job with its pods, which get their time to end."""
        _require_name(identifier)
        jobs, _, namespace = self._connect()
        with _answers():
            jobs.delete_namespaced_job(
                identifier, namespace, propagation_policy="Background", _request_timeout=_TIMEOUT_S
            )

    def _manifest(self, task: Task) -> dict[str, Any]:
        if self._options is None:
            raise UserError("--image is missing: a pod runs an image", hint="Best by its digest: NAME@sha256:...")
        body = manifest(task, self._options)
        if self._namespace is not None:
            body["metadata"]["namespace"] = self._namespace
        return body

    def _connect(self) -> tuple[Any, Any, str]:
        """Clients of jobs and of pods, and the namespace."""
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        settings = client.Configuration()
        try:
            config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError, yaml.YAMLError) as error:  # OSError: a program that it names for credentials
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                raise UserError(
                    f"found no way to a cluster: {error}", hint="KUBECONFIG or ~/.kube/config says where one is."
                ) from error
        api = client.ApiClient(settings)
        return client.BatchV1Api(api), client.CoreV1Api(api), self._namespace or _namespace()

    def _pods(self, pods: Any, namespace: str, job: str) -> list[Any]:
        with _answers():
            found = pods.list_namespaced_pod(namespace, label_selector=f"job-name={job}", _request_timeout=_TIMEOUT_S)
        return sorted(found.items, key=lambda pod: pod.metadata.creation_timestamp)

    def _waits(self, pods: Any, namespace: str, job: str, begun: datetime | None) -> Waiting | None:
        pod = self._newest(pods, namespace, job)
        if pod is not None:
            return in_kubernetes(job, pod) if pod.status.phase == "Pending" else None
        if begun is None or datetime.now(UTC) - begun < _MAKING:
            return None
        return Waiting(
            "no pod was made for it", f"A quota or a rule refuses it: kubectl describe job/{job} says which."
        )

    def _newest(self, pods: Any, namespace: str, job: str) -> Any | None:
        found = self._pods(pods, namespace, job)
        return found[-1] if found else None


def _namespace() -> str:
    from kubernetes.config import incluster_config, list_kube_config_contexts
    from kubernetes.config.config_exception import ConfigException

    try:
        _, active = list_kube_config_contexts()
        return str(active["context"].get("namespace") or "default")
    except ConfigException:  # in a pod
        from pathlib import Path

        told = Path(incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace")
        return told.read_text(encoding="utf-8").strip() if told.is_file() else "default"


def _exit_code(pod: Any | None) -> int:
    """Of the container that runs; one that was ended from outside, or is gone, has none."""
    for status in (pod.status.container_statuses or ()) if pod is not None else ():
        ended = status.state.terminated
        if status.name == CONTAINER and ended is not None and ended.exit_code:
            return int(ended.exit_code)
    return BROKEN


def _require_name(identifier: str) -> None:
    """UserError for what is no name of a Job: the API takes none at all for every Job of the namespace."""
    if not SUBDOMAIN.fullmatch(identifier):
        raise UserError(f"found the job {identifier!r}, expected the name that Kubernetes gave it")


def _log(pods: Any, namespace: str, name: str, *, grows: bool) -> Iterator[str]:
    """A pod's log from its beginning. Of one that ``grows``, as much as comes before the connection breaks off.

    Why there is none, where its reader may follow jobs and read no logs: in silence it would look as if nothing ran.
    """
    within = (_TIMEOUT_S, _QUIET_S)
    try:
        with _answers():
            answer = pods.read_namespaced_pod_log(
                name,
                namespace,
                container=CONTAINER,
                follow=grows,
                _preload_content=False,
                _request_timeout=within,
            )
    except UserError as error:
        if getattr(error.__cause__, "status", None) not in _NO_LOG:
            yield f"no log of {name} is shown: {error.message}\n"
        return
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        with answer, _answers():
            for piece in answer.stream(amt=None, decode_content=True):
                yield text.decode(piece)
    except StageError:
        if not grows:
            raise


@contextmanager
def _answers() -> Iterator[None]:
    """The client's errors as ours."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        said = _message(error)
        if error.status is None or error.status >= 500 or error.status == 429:
            raise StageError(f"the Kubernetes API answered {error.status}: {said}", transient=True) from error
        raise UserError(f"the Kubernetes API refused ({error.status}): {said}") from error
    except HTTPError as error:
        why = getattr(error, "reason", None) or error
        raise StageError(f"the Kubernetes API cannot be reached: {why}", transient=passes(error)) from error


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
