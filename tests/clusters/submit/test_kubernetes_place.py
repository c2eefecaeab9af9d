"""A Job from its manifest to the run's own exit code, through the real client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.clusters.submit import job as jobs
from quantmint.pipeline.clusters.submit.job import follow
from quantmint.pipeline.clusters.submit.kubernetes import Kubernetes
from quantmint.pipeline.clusters.submit.pod import Pod, VolumeClaim
from tests.clusters.submit.cases import IMAGE, task
from tests.clusters.submit.kubernetes_api import Api, served
from tests.clusters.submit.slurm import free_ports
from tests.clusters.submit.test_command import ended
from tests.serving.render.test_kubernetes import held_against_the_api

if find_spec("kubernetes") is None:
    pytest.skip("kubernetes is not installed", allow_module_level=True)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    state = Api()
    with served(state) as address:
        path = kubeconfig(tmp_path, address)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        monkeypatch.setattr(jobs, "_POLL_S", 0.01)
        monkeypatch.chdir(tmp_path)
        yield state


def kubeconfig(folder: Path, address: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def place(namespace: str | None = None, **options: Any) -> Kubernetes:
    return Kubernetes(Pod(IMAGE, claims=(VolumeClaim("shared"),), **options), namespace=namespace)


def followed(api: Api, *tries: tuple[int | None, bytes], **options: Any) -> tuple[int | None, str]:
    api.tries = list(tries)
    here = place(**options)
    job = here.submit(task("tiny-ptpc-fp8kv")).identifier
    log: list[str] = []
    code = follow(here, job, log.append, lambda _: None).exit_code
    return code, "".join(log)


def test_what_is_sent_is_what_a_dry_run_prints(api: Api) -> None:
    of = task("llama70b-fp8kv")
    submitted = place().submit(of)
    job = api.jobs[submitted.identifier]
    assert job.namespace == "team"
    assert job.manifest == yaml.safe_load(place().describe(of))
    held_against_the_api(job.manifest, "V1Job")
    assert submitted.log == f"kubectl logs --namespace team --follow job/{submitted.identifier}"
    assert place().state(submitted.identifier).status == "Running"
    assert api.jobs[place("other").submit(of).identifier].namespace == "other"


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_a_judgement_is_not_asked_for_twice(api: Api, code: int) -> None:
    assert followed(api, (code, b"judged\n"), (0, b"never\n")) == (code, "judged\n")


def test_what_broke_or_was_driven_away_is_tried_again(api: Api) -> None:
    tries = (5, "brok\u00e9\n".encode()), (None, b"evicted\n"), (137, b"killed\n"), (0, b"passed\n")
    assert followed(api, *tries) == (0, "brok\u00e9\nevicted\nkilled\npassed\n")


def test_a_log_that_breaks_off_is_read_to_its_end(api: Api) -> None:
    api.cuts = [0, 5, 12, 9]
    assert followed(api, (0, b"one\ntwo\nthree\nfour\n")) == (0, "one\ntwo\nthree\nfour\n")


@pytest.mark.parametrize(
    ("status", "said"), [(403, "no log of .* is shown: .*refused .403.: said by the API\n"), (404, "")]
)
def test_a_log_that_is_not_shown_is_told(api: Api, status: int, said: str) -> None:
    """The job is followed to its end all the same."""
    api.faults = [None, None, None, status]
    code, log = followed(api, (3, b""))
    assert code == 3
    assert re.fullmatch(said, log)


def test_an_api_that_is_away_for_a_while_ends_nothing(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.tries = [(1, b"judged\n")]
    api.faults = [None, 503, 429]
    assert ended("tiny-ptpc-fp8kv", "--kubernetes", "--image", IMAGE, "--pvc", "shared", "--follow") == 1
    assert capsys.readouterr().out == "judged\n"
    assert api.faults == []


@pytest.mark.parametrize("name", ["", ".."])
def test_what_no_job_is_called_is_not_asked_for(api: Api, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The API takes no name at all for every Job of the namespace."""
    place().submit(task("tiny-ptpc-fp8kv"))
    assert ended("--kubernetes", "--status", name) == 2
    assert "expected the name that Kubernetes gave it" in capsys.readouterr().err


def test_the_command_follows_to_the_runs_own_end(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.tries = [(3, b"some line\n")]
    words = ("tiny-ptpc-fp8kv", "--kubernetes", "--image", IMAGE, "--pvc", "shared", "--follow", "--json")
    assert ended(*words) == 3
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["place"], told["exit_code"], told["state"]) == ("kubernetes", 3, "Failed (PodFailurePolicy)")
    assert "some line\n" in err
    assert ended("--kubernetes", "--status", told["id"]) == 0
    assert capsys.readouterr().out == f"{told['id']}  Failed (PodFailurePolicy)  3\n"


def test_a_dry_run_asks_the_api_server(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tiny-ptpc-fp8kv", "--kubernetes", "--image", IMAGE, "--pvc", "shared", "--dry-run")
    assert ended(*words) == 0
    out, err = capsys.readouterr()
    assert (yaml.safe_load(out)["kind"], err) == ("Job", "")
    assert api.jobs == {}
    assert api.asked == [("All", "Strict")]
    api.fault = 422
    assert ended(*words) == 2
    assert "the Kubernetes API refused (422): said by the API" in capsys.readouterr().err
    api.fault = 503
    assert ended(*words) == 0
    assert "no API server has looked at it" in capsys.readouterr().err


FULL = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/5 nodes are available: 5 Insufficient amd.com/gpu.",
        }
    ]
}
PULLED = {
    "containerStatuses": [
        {
            "name": "quantmint",
            "image": "i",
            "imageID": "i",
            "ready": False,
            "restartCount": 0,
            "state": {"waiting": {"reason": "ErrImagePull", "message": "no such host"}},
        }
    ]
}


def test_why_it_waits_is_said_once(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.tries = [(0, b"ran\n")]
    api.waits = [FULL] * 4 + [PULLED] * 4
    assert ended("tiny-ptpc-fp8kv", "--kubernetes", "--image", IMAGE, "--pvc", "shared", "--follow") == 0
    out, err = capsys.readouterr()
    assert out == "ran\n"
    assert [line for line in err.splitlines() if line.startswith("waits: ")] == [
        "waits: Unschedulable: 0/5 nodes are available: 5 Insufficient amd.com/gpu.",
        "waits: quantmint: ErrImagePull: no such host",
    ]


def test_how_the_api_fails(api: Api) -> None:
    with pytest.raises(UserError, match=r'404.*"nothing" not found'):
        place().state("nothing")
    api.fault = 403
    with pytest.raises(UserError, match=r"\(403\): said by the API"):
        place().submit(task("tiny-ptpc-fp8kv"))
    api.fault = 503
    with pytest.raises(StageError, match="503: said by the API") as broken:
        place().submit(task("tiny-ptpc-fp8kv"))
    assert broken.value.transient


def test_why_the_api_cannot_be_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    config = kubeconfig(tmp_path, f"http://127.0.0.1:{port}")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    with pytest.raises(StageError, match=r"127\.0\.0\.1.*refused") as failure:
        place().state("a")
    assert failure.value.transient
