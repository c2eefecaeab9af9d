"""Kubernetes as a place, through its own client and the user's kubeconfig."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.transience import is_transient, is_transient_status
from quantmint.pipeline.clusters.submit.place import BROKEN, Log, State, Submitted, Task, require_job
from quantmint.pipeline.clusters.submit.pod import CONTAINER, Pod, manifest
from quantmint.pipeline.serving.render.manifest import dump

_TIMEOUT_S = 60
_NO_LOG = (400, 404)
"""What is said of the log of a container that does not run yet, and of a pod that was evicted with it."""
_NAME = (r"[a-z0-9][-a-z0-9.]*", "the name that Kubernetes gave it")
_STARTED = ("Running", "Succeeded", "Failed")


class Kubernetes:
    """A namespace, None the context's; ``pod`` is what a run gets, None to ask for jobs that are there."""

    def __init__(self, pod: Pod | None, *, namespace: str | None = None) -> None:
        self._pod = pod
        self._namespace = namespace
        self._logs: defaultdict[str, Log] = defaultdict(Log)  # by pod

    def text(self, task: Task) -> str:
        """The manifest, for `kubectl create -f -` as well."""
        return dump(self._manifest(task))

    def check(self, task: Task) -> str | None:
        """Why the API server could not say whether it takes the Job, or None; UserError where it would not."""
        self._manifest(task)
        try:
            self._connect()
        except UserError as error:
            return error.message
        try:
            self._create(task, dry_run="All")
        except StageError as error:
            return error.message
        return None

    def submit(self, task: Task) -> Submitted:
        """Create the Job. A field that the API does not know is refused: left out, it would look as if it counted."""
        name = str(self._create(task).metadata.name)
        return Submitted(name, f"kubectl logs --namespace {self._connect()[2]} --follow job/{name}")

    def state(self, identifier: str) -> State:
        """The Job's condition; of one that ended, the exit code of the pod that decided it."""
        require_job(identifier, *_NAME)  # no name at all is every Job of the namespace
        jobs, _, namespace = self._connect()
        job = _told(jobs.read_namespaced_job, identifier, namespace)
        for condition in (item for item in job.status.conditions or () if item.status == "True"):
            if condition.type == "Complete":
                return State("Complete", 0)
            if condition.type == "Failed":
                code = _exit_code(self._pods(identifier))
                return State(f"Failed ({condition.reason})" if condition.reason else "Failed", code)
        if job.spec.suspend:
            return State("Suspended", waits="Suspended")
        if job.status.active and job.status.ready != 0:
            return State("Running")
        pods = self._pods(identifier)
        return State("Pending", waits=_waits(pods[-1]) if pods else "no pod is made for it yet")

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """The logs of its pods, one after the other as they are tried."""
        for pod in self._pods(identifier):
            if pod.status.phase in _STARTED:
                show(self._logs[str(pod.metadata.uid)].new(self._log(pod.metadata.name)))

    def _manifest(self, task: Task) -> dict[str, Any]:
        if self._pod is None:
            raise UserError("--image is missing: a pod runs an image", hint="Best by its digest: NAME@sha256:...")
        body = manifest(task, self._pod)
        if self._namespace is not None:
            body["metadata"]["namespace"] = self._namespace
        return body

    def _create(self, task: Task, **how: str) -> Any:
        body = self._manifest(task)
        jobs, _, namespace = self._connect()
        return _told(jobs.create_namespaced_job, namespace, body, field_validation="Strict", **how)

    def _connect(self) -> tuple[Any, Any, str]:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        settings = client.Configuration()
        try:
            config.load_kube_config(client_configuration=settings)
            _, active = config.list_kube_config_contexts()
            namespace = active["context"].get("namespace")
        except (ConfigException, OSError, yaml.YAMLError) as error:  # OSError: a program that it names for credentials
            raise UserError(
                f"found no way to a cluster: {error}", hint="KUBECONFIG or ~/.kube/config says where one is."
            ) from error
        api = client.ApiClient(settings)
        return client.BatchV1Api(api), client.CoreV1Api(api), self._namespace or namespace or "default"

    def _pods(self, job: str) -> list[Any]:
        """The oldest first."""
        _, pods, namespace = self._connect()
        found = _told(pods.list_namespaced_pod, namespace, label_selector=f"job-name={job}")
        return sorted(found.items, key=lambda pod: pod.metadata.creation_timestamp)

    def _log(self, name: str) -> str:
        """A pod's log; why there is none, where its reader may follow jobs and read no logs."""
        _, pods, namespace = self._connect()
        try:
            answer = _told(pods.read_namespaced_pod_log, name, namespace, container=CONTAINER, _preload_content=False)
        except UserError as error:
            if getattr(error.__cause__, "status", None) in _NO_LOG:
                return ""
            return f"no log of {name} is shown: {error.message}\n"
        with answer, _answers():
            return str(answer.read().decode("utf-8", "replace"))


def _waits(pod: Any) -> str | None:
    """What a V1Pod that does not run yet says of itself; None where it says nothing."""
    if pod.status.phase != "Pending":
        return None
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    for status in (*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())):
        if status.state and (waiting := status.state.waiting) and waiting.reason != "PodInitializing":
            return ": ".join(part for part in (status.name, waiting.reason, waiting.message) if part)
    return None


def _exit_code(pods: list[Any]) -> int:
    """Of the container that ran last; one that was ended from outside, or is gone, has none."""
    for status in (pods[-1].status.container_statuses or ()) if pods else ():
        ended = status.state.terminated
        if status.name == CONTAINER and ended is not None and ended.exit_code:
            return int(ended.exit_code)
    return BROKEN


def _told(method: Callable[..., Any], *words: Any, **given: Any) -> Any:
    with _answers():
        return method(*words, _request_timeout=_TIMEOUT_S, **given)


@contextmanager
def _answers() -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        try:
            said = str(json.loads(error.body)["message"])
        except (TypeError, ValueError, KeyError):
            said = str(error.reason)
        if error.status is None or is_transient_status(error.status):
            raise StageError(f"the Kubernetes API answered {error.status}: {said}", transient=True) from error
        raise UserError(f"the Kubernetes API refused ({error.status}): {said}") from error
    except HTTPError as error:
        why = getattr(error, "reason", None) or error
        raise StageError(f"the Kubernetes API cannot be reached: {why}", transient=is_transient(error)) from error
