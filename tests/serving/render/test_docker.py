"""The compose file, read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from pipeline.base.errors import UserError
from pipeline.serving.knobs.table import table
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.docker import compose, mounted
from pipeline.serving.render.invocation import arguments, variables

Launch = tuple[LaunchPlan, tuple[Process, ...]]
MODEL = "/models/it's a model"


def test_a_cpu_has_no_image_of_its_own(on_cpu: Launch) -> None:
    plan, processes = on_cpu
    with pytest.raises(UserError, match=r"no image of vLLM 0\.32\.0\+cpu for cpu:1"):
        compose(plan, processes)


def test_a_snapshot_of_the_hub_is_mounted_with_its_blobs(one: Launch) -> None:
    plan, _ = one
    cache = "/home/me/.cache/huggingface/hub/models--org--name"
    argv = ("vllm", "serve", f"{cache}/snapshots/abc", "--chat-template", f"{cache}/snapshots/abc/chat.jinja")
    assert mounted(replace(plan, argv=argv, env={})) == (cache,)
    assert mounted(replace(plan, argv=("vllm", "serve", "org/name"), env={})) == ()


def services(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)["services"]
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
        assert service["network_mode"] == "host"
        assert all(volume["read_only"] and volume["type"] == "bind" for volume in service["volumes"])
    kfd = "/dev/kfd:/dev/kfd" in found[0].get("devices", ())
    assert kfd == (launch != "on_cpu")


def test_nodes_are_profiles(headless: Launch) -> None:
    found = services(compose(*headless))
    assert {name: service["profiles"] for name, service in found.items()} == {
        f"node-{node}": [f"node-{node}"] for node in range(3)
    }
    for service in found.values():
        assert "/dev/infiniband:/dev/infiniband" in service["devices"]
        assert "IPC_LOCK" in service["cap_add"]
    assert "healthcheck" not in found["node-1"]


def test_it_says_what_it_is_and_warns(one: Launch, replicas: Launch) -> None:
    plan, processes = one
    text = compose(plan, processes)
    assert text == compose(plan, processes)
    assert "&id" not in compose(*replicas), "nobody reads anchors"
    top = text[: text.index("services:")]
    assert all(line.startswith("#") for line in top.splitlines())
    assert "planned for vLLM 0.33.0" in top
    assert "warning: nobody has run this yet" in top


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
