"""Workflows, held against the schema of GitHub's workflows and, where it is there, actionlint."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.base.errors import UserError
from pipeline.upkeep.schedule.export import CHECKOUT, Export, workflow
from tests.upkeep.schedule.conftest import Written

RUNNER = ("self-hosted", "mi300x")


def export(*program: str, **more: Any) -> Export:
    return Export(program or ("quantmint",), "quantmint schedule export --github-actions", **more)


@cache
def schema() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    found = find_spec("check_jsonschema")
    if found is None or found.origin is None:
        pytest.skip("check-jsonschema, which brings GitHub's schema, is not installed")
    path = Path(found.origin).parent / "builtin_schemas" / "vendor" / "github-workflows.json"
    return jsonschema.Draft7Validator(json.loads(path.read_text(encoding="utf-8")))


def made(text: str, folder: Path) -> dict[str, Any]:
    """The workflow, once GitHub's schema and actionlint have taken it.

    actionlint knows `timezone` since 1.7.12, and labels of a runner of one's own by its configuration.
    """
    document = yaml.safe_load(text)
    assert [error.message for error in schema().iter_errors(document)] == []
    if linter := shutil.which("actionlint"):
        path = folder / "workflow.yml"
        path.write_text(text, encoding="utf-8")
        labels = folder / "actionlint.yaml"
        labels.write_text(json.dumps({"self-hosted-runner": {"labels": RUNNER}}), encoding="utf-8")
        command = [linter, "-config-file", str(labels), "-shellcheck=", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    return dict(document)


def test_a_workflow(written: Written, tmp_path: Path) -> None:
    item = written("0 3 * * sat", "Asia/Kolkata", missed="skip")
    ((file, text),) = workflow(item, export("/opt/q m/quantmint"), runner=RUNNER, secrets=["QUANTMINT_WEBHOOK"]).items()
    assert file == "quantmint-mine.yml"
    document = made(text, tmp_path)
    assert document["on"]["schedule"] == [{"cron": "0 3 * * 6", "timezone": "Asia/Kolkata"}]
    assert document["on"]["workflow_dispatch"] == {}
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"] == {"group": "quantmint-mine", "cancel-in-progress": False}
    job = document["jobs"]["requantize"]
    assert job["runs-on"] == [*RUNNER]
    checkout, step = job["steps"]
    # Pinned by commit; the store and what was published stay, and no token does.
    assert checkout["uses"] == CHECKOUT
    assert len(CHECKOUT.partition("@")[2]) == 40
    assert checkout["with"] == {"persist-credentials": False, "clean": False}
    assert step["run"] == "'/opt/q m/quantmint' requantize mine --due"
    assert step["env"] == {"QUANTMINT_WEBHOOK": "${{ secrets.QUANTMINT_WEBHOOK }}"}


def test_times_in_utc_need_no_zone(written: Written, tmp_path: Path) -> None:
    (text,) = workflow(written("0 3 * * 6", missed="skip"), export(), runner=RUNNER).values()
    assert made(text, tmp_path)["on"]["schedule"] == [{"cron": "0 3 * * 6"}]


def test_the_schema_sees_a_wrong_workflow(written: Written, tmp_path: Path) -> None:
    (text,) = workflow(written("0 3 * * 6", missed="skip"), export(), runner=RUNNER).values()
    with pytest.raises(AssertionError):
        made(text.replace("timeout-minutes", "timeout"), tmp_path)


def test_rights_and_secrets_are_those_that_it_needs(written: Written, tmp_path: Path) -> None:
    publish = {"hub": {"repo": "org/name"}, "folder": None, "licence": {"id": "apache-2.0"}}
    keyless = written("0 3 * * 6", missed="skip", publish={**publish, "sign": {"keyless": True}})
    document = made(*workflow(keyless, export(), runner=RUNNER).values(), tmp_path)
    assert document["permissions"] == {"contents": "read", "id-token": "write"}
    step = document["jobs"]["requantize"]["steps"][-1]
    assert step["env"] == {"HF_TOKEN": "${{ secrets.HF_TOKEN }}"}
    signed = written("0 3 * * 6", missed="skip", publish={**publish, "sign": {"key": "signing.pem"}})
    document = made(*workflow(signed, export(), runner=RUNNER).values(), tmp_path)
    assert document["permissions"] == {"contents": "read"}
    assert set(document["jobs"]["requantize"]["steps"][-1]["env"]) == {"HF_TOKEN", "QUANTMINT_SIGNING_PASSPHRASE"}


def test_a_folder_of_the_runner_needs_no_action(written: Written, tmp_path: Path) -> None:
    (text,) = workflow(written("0 3 * * 6", missed="skip"), export(directory="/srv/models"), runner=RUNNER).values()
    (step,) = made(text, tmp_path)["jobs"]["requantize"]["steps"]
    assert step["working-directory"] == "/srv/models"
    assert "uses" not in text


@pytest.mark.parametrize(
    ("expression", "missed", "said"),
    [
        ("0 3 * * 6", "run", "missed: run cannot be kept"),
        ("0 3 L * *", "skip", "GitHub knows no L, LW or #"),
        ("0 3 */2 * 1", "skip", "both must hold, and one is enough for GitHub"),
    ],
)
def test_what_github_cannot_say(written: Written, expression: str, missed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        workflow(written(expression, missed=missed), export(), runner=RUNNER)


def test_what_is_not_asked_for_is_refused(written: Written) -> None:
    item = written("0 3 * * 6", missed="skip")
    with pytest.raises(UserError, match="--runner"):
        workflow(item, export(), runner=())
    with pytest.raises(UserError, match="name of a secret"):
        workflow(item, export(), runner=RUNNER, secrets=["A=b"])
    for more in ({"variables": {"A": "${{ github.token }}"}}, {"store": "/${{ x }}"}, {"directory": "/${{ x }}"}):
        with pytest.raises(UserError, match="GitHub would replace"):
            workflow(item, export(**more), runner=RUNNER)
