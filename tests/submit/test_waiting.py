"""Why a job waits: told once for each change, with the way out where there is one to be found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.submit.attached import Now
from pipeline.submit.ray import Options as Settings
from pipeline.submit.ray import RayJobs
from pipeline.submit.sbatch import Options
from pipeline.submit.slurm import Slurm
from pipeline.submit.waiting import Telling, Waiting, in_kubernetes, in_slurm


@pytest.mark.parametrize(
    "reason",
    [
        "Resources",
        "Priority",
        "ReqNodeNotAvail,_UnavailableNodes:node[1-3]",
        "PartitionNodeLimit",
        "AssocGrpGRES",
        "AssocMaxJobsLimit",
        "QOSMaxGRESPerUser",
        "QOSMaxJobsPerUserLimit",
        "QOSGrpNodeLimit",
        "BeginTime",
        "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
    ],
)
def test_what_passes_by_itself_in_slurm(reason: str) -> None:
    assert in_slurm("17", reason) == Waiting(reason.replace("_", " "))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("JobHeldUser", "scontrol release 17"),
        ("launch_failed_requeued_held", "scontrol release 17"),
        ("job_requeued_in_held_state", "scontrol release 17"),
        ("BadConstraints", "--cancel 17"),
        ("InvalidAccount", "--account"),
        ("AccountNotAllowed", "--account"),
        ("InvalidQOS", "--qos"),
        ("QOSMaxGRESPerJob", "allows a job"),
        ("QOSMaxMemoryPerNode", "allows a job"),
        ("QOSMinGRES", "allows a job"),
        ("AssocMaxWallDurationPerJobLimit", "allows a job"),
        ("AssocMaxCpuMinutesPerJobLimit", "allows a job"),
        ("PartitionTimeLimit", "TimeLimit="),
        ("DependencyNeverSatisfied", "has failed"),
    ],
)
def test_what_does_not_pass_in_slurm(reason: str, said: str) -> None:
    found = in_slurm("17", reason)
    assert found is not None
    assert said in str(found.remedy)


@pytest.mark.parametrize("reason", ["", "None", "(null)"])
def test_no_reason_is_none(reason: str) -> None:
    assert in_slurm("17", reason) is None


def pod(**status: Any) -> Any:
    client = pytest.importorskip("kubernetes.client", reason="whose answers are read")

    answer = SimpleNamespace(data=json.dumps({"metadata": {"name": "a"}, "status": status}))
    return client.ApiClient().deserialize(answer, "V1Pod")


def placed(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def container(name: str, reason: str, message: str | None = None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}


@pytest.mark.parametrize(
    ("status", "reason", "remedy"),
    [
        (
            placed("0/5 nodes are available: 5 Insufficient\n amd.com/gpu."),
            "Unschedulable: 0/5 nodes are available: 5 Insufficient amd.com/gpu.",
            None,
        ),
        (
            placed("0/3 nodes are available: 1 node(s) had untolerated taint {a: }, 2 Insufficient amd.com/gpu."),
            "Unschedulable: 0/3",
            None,
        ),
        (placed("0/1 nodes are available: 1 node(s) had untolerated taint {gpu: }."), "Unsch", "tolerations of --pod"),
        (placed("0/1: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }."), "Unsch", None),
        (placed("0/1 nodes: 1 node(s) didn't match Pod's node affinity/selector."), "Unsch", "--node-selector"),
        (placed('persistentvolumeclaim "x" not found'), "Unsch", "--cancel job"),
        (placed("gated", "SchedulingGated"), "SchedulingGated: gated", None),
        ({"containerStatuses": [container("quantmint", "ContainerCreating")]}, "quantmint: ContainerCreating", None),
        (
            {"containerStatuses": [container("quantmint", "ErrImagePull", "no such host")]},
            "quantmint: ImagePullBackOff: no such host",
            "imagePullSecrets of --pod-template",
        ),
        (
            {
                "initContainerStatuses": [container("proxy", "CreateContainerConfigError", 'secret "x" not found')],
                "containerStatuses": [container("quantmint", "PodInitializing")],
            },
            'proxy: CreateContainerConfigError: secret "x" not found',
            "--secret",
        ),
    ],
)
def test_what_a_pod_says(status: dict[str, Any], reason: str, remedy: str | None) -> None:
    found = in_kubernetes("job", pod(phase="Pending", **status))
    assert found is not None
    assert found.reason.startswith(reason)
    assert found.remedy is None if remedy is None else remedy in str(found.remedy)


def test_a_pod_that_says_nothing() -> None:
    assert in_kubernetes("job", pod(phase="Pending")) is None


def test_it_is_told_once_for_each_change() -> None:
    told: list[str] = []
    telling = Telling(told.append)
    for waits in (Waiting("a"), Waiting("a"), Waiting("b", "do it"), Waiting("b", "do it"), None, Waiting("b"), None):
        telling(waits)
    assert told == ["waits: a", "waits: b", "  do it", "waits: b"]


def test_another_try_is_no_change() -> None:
    told: list[str] = []
    telling = Telling(told.append)
    for reason, message in (
        ("ErrImagePull", "failed to pull image: no such host"),
        ("ImagePullBackOff", 'Back-off pulling image "i"'),
        ("ErrImagePull", "failed to pull image: no such host"),
        ("CrashLoopBackOff", "back-off 10s restarting failed container"),
        ("CrashLoopBackOff", "back-off 20s restarting failed container"),
        ("CreateContainerConfigError", 'secret "a" not found'),
        ("CreateContainerConfigError", 'secret "b" not found'),
    ):
        telling(in_kubernetes("job", pod(containerStatuses=[container("quantmint", reason, message)])))
    assert [line.split(": ")[2] for line in told if line.startswith("waits: ")] == [
        "ImagePullBackOff",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerConfigError",
    ]


def test_slurms_reason_is_read_while_a_log_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that is asked again and again, and says the next of these each time."""
    log, looks = tmp_path / "log", tmp_path / "looks"
    log.write_text("a line\n", encoding="utf-8")
    states = ["PENDING Reason=Priority"] * 3 + ["PENDING Reason=BadConstraints"] * 3 + ["RUNNING Reason=None"]
    states += ["COMPLETED Reason=None"] * 9
    looks.write_text("".join(f"JobId=17 JobState={state} StdOut={log} Power=\n" for state in states), encoding="utf-8")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nhead -n 1 {looks}; sed -i 1d {looks}\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    there = Slurm(Options(), folder=tmp_path, logs=tmp_path, pause_s=0.0)
    told: list[str] = []
    telling = Telling(told.append)
    assert "".join(there.lines("17", lambda state: telling(state.waits))) == "a line\n"
    assert [line for line in told if line.startswith("waits: ")] == ["waits: Priority", "waits: BadConstraints"]
    assert "sinfo -o" in told[2]


def test_rays_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = RayJobs("head:8265", Settings(folder=tmp_path))
    monkeypatch.setattr(there, "now", lambda _: Now("PENDING", False, message="It waits for GPUs."))
    assert there.state("job").waits == Waiting("It waits for GPUs.")
    monkeypatch.setattr(there, "now", lambda _: Now("RUNNING", False, message="It runs."))
    assert there.state("job").waits is None
