"""What is sent, as text to be read: scripts, manifests and entry points of several recipes and options."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.submit import ray
from quantmint.pipeline.clusters.submit import slurm as sbatch
from quantmint.pipeline.clusters.submit.job import JobRequest
from quantmint.pipeline.clusters.submit.pod import Pod, VolumeClaim, job_manifest
from quantmint.pipeline.commands.cluster_options import parse_sbatch
from tests.clusters.submit.cases import GOLDEN, IMAGE, script, task
from tests.serving.render.test_kubernetes import held_against_the_api

_GOLDEN = Path(__file__).parent / "golden"


def named(ending: str) -> list[str]:
    return [name for name in GOLDEN if name.endswith(ending)]


@pytest.mark.parametrize("name", GOLDEN)
def test_it_is_the_text_that_was_read(name: str) -> None:
    """`python -m tests.clusters.submit.cases` writes the files again."""
    assert GOLDEN[name]() == (_GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", named(".sh"))
def test_a_shell_can_read_the_script(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(_GOLDEN / name)], capture_output=True, check=False).stderr == b""


@pytest.mark.parametrize("name", named(".yaml"))
def test_the_api_has_every_field_of_the_manifest(name: str) -> None:
    pytest.importorskip("kubernetes", reason="the API's own models are the oracle")
    held_against_the_api(yaml.safe_load(GOLDEN[name]()), "V1Job")


def test_sbatch_gets_the_script_that_a_dry_run_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in {
        "sbatch": f"echo $* >&2; cat > '{tmp_path}/sent'; echo 'a note'; echo '17;there'",
        "srun": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    of, options = task("llama70b-fp8kv", cpus=8), sbatch.SlurmOptions(partition="mi300x", setup=("module load x",))
    there = sbatch.Slurm(options, folder=tmp_path, logs=tmp_path / "logs")
    job = there.submit(of)
    assert (job.identifier, job.log) == ("17", f"{tmp_path}/logs/17_0_log.out")
    assert (tmp_path / "sent").read_text(encoding="utf-8") == there.describe(of)


@pytest.mark.parametrize("code", [0, 1, 3, 5])
def test_the_script_ends_as_the_run_did(code: int, tmp_path: Path) -> None:
    """With a stand-in for srun that runs what follows its own arguments."""
    ended, _ = _executed(tmp_path, f"exit {code}")
    assert ended == code


@pytest.mark.parametrize("srun", ["exit 1", "exit 0"])
def test_what_srun_says_is_no_verdict(srun: str, tmp_path: Path) -> None:
    """It ends with 1 where a container's image cannot be had or a step cannot be made."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/17.code").write_text("0\n", encoding="utf-8")  # of an earlier turn
    ended, log = _executed(tmp_path, "exit 0", srun=srun)
    assert ended == 5
    assert log == f"the run recorded no exit code: srun ended with {srun[-1]}\n"


@pytest.mark.parametrize(("ray", "code"), [("exit 0", 5), ("exit 1", 5), ('"$@"; exit 0', 3)])
def test_what_ray_says_of_its_start_is_no_verdict(ray: str, code: int, tmp_path: Path) -> None:
    """`ray symmetric-run` ends with 0 where its head did not start, and with 1 where a node did not come."""
    ray = f'while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done; shift; {ray}'
    assert _executed(tmp_path, "exit 3", of=task("llama405b-fp8kv", gpus=16), ray=ray)[0] == code


def test_before_the_time_limit_it_asks_for_another_turn_and_waits_on(tmp_path: Path) -> None:
    ended, log = _executed(tmp_path, 'kill -USR1 "$PPID_OF_SCRIPT"; sleep 0.2; echo went on; exit 4')
    assert ended == 4
    assert log == "scontrol requeue 17\nwent on\n"


def test_it_does_not_ask_for_ever(tmp_path: Path) -> None:
    ended, log = _executed(tmp_path, 'kill -USR1 "$PPID_OF_SCRIPT"; sleep 0.2; exit 4', rounds=sbatch.ROUNDS)
    assert (ended, log) == (4, "")


def _executed(
    folder: Path,
    run: str,
    *,
    of: JobRequest | None = None,
    rounds: int = 0,
    srun: str = 'while [ $# -gt 0 ] && [ "$1" != sh ] && [ "$1" != bash ]; do shift; done; exec "$@"',
    ray: str = "",
) -> tuple[int, str]:
    """How the script ended and what it said, where `quantmint` is ``run``."""
    commands, logs = folder / "bin", folder / "logs"
    commands.mkdir()
    logs.mkdir(exist_ok=True)
    for name, text in {
        "srun": f"export PPID_OF_SCRIPT=$PPID; {srun}",
        "quantmint": run,
        "scontrol": 'echo "scontrol $*"',
        "ray": ray,
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (commands / name).chmod(0o755)
    path, options = folder / "job.sh", sbatch.SlurmOptions()
    with patch("sys.executable", str(commands / "python")):
        text = sbatch.script(of or task("tiny-ptpc-fp8kv"), options, folder=folder, logs=logs)
    path.write_text(text, encoding="utf-8")
    env = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(rounds)}
    done = subprocess.run(["bash", str(path)], env=env, capture_output=True, text=True, check=False, timeout=30)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_options_of_sbatch_count_before_ours() -> None:
    given = parse_sbatch(("job-name=mine", "gpus-per-node=mi300x:4", "exclusive", "no-requeue", "mail-type=END"))
    lines = script(task("llama70b-fp8kv"), sbatch=given).splitlines()
    for option in ("job-name=mine", "gpus-per-node=mi300x:4", "exclusive", "no-requeue", "mail-type=END"):
        assert [line for line in lines if line.startswith(f"#SBATCH --{option.partition('=')[0]}")] == [
            f"#SBATCH --{option}"
        ]
    assert "#SBATCH --requeue" not in lines
    with pytest.raises(UserError, match="expected NAME=VALUE or NAME"):
        parse_sbatch(("a\n#SBATCH --uid=0",))


def test_an_image_that_a_job_is_not_in_is_not_taken_along() -> None:
    of = task("tiny-ptpc-fp8kv")
    for options in ({}, {"container": "image:tag"}, {"container": "/images/a.sif"}):
        assert "unset QUANTMINT_IMAGE" in script(of, **options).splitlines()
    assert f"export QUANTMINT_IMAGE={IMAGE}" in script(of, container=IMAGE).splitlines()


def test_no_text_is_read_by_a_shell() -> None:
    evil = "a b; $(touch /tmp/x) `id` 'q\" &"
    of = task("tiny-ptpc-fp8kv", store=evil, arguments=("--until", evil))
    line = next(line for line in script(of).replace("\\\n", "").splitlines() if line.startswith("srun"))
    assert shlex.split(line.removesuffix(" &"))[-4:] == ["--store", evil, "--until", evil]
    entry = ray.description(of, Path(f"/{evil}"))["entrypoint"]
    assert shlex.split(entry)[:3] == ["cd", f"/{evil}", "||"]
    assert shlex.split(entry)[-4:] == ["--store", evil, "--until", evil]
    made = job_manifest(of, Pod("i", claims=(VolumeClaim("c", "/"),)))
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-1].replace("$$", "$") == evil
    given = Pod("i", claims=(VolumeClaim("c"),), variables={"PRICE": "$$(HOME)"})
    money = job_manifest(task("tiny-ptpc-fp8kv", arguments=("--until", "$$(HOME)")), given)
    container = money["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-1] == container["env"][0]["value"] == "$$$$(HOME)", "Kubernetes reads $$ as $"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 12}, "do not fill a whole number of nodes"),
        ({"arguments": ("--until", "in\nspect")}, "printable text on one line"),
        ({"store": ""}, "printable text on one line"),
    ],
)
def test_a_task_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task("llama70b-fp8kv", **options)


def test_a_cpu_has_no_gpus() -> None:
    assert task("tiny-ptpc-fp8kv").gpus == 0
    with pytest.raises(UserError, match="the recipe's target is a CPU"):
        task("tiny-ptpc-fp8kv", gpus=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup": ("module load\n#SBATCH --uid=0",)}, "printable text on one line"),
        ({"setup": ("export HF_TOKEN=hf_x",)}, "HF_TOKEN, which looks like the name of a secret"),
        ({"sbatch": {"export": "ALL,AWS_SECRET_ACCESS_KEY=x"}}, "AWS_SECRET_ACCESS_KEY"),
        ({"partition": "a\n#SBATCH --uid=0"}, "printable text on one line"),
    ],
)
def test_a_script_that_is_not_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        script(task("tiny-ptpc-fp8kv"), **options)
