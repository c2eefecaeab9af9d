"""Kubernetes, through its own client and the user's kubeconfig."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.transience import is_transient, is_transient_status
from quantmint.pipeline.clusters.submit.job import (
    BROKEN,
    JobRequest,
    JobState,
    Scheduler,
    SubmittedJob,
    require_job_id,
)
from quantmint.pipeline.clusters.submit.pod import CONTAINER, Pod, job_manifest
from quantmint.pipeline.serving.render.manifest import dump

_TIMEOUT_S = 60
_NO_LOG = (400, 404)
"""Statuses for the log of a container that does not run yet, and of an evicted pod."""
_JOB_ID = (r"[a-z0-9][-a-z0-9.]*", "the name that Kubernetes gave it")


class Kubernetes(Scheduler):
    """A namespace of a cluster (None: the context's).

    ``pod`` describes the pods of submitted runs; None is enough to ask for existing jobs.
    """

    def __init__(self, pod: Pod | None, *, namespace: str | None = None) -> None:
        super().__init__()
        self._pod, self._namespace = pod, namespace

    def describe(self, request: JobRequest) -> str:
        """Return the manifest, which `kubectl create -f -` takes as well. Raises `UserError` without an image."""
        return dump(self._manifest(request))

    def check(self, request: JobRequest) -> str | None:
        """Let the API server validate the Job; return why it could not, or None. Raises `UserError` for a refusal."""
        self._manifest(request)
        try:
            self._connect()
        except UserError as error:
            return error.message
        try:
            self._create(request, dry_run="All")
        except StageError as error:
            return error.message
        return None

    def submit(self, request: JobRequest) -> SubmittedJob:
        """Create the Job. The API server refuses unknown fields, which it would otherwise silently drop."""
        name = str(self._create(request).metadata.name)
        return SubmittedJob(name, f"kubectl logs --namespace {self._connect()[2]} --follow job/{name}")

    def state(self, identifier: str) -> JobState:
        """Return the Job's condition, and the exit code of its last pod once it failed."""
        require_job_id(identifier, *_JOB_ID)  # the API takes an empty name for every Job of the namespace
        jobs, _, namespace = self._connect()
        job = _call(jobs.read_namespaced_job, identifier, namespace)
        for condition in (item for item in job.status.conditions or () if item.status == "True"):
            if condition.type == "Complete":
                return JobState("Complete", 0)
            if condition.type == "Failed":
                status = f"Failed ({condition.reason})" if condition.reason else "Failed"
                return JobState(status, _exit_code(self._pods(identifier)))
        if job.spec.suspend:
            return JobState("Suspended", waits="Suspended")
        if job.status.active and job.status.ready != 0:
            return JobState("Running")
        pods = self._pods(identifier)
        return JobState("Pending", waits=_pending_reason(pods[-1]) if pods else "no pod was created yet")

    def logs(self, identifier: str) -> Iterator[tuple[str, str]]:
        """Yield the logs of the Job's pods, the oldest pod first."""
        for pod in self._pods(identifier):
            if pod.status.phase in ("Running", "Succeeded", "Failed"):
                yield str(pod.metadata.uid), self._log(pod.metadata.name)

    def _manifest(self, request: JobRequest) -> dict[str, Any]:
        if self._pod is None:
            raise UserError("--image is missing: a pod needs an image", hint="Best by its digest: NAME@sha256:...")
        body = job_manifest(request, self._pod)
        if self._namespace is not None:
            body["metadata"]["namespace"] = self._namespace
        return body

    def _create(self, request: JobRequest, **options: str) -> Any:
        body = self._manifest(request)
        jobs, _, namespace = self._connect()
        return _call(jobs.create_namespaced_job, namespace, body, field_validation="Strict", **options)

    def _connect(self) -> tuple[Any, Any, str]:
        """Return clients for Jobs and for pods, and the namespace. Raises `UserError` without a usable kubeconfig."""
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        settings = client.Configuration()
        try:
            config.load_kube_config(client_configuration=settings)
            _, active = config.list_kube_config_contexts()
            namespace = active["context"].get("namespace")
        except (ConfigException, OSError, yaml.YAMLError) as error:  # OSError: of its program for credentials
            hint = "Set KUBECONFIG, or write ~/.kube/config."
            raise UserError(f"found no usable kubeconfig: {error}", hint=hint) from error
        api = client.ApiClient(settings)
        return client.BatchV1Api(api), client.CoreV1Api(api), self._namespace or namespace or "default"

    def _pods(self, job: str) -> list[Any]:
        """Return the Job's pods, the oldest first."""
        _, pods, namespace = self._connect()
        items = _call(pods.list_namespaced_pod, namespace, label_selector=f"job-name={job}").items
        return sorted(items, key=lambda pod: pod.metadata.creation_timestamp)

    def _log(self, name: str) -> str:
        """Return a pod's log; without the right to read logs, a line that says so: the job is followed all the same."""
        _, pods, namespace = self._connect()
        try:
            answer = _call(pods.read_namespaced_pod_log, name, namespace, container=CONTAINER, _preload_content=False)
        except UserError as error:
            if getattr(error.__cause__, "status", None) in _NO_LOG:
                return ""
            return f"no log of {name} is shown: {error.message}\n"
        with answer, _api_errors():
            return str(answer.read().decode("utf-8", "replace"))


def _pending_reason(pod: Any) -> str | None:
    """Return why a V1Pod is pending, from its scheduling condition or its containers; None if it does not say."""
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
    """Return the last pod's exit code; `BROKEN` for a pod that is gone or was ended from outside."""
    for status in (pods[-1].status.container_statuses or ()) if pods else ():
        end = status.state.terminated
        if status.name == CONTAINER and end is not None and end.exit_code:
            return int(end.exit_code)
    return BROKEN


def _call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with _api_errors():
        return method(*arguments, _request_timeout=_TIMEOUT_S, **options)


@contextmanager
def _api_errors() -> Iterator[None]:
    """Raise the client's errors as a transient `StageError`, or as `UserError` for a refusal."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        try:
            message = str(json.loads(error.body)["message"])
        except (TypeError, ValueError, KeyError):
            message = str(error.reason)
        if error.status is None or is_transient_status(error.status):
            raise StageError(f"the Kubernetes API answered {error.status}: {message}", transient=True) from error
        raise UserError(f"the Kubernetes API refused ({error.status}): {message}") from error
    except HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise StageError(f"the Kubernetes API cannot be reached: {reason}", transient=is_transient(error)) from error
