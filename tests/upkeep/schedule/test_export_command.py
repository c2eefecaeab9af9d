"""quantmint schedule export: what it takes, prints and writes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.submit.cases import TEMPLATE
from tests.upkeep.schedule.conftest import Written

_IMAGE = "quantmint@sha256:" + "0a" * 32
_FORMS = {
    "--systemd": ["quantmint-mine.service", "quantmint-mine.timer", "quantmint-two.service", "quantmint-two.timer"],
    "--cron --machine-timezone UTC": ["quantmint.crontab"],
    f"--kubernetes --image {_IMAGE} --pvc work --cpus 16 --pod-template {TEMPLATE}": [
        "quantmint-mine.yaml",
        "quantmint-two.yaml",
    ],
    "--github-actions --runner self-hosted": ["quantmint-mine.yml", "quantmint-two.yml"],
}


@pytest.mark.parametrize("form", _FORMS)
def test_files_are_what_is_printed(form: str, written: Written, schedule: Callable[..., Any], tmp_path: Path) -> None:
    written("0 3 * * 6")
    written("0 4 * * 6", name="two")
    done = schedule("export", *shlex.split(form), "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert [Path(line).name for line in done.out.splitlines()] == _FORMS[form]
    texts = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert sorted(texts) == sorted(_FORMS[form])
    printed = schedule("export", *shlex.split(form)).out
    for name, text in texts.items():
        assert text in printed
        assert text.startswith(f"# {name}: ")
        assert f": made by `quantmint schedule export {form.split()[0]}`" in text


def test_the_recipe_is_named_as_it_is_found_there(
    written: Written, schedule: Callable[..., Any], tmp_path: Path
) -> None:
    written("0 3 * * 6")
    here = schedule("export", "--systemd", "recipes/mine.yaml", "--command", "/opt/q/quantmint --debug").out
    assert f"ExecStart=/opt/q/quantmint --debug requantize {tmp_path}/recipes/mine.yaml --due\n" in here
    assert f"WorkingDirectory={tmp_path}\n" in here
    assert (
        "/mine.yaml --due --on http://head:8265\n"
        in schedule("export", "--systemd", "recipes/mine.yaml", "--on", "http://head:8265").out
    )
    there = schedule("export", "--kubernetes", "--image", _IMAGE, "recipes/mine.yaml").out
    on = ("--on", "ray", "--env", "RAY_ADDRESS=http://head:8265")
    assert "- --on\n" in schedule("export", "--kubernetes", "--image", _IMAGE, "recipes/mine.yaml", *on).out
    (container,) = yaml.safe_load(there)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["quantmint", "requantize", "recipes/mine.yaml", "--due"]


def test_no_secret_goes_into_a_file(written: Written, schedule: Callable[..., Any]) -> None:
    written("0 3 * * 6", publish={"hub": {"repo": "org/name"}, "folder": None, "licence": {"id": "apache-2.0"}})
    for form, way in (("--systemd", "--environment-file"), ("--github-actions", "--secret")):
        runner = ("--runner=x",) if "git" in form else ()
        done = schedule("export", form, "--env", "HF_TOKEN=hf_private", *runner)
        assert (done.code, done.out) == (2, "")
        assert way in done.err
        assert "hf_private" not in done.err
    told = schedule("export", "--systemd").err
    assert "HF_TOKEN come from --environment-file" in told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "expected one of --systemd, --cron, --kubernetes, --github-actions"),
        ("--systemd --cron", "found --systemd and --cron"),
        ("--cron --image x", "--image is for kubernetes, not for cron"),
        ("--kubernetes --on ray --image x", "a pod is no node of a Ray cluster"),
        ("--github-actions --on ray --runner x", "--on is for systemd and cron and kubernetes"),
        ("--systemd --on head:8265", "expected ray (RAY_ADDRESS's cluster"),
        ("--kubernetes", "--image NAME@sha256"),
        ("--systemd --directory here", "expected an absolute path"),
        ("--systemd --env a-b=c", "expected NAME=VALUE"),
        ("--systemd --directory '/a\n[Service]'", "line break"),
        ("--systemd unknown", "unknown"),
        ("--systemd tiny-ptpc-fp8kv", "tiny-ptpc-fp8kv has no schedule"),
        ("--cron --machine-timezone Europe/Berlin", "cron only knows this machine's time zone"),
    ],
)
def test_what_is_wrong_is_said(written: Written, schedule: Callable[..., Any], line: str, said: str) -> None:
    written("0 3 * * 6")
    done = schedule("export", *shlex.split(line))
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


def test_without_schedules_there_is_nothing_to_export(
    schedule: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = schedule("export", "--systemd")
    assert done.code == 2
    assert "no recipe of ./recipes has a schedule" in done.err
    assert "no recipe" in schedule("list").out
