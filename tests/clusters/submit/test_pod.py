"""A Job's pod: a cluster's own template merged with what the run needs, secrets, and where the store lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import RecipeError, UserError
from quantmint.pipeline.clusters.submit.pod import (
    Pod,
    SecretVariable,
    VolumeClaim,
    job_manifest,
    job_spec,
    read_template,
)
from quantmint.pipeline.commands.cluster_options import parse_claim, parse_secret, parse_variables
from tests.clusters.submit.cases import IMAGE, TEMPLATE, task
from tests.serving.render.test_kubernetes import held_against_the_api

RUN = Pod(IMAGE, name="a", command=("quantmint", "run"), kind="rocm", gpus=8, claims=(VolumeClaim("shared"),))


def given(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "pod.yaml"
    path.write_text(text, encoding="utf-8")
    return read_template(path)


def pod(file: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    own = {"image": IMAGE, "name": "a", "command": ("quantmint", "run"), "kind": "rocm", "gpus": 8}
    run = Pod(**{**own, "claims": (VolumeClaim("shared"),), "template": file, **changes})
    return dict(job_spec(run)["template"])


def container(made: dict[str, Any]) -> dict[str, Any]:
    first = made["spec"]["containers"][0]
    assert first["name"] == "quantmint", "the one whose log kubectl shows"
    return dict(first)


def test_what_only_the_template_says_is_kept() -> None:
    written = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    made = pod(read_template(TEMPLATE))
    own = container(made)
    asked = written["spec"]["containers"].pop()
    for name, value in written["spec"].items():
        found = made["spec"][name]
        assert all(item in found for item in value) if isinstance(value, list) else found == value, name
    assert made["metadata"]["annotations"] == written["metadata"]["annotations"]
    assert made["metadata"]["labels"] == {**pod(None)["metadata"]["labels"], "team": "models"}
    assert [entry for entry in own["env"] if entry in asked["env"]] == asked["env"]
    assert all(mount in own["volumeMounts"] for mount in asked["volumeMounts"])
    assert own["resources"]["requests"] == {"amd.com/gpu": "8", "cpu": "16", "memory": "200Gi"}
    assert own["resources"]["limits"] == {"amd.com/gpu": "8", "memory": "400Gi"}
    assert own["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    "text",
    [
        "priorityClassName: batch\n",
        "metadata: {name: any}\nspec: {priorityClassName: batch}\n",
        "apiVersion: v1\nkind: Pod\nspec: {priorityClassName: batch}\nstatus: {phase: Running}\n",
    ],
)
def test_forms_of_a_file(text: str, tmp_path: Path) -> None:
    made, plain = pod(given(tmp_path, text)), pod(None)
    assert made["spec"].pop("priorityClassName") == "batch"
    assert made == plain


@pytest.mark.parametrize("text", ["- a\n", "spec: [a]\n", "a: 1\n---\na: 2\n", "spec: !!python/object:os.system {}\n"])
def test_what_is_no_pod(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pod\.yaml"):
        given(tmp_path, text)


def test_what_the_run_needs_is_the_runs(tmp_path: Path) -> None:
    other = "image: other, command: [sh], workingDir: /x, env: [{name: HF_HOME, value: /other}], "
    other += "resources: {limits: {amd.com/gpu: 4}}, volumeMounts: [{name: a, mountPath: /work}]"
    file = given(tmp_path, f"restartPolicy: Always\ncontainers: [{{name: quantmint, {other}}}]\n")
    made = pod(file, folder="/work/team", variables={"HF_HOME": "/cache"})
    own = container(made)
    assert (own["image"], own["command"], own["workingDir"]) == (IMAGE, ["quantmint", "run"], "/work/team")
    assert {"name": "HF_HOME", "value": "/cache"} in own["env"]
    assert own["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert {"name": "work", "mountPath": "/work"} in own["volumeMounts"]
    assert made["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_no_secret_stands_in_a_manifest(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"found a value of HF_TOKEN") as failure:
        given(tmp_path, f"{kind}: [{{name: quantmint, env: [{{name: HF_TOKEN, value: of some kind}}]}}]\n")
    assert "of some kind" not in str(failure.value)
    with pytest.raises(UserError, match="--env: found HF_TOKEN"):
        pod(None, variables={"HF_TOKEN": "x"})


def test_a_job_is_on_one_node() -> None:
    with pytest.raises(UserError, match=r"(?s)needs 2 nodes.*--ray"):
        job_manifest(task("llama405b-fp8kv", gpus=16), RUN)


@pytest.mark.parametrize(
    ("store", "folder", "kept"),
    [
        ("store", None, True),
        ("/cache/store", None, True),
        ("../team/store", "/work/mine", True),
        ("/home/me/store", None, False),
        ("../store", None, False),
        ("store", "/app", False),
    ],
)
def test_a_store_must_be_on_a_claim(store: str, folder: str | None, kept: bool) -> None:
    run = Pod("i", claims=(VolumeClaim("c"), VolumeClaim("d", "/cache")), folder=folder)
    of = task("tiny-ptpc-fp8kv", store=store)
    if kept:
        assert job_manifest(of, run)
    else:
        with pytest.raises(UserError, match=r"(?s)on no volume that outlives the pod.*--pvc"):
            job_manifest(of, run)


def test_or_on_a_volume_of_the_template(tmp_path: Path) -> None:
    own = "containers: [{name: quantmint, workingDir: /nfs/team, volumeMounts: [{name: a, mountPath: /nfs}]}]\n"
    run = Pod("i", template=given(tmp_path, own + "volumes: [{name: a, nfs: {server: x, path: /y}}]\n"))
    assert container(job_manifest(task("tiny-ptpc-fp8kv"), run)["spec"]["template"])["workingDir"] == "/nfs/team"


def test_how_options_are_written() -> None:
    assert parse_claim("shared") == VolumeClaim("shared", "/work")
    assert parse_claim("shared:/models") == VolumeClaim("shared", "/models")
    assert parse_secret("HF_TOKEN=hub:token") == SecretVariable("HF_TOKEN", "hub", "token")
    assert parse_secret("HF_TOKEN=hub") == SecretVariable("HF_TOKEN", "hub", "HF_TOKEN")
    assert parse_variables("--env", ("A=b=c", "D=")) == {"A": "b=c", "D": ""}
    with pytest.raises(UserError, match="expected NAME=VALUE"):
        parse_variables("--env", ("A",))
    with pytest.raises(UserError, match="expected VARIABLE=SECRET"):
        parse_secret("hf_secretvalue")


def test_the_template_of_the_documentation_is_one(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes", reason="the API's own models are the oracle")
    page = (Path(__file__).parents[3] / "docs/clusters.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(metadata:.*?)```", page, flags=re.DOTALL)
    held_against_the_api(pod(given(tmp_path, text)), "V1PodTemplateSpec")
