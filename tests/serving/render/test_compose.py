"""The compose file: read back, held against the parts of the compose specification that it uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from pipeline.serving.knobs.table import table
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.compose import compose
from pipeline.serving.render.invocation import arguments, variables

Launch = tuple[LaunchPlan, tuple[Process, ...]]
TEXTS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
DURATION = {"type": "string", "pattern": r"^(\d+[smh])+$"}
SERVICE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "entrypoint", "command", "environment", "volumes", "network_mode"],
    "properties": {
        "image": {"type": "string", "pattern": r"^[a-z0-9./_-]+:[\w.-]+$"},
        "profiles": {"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z0-9][a-zA-Z0-9_.-]+$"}},
        "entrypoint": {"type": "array", "items": {"type": "string"}},
        "command": {"type": "array", "items": {"type": "string"}},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "volumes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "source", "target"],
                "properties": {
                    "type": {"enum": ["bind", "volume", "tmpfs"]},
                    "source": {"type": "string"},
                    "target": {"type": "string"},
                    "read_only": {"type": "boolean"},
                    "bind": {"type": "object", "properties": {"create_host_path": {"type": "boolean"}}},
                },
            },
        },
        "network_mode": {"type": "string"},
        "ipc": {"type": "string"},
        "restart": {"type": "string"},
        "stop_grace_period": DURATION,
        "group_add": TEXTS,
        "security_opt": TEXTS,
        "cap_add": TEXTS,
        "devices": TEXTS,
        "deploy": {"type": "object"},
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "test": {"type": "array", "items": {"type": "string"}},
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer"},
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "services": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-zA-Z0-9._-]+$"},
            "additionalProperties": SERVICE,
        }
    },
}


def services(text: str) -> dict[str, Any]:
    import jsonschema  # takes two seconds, of everybody who collects tests

    document = yaml.safe_load(text)
    jsonschema.validate(document, SCHEMA)
    found: dict[str, Any] = document["services"]
    return found


def plain(value: str) -> str:
    """What compose makes of a value: it has no variables of ours."""
    assert "$" not in value.replace("$$", "")
    return value.replace("$$", "$")


@pytest.mark.parametrize("launch", ["one", "replicas", "on_cpu"])
def test_a_service_runs_what_the_plan_says(launch: str, request: pytest.FixtureRequest) -> None:
    plan, processes = request.getfixturevalue(launch)
    found = list(services(compose(plan, processes, image="ours:1")).values())
    assert len(found) == len(processes)
    for service, process in zip(found, processes, strict=True):
        given = tuple(plain(word) for word in (*service["entrypoint"], *service["command"]))
        assert given == arguments(process)
        environment = {name: plain(value) for name, value in service["environment"].items()}
        assert environment == variables(plan, process)
        assert f":{process.port}/health" in service["healthcheck"]["test"][-1]
        assert "profiles" not in service
    kfd = "/dev/kfd:/dev/kfd" in found[0].get("devices", ())
    assert kfd == (launch != "on_cpu")


def test_names(one: Launch, replicas: Launch) -> None:
    assert list(services(compose(*one))) == ["vllm"]
    assert list(services(compose(*replicas))) == ["vllm-0", "vllm-1", "vllm-2"]


def test_nodes_are_profiles(ray: Launch) -> None:
    found = services(compose(*ray))
    assert {name: service["profiles"] for name, service in found.items()} == {
        "node-0": ["node-0"],
        "node-1": ["node-1"],
    }
    for service in found.values():
        assert "/dev/infiniband:/dev/infiniband" in service["devices"]
        assert "IPC_LOCK" in service["cap_add"]
    assert "healthcheck" not in found["node-1"]


def test_it_says_why(one: Launch, replicas: Launch) -> None:
    plan, processes = one
    text = compose(plan, processes)
    assert text == compose(plan, processes)
    assert "&id" not in compose(*replicas), "nobody reads anchors"
    top = text[: text.index("services:")]
    assert all(line.startswith("#") for line in top.splitlines())
    for said in ("--max-num-seqs: the load of the profile [quantmint]", "warning: nobody has run this yet"):
        assert said in top


def test_every_option_of_the_table_has_a_form(one: Launch) -> None:
    plan, processes = one
    options = [knob for knob in table().values() if knob.kind == "docker" and not knob.never and knob.name != "image"]
    assert len(options) >= 8
    words = [
        word
        for knob in options
        for word in (knob.name, *([] if knob.rules[0].value is True else [str(knob.rules[0].value)]))
    ]
    (service,) = services(compose(replace(plan, docker=tuple(words)), processes)).values()
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"
