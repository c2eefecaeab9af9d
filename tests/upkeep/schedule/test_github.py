"""Workflows, held against the schema of GitHub's workflows."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.upkeep.schedule.export import Export, workflow
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


def made(text: str) -> dict[str, Any]:
    """The workflow, once GitHub's schema has taken it."""
    document = yaml.safe_load(text)
    assert [error.message for error in schema().iter_errors(document)] == []
    return dict(document)


def test_a_workflow(written: Written) -> None:
    item = written("0 3 * * sat", "Asia/Kolkata")
    ((file, text),) = workflow(item, export("/opt/q m/quantmint"), runner=RUNNER, secrets=["QUANTMINT_WEBHOOK"]).items()
    assert file == "quantmint-mine.yml"
    document = made(text)
    assert document["on"]["schedule"] == [{"cron": "0 3 * * 6", "timezone": "Asia/Kolkata"}]
    assert document["on"]["workflow_dispatch"] == {}
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"] == {"group": "quantmint-mine", "cancel-in-progress": False}
    job = document["jobs"]["requantize"]
    assert job["runs-on"] == [*RUNNER]
    checkout, step = job["steps"]
    # Pinned by commit; the store and what was published stay, and no token does.
    assert re.fullmatch("actions/checkout@[0-9a-f]{40}", checkout["uses"])
    assert checkout["with"] == {"persist-credentials": False, "clean": False}
    assert step["run"] == "'/opt/q m/quantmint' requantize mine --due"
    assert step["env"] == {"QUANTMINT_WEBHOOK": "${{ secrets.QUANTMINT_WEBHOOK }}"}


def test_rights_and_secrets_are_those_that_it_needs(written: Written) -> None:
    publish = {"hub": {"repo": "org/name"}, "folder": None, "licence": {"id": "apache-2.0"}}
    keyless = written("0 3 * * 6", publish={**publish, "sign": {"keyless": True}})
    assert "timezone" not in workflow(keyless, export(), runner=RUNNER)["quantmint-mine.yml"], "UTC needs none"
    document = made(*workflow(keyless, export(), runner=RUNNER).values())
    assert document["permissions"] == {"contents": "read", "id-token": "write"}
    step = document["jobs"]["requantize"]["steps"][-1]
    assert step["env"] == {"HF_TOKEN": "${{ secrets.HF_TOKEN }}"}
    signed = written("0 3 * * 6", publish={**publish, "sign": {"key": "signing.pem"}})
    document = made(*workflow(signed, export(), runner=RUNNER).values())
    assert document["permissions"] == {"contents": "read"}
    assert set(document["jobs"]["requantize"]["steps"][-1]["env"]) == {"HF_TOKEN", "QUANTMINT_SIGNING_PASSPHRASE"}


def test_a_folder_of_the_runner_needs_no_action(written: Written) -> None:
    (text,) = workflow(written("0 3 * * 6"), export(directory="/srv/models"), runner=RUNNER).values()
    (step,) = made(text)["jobs"]["requantize"]["steps"]
    assert step["working-directory"] == "/srv/models"
    assert "uses" not in text


def test_what_github_cannot_say(written: Written) -> None:
    with pytest.raises(UserError, match="both must hold, and one is enough for GitHub"):
        workflow(written("0 3 */2 * 1"), export(), runner=RUNNER)


def test_what_is_not_asked_for_is_refused(written: Written) -> None:
    item = written("0 3 * * 6")
    with pytest.raises(UserError, match="--runner"):
        workflow(item, export(), runner=())
    with pytest.raises(UserError, match="name of a secret"):
        workflow(item, export(), runner=RUNNER, secrets=["A=b"])
    for more in ({"variables": {"A": "${{ github.token }}"}}, {"store": "/${{ x }}"}, {"directory": "/${{ x }}"}):
        with pytest.raises(UserError, match="GitHub would replace"):
            workflow(item, export(**more), runner=RUNNER)
