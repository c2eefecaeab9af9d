"""The Deployment: every field is one that the Kubernetes API has, of the type and with the values that it takes."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout, Process
from quantmint.pipeline.serving.render.kubernetes import deployment as rendered

if find_spec("kubernetes") is None:
    pytest.skip("kubernetes is not installed, whose models of the API are the oracle", allow_module_level=True)
Launch = tuple[LaunchPlan, tuple[Process, ...]]
_OLDEST = "1.31"  # in which a Job may say which failures are worth another pod
_PLAIN = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def held_against_the_api(value: Any, kind: str) -> None:
    """By the client's models, which know what is missing; a whole object by the API's published schemas as well.

    Those are what kubeconform reads. ValueError names what the API would drop or refuse.
    """
    _held_against_the_models(value, kind)
    if "apiVersion" in value:
        import kubernetes_validate

        for version in (_OLDEST, kubernetes_validate.latest_version()):
            try:
                kubernetes_validate.validate(value, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise ValueError(f"Kubernetes {version}: {error.message}") from error


def _held_against_the_models(value: Any, kind: str) -> None:
    """Build the API's own model of `kind`: its setters refuse what is missing, the rest is held against its types."""
    if listed := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), f"expected a list of {listed[1]}, found {value!r}"
        for item in value:
            _held_against_the_models(item, listed[1])
    elif mapped := re.fullmatch(r"dict\[str, (.+)\]", kind):
        assert isinstance(value, dict), f"expected a mapping, found {value!r}"
        for item in value.values():
            _held_against_the_models(item, mapped[1])
    elif kind in _PLAIN:
        assert type(value) in _PLAIN[kind], f"expected {kind}, found {value!r}"
    elif kind != "object":
        from kubernetes import client

        model = getattr(client, kind)
        fields = {given: own for own, given in model.attribute_map.items()}
        for name, item in value.items():
            if name not in fields:
                raise ValueError(f"{kind} has no field {name}")
            _held_against_the_models(item, model.openapi_types[fields[name]])
        model(**{fields[name]: item for name, item in value.items()})


def deployment(plan: LaunchPlan, **options: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(rendered(plan, **options))
    held_against_the_api(document, "V1Deployment")
    return document


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return dict(only)


def test_the_oracle_sees_a_wrong_field(one: Launch) -> None:
    document = deployment(one[0])
    document["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capability"] = {}
    with pytest.raises(ValueError, match="capability"):
        held_against_the_api(document, "V1Deployment")
    document = deployment(one[0])
    document["kind"] = "deployment"  # the client's model takes any text
    with pytest.raises(ValueError, match="'deployment' is not one of"):
        held_against_the_api(document, "V1Deployment")


def test_replicas_are_pods(replicas: Launch) -> None:
    plan, _ = replicas
    document = deployment(plan)
    assert document["metadata"]["name"] == "serve-mine-8b"
    assert document["spec"]["replicas"] == 3
    template = document["spec"]["template"]
    pod = container(template)
    assert pod["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert [*pod["command"], *pod["args"]] == [*plan.argv, "--host", "0.0.0.0", "--port", "8000"]  # noqa: S104
    environment = {entry["name"]: entry["value"] for entry in pod["env"]}
    assert environment == plan.env, "the device plugin chooses the GPUs"
    assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["enableServiceLinks"] is False, "a Service may not set VLLM_PORT"
    assert pod["startupProbe"]["httpGet"]["path"] == "/health"
    assert pod["startupProbe"]["periodSeconds"] * pod["startupProbe"]["failureThreshold"] >= 3600
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["volumeMounts"]
    memory = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "shared-memory")
    assert memory["emptyDir"]["medium"] == "Memory"
    assert pod["securityContext"]["seccompProfile"] == {"type": "Unconfined"}


def test_the_model_comes_from_a_claim(one: Launch) -> None:
    volumes = deployment(one[0], claim="models", image="ours:1")["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": "models", "readOnly": True} in [volume.get("persistentVolumeClaim") for volume in volumes]
    assert "/models/draft $1" in [volume.get("hostPath", {}).get("path") for volume in volumes]


def test_what_kubernetes_does_not_share(one: Launch) -> None:
    plan, _ = one
    with pytest.raises(UserError, match="gives a GPU to one container"):
        rendered(replace(plan, layout=ParallelLayout(packed=2)))
    with pytest.raises(UserError, match="one server on 3 nodes"):
        rendered(replace(plan, layout=ParallelLayout(tensor=8, pipeline=3, nodes=3)))


def test_a_cpu_asks_for_no_device(on_cpu: Launch) -> None:
    pod = container(deployment(on_cpu[0], image="ours:1")["spec"]["template"])
    assert "resources" not in pod
    assert "securityContext" not in pod


def test_references_of_kubernetes_are_not_made_by_values(one: Launch) -> None:
    plan, _ = one
    document = deployment(replace(plan, env={"NAME": "$(HOME)"}))
    assert container(document["spec"]["template"])["env"] == [{"name": "NAME", "value": "$$(HOME)"}]
