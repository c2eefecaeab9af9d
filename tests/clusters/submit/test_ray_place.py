"""A real head with its dashboard: jobs come back with the runs' own exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError
from quantmint.pipeline.clusters.submit import job as jobs
from quantmint.pipeline.clusters.submit import ray
from quantmint.pipeline.clusters.submit.job import follow
from quantmint.pipeline.clusters.submit.ray import RayJobs, run_attached
from tests.clusters.submit.cases import task
from tests.clusters.submit.slurm import free_ports
from tests.clusters.submit.test_command import ended
from tests.processes import processes_naming

if find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of a head of its own, which ends with these tests."""
    # A path of a socket below it must not be longer than 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="qm-jobs-", dir="/tmp"))
    port, client, web, agent = free_ports(4)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-port={web}"]
    command += [f"--dashboard-agent-listen-port={agent}"]
    command += ["--no-monitor", "--include-log-monitor=false"]  # what scales a cluster, what reads logs to drivers
    command += [f"--temp-dir={folder}", "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={80 << 20}"]
    env = {**os.environ, "RAY_raylet_start_wait_time_s": "180"}
    with (folder / "head.out").open("wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
    try:
        address = f"http://127.0.0.1:{web}"
        for ready in (f"{address}/api/version", f"http://127.0.0.1:{agent}/api/local_raylet_healthz"):
            _answering(ready, head, folder / "head.out")
        yield address
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(head.pid, number)
            with suppress(subprocess.TimeoutExpired):
                head.wait(timeout=3)
        end = time.monotonic() + 20
        while (left := processes_naming(str(folder))) and time.monotonic() < end:
            time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)
    assert left == ()


def _answering(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 180
    while head.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"Ray did not start:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.mark.slow
def test_a_recipe_runs_there(
    dashboard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUANTMINT_STORE", raising=False)
    assert ended("tiny-ptpc", "--ray", dashboard, "--follow", "--json", "--", "--until", "source") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["place"], told["state"], told["exit_code"]) == ("ray", "SUCCEEDED", 0)
    assert '"stage": "source"' in err
    assert len(list((tmp_path / "store/source").iterdir())) == 1
    assert ended("--ray", dashboard, "--status", told["id"]) == 0
    assert capsys.readouterr().out == f"{told['id']}  SUCCEEDED  0\n"


@pytest.mark.slow
def test_a_verdict_is_the_jobs_exit_code_and_a_job_can_be_ended(
    dashboard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "env/bin/quantmint"
    program.parent.mkdir(parents=True)
    begun = tmp_path / "begun"
    wait = f"touch '{begun}'; exec sleep 60"
    program.write_text(f'#!/bin/sh\npwd; case "$*" in *source*) {wait};; esac; exit 3\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    there = RayJobs(dashboard, tmp_path, {"A_NAME": "a value"})
    long = there.submit(task("tiny-ptpc-fp8kv", arguments=("--until", "source"))).identifier
    job = there.submit(task("tiny-ptpc-fp8kv")).identifier
    log: list[str] = []
    assert follow(there, job, log.append, lambda _: None).exit_code == 3
    assert f"{tmp_path}\n" in "".join(log)
    end = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert there.state(long).status == "RUNNING"
    there.call("stop_job", long)
    while there.state(long).exit_code is None and time.monotonic() < end:
        time.sleep(0.1)
    assert there.state(long).status == "STOPPED"
    with pytest.raises(UserError, match="nothing does not exist"):
        there.state("nothing")


@pytest.mark.slow
def test_a_run_there_as_if_it_were_here(
    dashboard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "http://nowhere.invalid:8265")  # the address that is given counts
    program = tmp_path / "env/bin/quantmint"
    program.parent.mkdir(parents=True)
    says = 'echo "[1/2] source: started" >&2; echo "{\\"verdict\\": \\"INCONCLUSIVE\\"}"; exit 3'
    program.write_text(f"#!/bin/sh\n{says}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    words = ("tiny-ptpc-fp8kv", "--ray", dashboard, "--attached", "--json")
    assert ended(*words) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"verdict": "INCONCLUSIVE"}
    assert "\n[1/2] source: started\n" in err


def test_without_a_dashboard_it_says_so() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StageError, match="no Ray dashboard answers") as failure:
        RayJobs(f"127.0.0.1:{port}", Path.cwd()).state("job")
    assert failure.value.transient


@dataclass
class Client:
    """A dashboard of which each job goes through ``steps``: its status, and what is known of one that ended."""

    steps: list[tuple[str, dict[str, Any]]]
    log: str = "[1/2] source: started\n"
    submitted: int = 0
    stopped: list[str] = field(default_factory=list)
    interrupt: bool = False

    def submit_job(self, **_: object) -> str:
        self.submitted += 1
        return f"job-{self.submitted}"

    def get_job_info(self, _: str) -> SimpleNamespace:
        word, known = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        nothing = {"driver_exit_code": None, "error_type": None, "message": ""}
        return SimpleNamespace(status=SimpleNamespace(value=word), **{**nothing, **known})

    def get_job_logs(self, _: str) -> str:
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.log

    def stop_job(self, identifier: str) -> None:
        self.stopped.append(identifier)


UNPLACED = ("FAILED", {"error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"})


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """What ends an attached run ends it with its process; here that goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def attached(client: Client, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """The exit code, the object, and what was shown."""
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)
    there, shown = RayJobs("head:8265", Path("/work")), []
    monkeypatch.setattr(there, "_connect", lambda: client)
    code, printed = run_attached(there, task("tiny-ptpc-fp8kv"), shown.append)
    return code, printed, "".join(shown)


def test_its_own_object_and_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has one log for both outputs, and shows it from its beginning each time."""
    log = '{"recipe": \n[1/2] source: started\n{\n "verdict": "FAIL",\n "stages": [\n  {}\n ]\n}\nquantmint: it ended\n'
    client = Client([("PENDING", {}), ("RUNNING", {}), ("FAILED", {"driver_exit_code": 1})], log)
    code, printed, shown = attached(client, monkeypatch)
    assert (code, json.loads(printed)) == (1, {"verdict": "FAIL", "stages": [{}]})
    assert shown == f"job-1 was submitted\n{log}"


def test_what_found_no_room_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([UNPLACED] * 2 + [("SUCCEEDED", {})])
    assert attached(client, monkeypatch)[:2] == (0, "")
    assert client.submitted == 2


@pytest.mark.parametrize(
    ("end", "message", "transient"),
    [
        (("FAILED", {"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "its node died"}), "its node died", True),
        (("FAILED", {"message": "no such environment"}), "no such environment", False),
        (("STOPPED", {}), "STOPPED", False),
    ],
)
def test_a_job_without_an_end_of_its_own(
    end: tuple[str, dict[str, Any]], message: str, transient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StageError, match=message) as failure:
        attached(Client([end]), monkeypatch)
    assert failure.value.transient is transient


def test_told_to_stop_it_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([("RUNNING", {})], interrupt=True)
    with pytest.raises(SystemExit) as end:
        attached(client, monkeypatch)
    assert (end.value.code, client.stopped) == (143, ["job-1"])


def _of_a_library(module: str, name: str, base: type[Exception], **values: Any) -> Exception:
    return type(name, (base,), {"__module__": module, **values})("said by it")


@pytest.mark.parametrize(
    ("error", "kind", "transient"),
    [
        (RuntimeError("status code 500: said by it"), StageError, True),
        (RuntimeError("404: said by it"), UserError, False),
        (_of_a_library("ray.exceptions", "AuthenticationError", Exception), UserError, False),
        (_of_a_library("requests.exceptions", "HTTPError", OSError), UserError, False),
    ],
)
def test_what_rays_libraries_raise_is_told_as_ours(error: Exception, kind: type[Exception], transient: bool) -> None:
    with pytest.raises(QuantmintError, match="said by it") as failure, ray._client_errors():
        raise error
    assert type(failure.value) is kind
    assert failure.value.transient is transient


def test_a_folder_that_a_node_does_not_see_is_no_verdict(tmp_path: Path) -> None:
    entry = ray.description(task("tiny-ptpc-fp8kv"), tmp_path / "away")["entrypoint"]
    assert subprocess.run(["sh", "-c", entry], capture_output=True, check=False).returncode == 5


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/env/bin/python")
    place = Path("/shared/models"), {"HF_HOME": "/cache"}
    sent = ray.description(task("llama70b-fp8kv", memory_gb=200), *place)
    run = "/env/bin/python -P -m quantmint run llama70b-fp8kv --json --store store"
    assert sent == {
        "entrypoint": f"cd /shared/models || exit 5; exec {run}",
        "metadata": {"quantmint": "llama70b-fp8kv"},
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "20", "HF_HOME": "/cache"}},
        "entrypoint_num_gpus": 8,
        "entrypoint_memory": 200 * 10**9,
    }
    assert ray.description(task("tiny-ptpc-fp8kv"), *place)["entrypoint_num_cpus"] == 1, "else it begins on the head"
    several = ray.description(task("llama405b-fp8kv", gpus=16), *place)
    assert several["entrypoint"].endswith("--on ray")
    assert not {"entrypoint_num_gpus", "entrypoint_num_cpus"} & several.keys()
