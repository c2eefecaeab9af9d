"""A cluster's own pod template: what it may say, what is ours, and that nothing of it is lost."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from pipeline.errors import RecipeError, UserError
from pipeline.submit.job import Options, manifest
from pipeline.submit.pod import Claim, Pod, Reference, template
from pipeline.submit.pod_template import PodTemplate, read_template
from tests.serving.render.test_kubernetes import held_against_the_api
from tests.submit.cases import IMAGE, TEMPLATE, task
from tests.submit.test_command import ended

if find_spec("kubernetes") is None:
    pytest.skip("kubernetes is not installed, whose models of the API hold the file", allow_module_level=True)


def given(folder: Path, text: str) -> PodTemplate:
    path = folder / "pod.yaml"
    path.write_text(text, encoding="utf-8")
    return read_template(path)


def pod(file: PodTemplate | None, **changes: Any) -> dict[str, Any]:
    own = {"name": "a", "image": IMAGE, "command": ("quantmint", "run"), "kind": "rocm", "gpus": 8, "cpus": 8}
    return template(Pod(**{**own, "claims": (Claim("shared"),), "given": file, **changes}))


def container(made: dict[str, Any]) -> dict[str, Any]:
    first = made["spec"]["containers"][0]
    assert first["name"] == "quantmint", "the one whose log kubectl shows"
    return dict(first)


def test_what_only_the_file_says_is_kept() -> None:
    """Every leaf of it, wherever it stands."""
    written = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    made = pod(read_template(TEMPLATE), cpus=None)
    held_against_the_api(made, "V1PodTemplateSpec")
    own = container(made)
    asked = written["spec"]["containers"].pop()
    for name, value in written["spec"].items():
        found = made["spec"][name]
        if isinstance(value, list):
            assert all(item in found for item in value), name
        else:
            assert found == value, name
    assert made["metadata"]["annotations"] == written["metadata"]["annotations"]
    assert made["metadata"]["labels"] == {**pod(None)["metadata"]["labels"], "team": "models"}
    assert [entry for entry in own["env"] if entry in asked["env"]] == asked["env"]
    assert all(mount in own["volumeMounts"] for mount in asked["volumeMounts"])
    assert own["resources"]["requests"] == {"amd.com/gpu": "8", "cpu": "16", "memory": "200Gi"}
    assert own["resources"]["limits"] == {"amd.com/gpu": "8", "memory": "400Gi"}
    assert own["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert own["command"] == ["quantmint", "run"]


@pytest.mark.parametrize(
    "text",
    [
        "priorityClassName: batch\n",
        "spec: {priorityClassName: batch}\n",
        "metadata: {name: any}\nspec: {priorityClassName: batch}\n",
        "apiVersion: v1\nkind: Pod\nspec: {priorityClassName: batch}\nstatus: {phase: Running}\n",
        "apiVersion: v1\nkind: PodTemplate\ntemplate: {spec: {priorityClassName: batch}}\n",
    ],
)
def test_forms_of_a_file(text: str, tmp_path: Path) -> None:
    made, plain = pod(given(tmp_path, text)), pod(None)
    assert made["spec"].pop("priorityClassName") == "batch"
    assert made == plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spec:\n  toleration: []\n", r'pod.yaml:2:3: spec.toleration: found "toleration".*mean "tolerations"'),
        ("spec: {hostNetwork: yes}\n", 'found "yes", expected true or false'),
        ("spec: {containers: [{name: quantmint, env: [{name: A, value: 1}]}]}\n", r'expected text \(write "1"\)'),
        ("spec: {containers: [{image: a}]}\n", r"pod.yaml:1:21: spec.containers\[0\]: found no name"),
        ("spec: {volumes: {a: b}}\n", "found a mapping, expected a list"),
        ("spec: {tolerations: [x]}\n", 'found "x", expected a mapping'),
        ("spec: {overhead: {cpu: many}}\n", "expected a quantity such as 8, 500m"),
        ("spec: {overhead: {cpu: NaN}}\n", "expected a quantity such as 8, 500m"),
        ("spec: {overhead: {cpu: -1}}\n", "expected a quantity such as 8, 500m"),
        ("spec: {ephemeralContainers: [{name: a}]}\n", "that only a pod that runs may be given"),
        ("spec: {volumes: [{name: a, secret: {defaultMode: 0400}}]}\n", "which is 256 or 400.*write 256"),
        ("spec: {volumes: [{name: a, secret: {defaultMode: &mode 0400}}]}\n", "which is 256 or 400.*write 256"),
        ("spce: {}\n", 'found "spce", expected a field of PodSpec'),
        ("spec: {}\nmetdata: {}\n", r'pod.yaml:2:1.*expected metadata, spec \(did you mean "metadata"'),
        ("kind: Deployment\n", 'found "Deployment", expected Pod, PodTemplate'),
        ("kind: PodTemplate\n", "found null, expected a mapping with metadata and spec"),
        ("kind: Pod\napiVersion: v2\n", 'found "v2", expected "v1"'),
        ("metadata: {namespace: a}\n", "found namespace.*--namespace says it"),
        ("spec: !!python/object:os.system {}\n", "not valid YAML|found the tag"),
        ("a: 1\n---\na: 2\n", "not valid YAML"),
        ("spec: {nodeSelector: {{ .Values.pool }}}\n", r"pod.yaml:1:23(?s:.*)`helm template` fills it in"),
        ("spec: {tolerations: [&a {key: a}, {<<: *a}]}\n", r"pod.yaml:1:36: .*found a merge key, expected its fields"),
    ],
)
def test_what_is_no_pod_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        given(tmp_path, text)


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_no_secret_stands_in_a_manifest(kind: str, tmp_path: Path) -> None:
    for value in ("hf_" + "a" * 30, "of another kind"):
        with pytest.raises(RecipeError, match=r"found the value of HF_TOKEN.*secretKeyRef") as failure:
            given(tmp_path, f"{kind}: [{{name: quantmint, env: [{{name: HF_TOKEN, value: {value}}}]}}]\n")
        assert value not in str(failure.value)
    with pytest.raises(RecipeError, match=r"pod.yaml:1:25: found a token of the Hub"):
        given(tmp_path, f"metadata: {{labels: {{a: '{'hf_' + 'a' * 30}'}}}}\n")


def test_a_token_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r'found "hf_\.\.\.", expected true or false') as failure:
        given(tmp_path, f"hostNetwork: hf_{'a' * 30}\n")
    assert "aaa" not in str(failure.value)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """`--pod-template <(...)` of a shell."""
    text = f"terminationGracePeriodSeconds: 9\n# hf_{'a' * 30}\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = Thread(target=pipe.write_text, args=(text,), daemon=True)
    writing.start()
    with pytest.raises(RecipeError, match="pipe:2:3: found a token of the Hub"):
        read_template(pipe)
    writing.join()


def _ours(text: str) -> str:
    return f"containers: [{{name: quantmint, {text}}}]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_ours("command: [sh]"), r"pod.yaml:1:41: containers\[0\].command: found another.*quantmint's"),
        (_ours("args: [--debug]"), "args: found another"),
        (_ours("image: other"), "--image says it"),
        (_ours("workingDir: /elsewhere"), "--workdir of submit, and --directory"),
        (_ours("resources: {limits: {amd.com/gpu: 4}}"), "found 4, and the run has 8: --gpus says it"),
        (_ours("resources: {limits: {nvidia.com/gpu: 1}}"), "found 1, and the run has none of them"),
        (_ours("resources: {requests: {cpu: 4}}"), "found 4, and the run has 8: --cpus says it"),
        (_ours("resources: {limits: {cpu: 7500m}}"), "found 7500m, expected at least the 8"),
        (_ours("env: [{name: HF_HOME, value: /other}]"), "found another value of HF_HOME"),
        (_ours("env: [{name: HUB, valueFrom: {secretKeyRef: {name: x, key: y}}}]"), "found another value of HUB"),
        (_ours("volumeMounts: [{name: a, mountPath: /work/}]") + "volumes: [{name: a}]\n", "where --pvc mounts"),
        (_ours("volumeMounts: [{name: chace, mountPath: /c}]") + "volumes: [{name: cache}]\n", 'mean "cache"'),
        (
            "initContainers: [{name: a, image: x, volumeMounts: [{name: b, mountPath: /c}]}]\n",
            "expected one of shared-memory",
        ),
        ("containers: [{name: main, env: []}]\n", r'pod.yaml:1:21.*"main" without an image.*called quantmint'),
        ("volumes: [{name: work, emptyDir: {}}]\n", "found another work than the claim"),
        ("volumes: [{name: a}, {name: a}]\n", r"volumes\[1\].name: found a twice"),
        ("containers: [{name: a, image: x}, {name: a, image: x}]\n", "found a twice"),
        ("containers: [{name: quantmint}, {name: quantmint}]\n", r"containers\[1\].name: found quantmint twice"),
        ("containers: [{name: a, image: x}]\ninitContainers: [{name: a, image: x}]\n", r"pod.yaml:2.*found a twice"),
        ("initContainers: [{name: quantmint, image: x}]\n", "found quantmint twice"),
        ("restartPolicy: OnFailure\n", "expected Never"),
        (_ours("restartPolicy: Always"), r"containers\[0\].restartPolicy: found Always, expected Never"),
        (
            _ours("volumeMounts: [{name: a, mountPath: /x}, {name: b, mountPath: /x}]")
            + "volumes: [{name: a}, {name: b}]\n",
            "found b at /x, where a is",
        ),
        ("nodeSelector: {pool: other}\n", "found other, expected mine: --node-selector"),
        ("metadata: {labels: {app.kubernetes.io/name: x}}\n", r"pod.yaml:1:45.*found x, expected quantmint"),
    ],
)
def test_what_contradicts_the_run_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    ours = {"variables": {"HF_HOME": "/cache"}, "secrets": (Reference("HUB", "hub", "token"),)}
    with pytest.raises(RecipeError, match=said):
        pod(given(tmp_path, text), folder="/work", selector={"pool": "mine"}, **ours)


def test_no_other_image_is_named_to_the_run(tmp_path: Path) -> None:
    """One that is named by a tag has no digest that a release could state."""
    digest = f"other@sha256:{'1' * 64}"
    with pytest.raises(RecipeError, match="found QUANTMINT_IMAGE, which names the image"):
        pod(given(tmp_path, _ours(f"env: [{{name: QUANTMINT_IMAGE, value: '{digest}'}}]")), image="quantmint:1")
    with pytest.raises(UserError, match="--env: found QUANTMINT_IMAGE"):
        pod(None, variables={"QUANTMINT_IMAGE": digest})


def test_what_agrees_contradicts_nothing(tmp_path: Path) -> None:
    same = (
        f"image: '{IMAGE}', command: [quantmint, run], workingDir: /work, "
        "resources: {requests: {cpu: 8000m}, limits: {amd.com/gpu: '8'}}"
    )
    assert container(pod(given(tmp_path, _ours(same))))["resources"]["requests"]["cpu"] == "8000m"


def test_where_both_may_say_something_the_file_counts(tmp_path: Path) -> None:
    made = pod(given(tmp_path, "automountServiceAccountToken: true\n" + _ours("securityContext: {privileged: true}")))
    assert made["spec"]["automountServiceAccountToken"] is True
    assert container(made)["securityContext"] == {"privileged": True}, "the API refuses both together"
    shared = "volumeMounts: [{name: big, mountPath: /dev/shm}]"
    made = pod(given(tmp_path, _ours(shared) + "volumes: [{name: big, emptyDir: {medium: Memory}}]\n"))
    assert [volume["name"] for volume in made["spec"]["volumes"]] == ["work", "big"]
    assert [mount["name"] for mount in container(made)["volumeMounts"]] == ["big", "work"]


@pytest.mark.parametrize(
    ("mount", "volume", "said"),
    [
        ("{name: a, mountPath: /nfs}", "{name: a, nfs: {server: x, path: /y}}", None),
        ("{name: a, mountPath: /nfs, readOnly: true}", "{name: a, nfs: {server: x, path: /y}}", "to be read"),
        ("{name: a, mountPath: /nfs}", "{name: a, nfs: {server: x, path: /y, readOnly: true}}", "to be read"),
        ("{name: a, mountPath: /nfs}", "{name: a, emptyDir: {}}", "--pvc is missing"),
        ("{name: a, mountPath: /nfs}", "{name: a, emptyDir: }", "--pvc is missing"),
        ("{name: a, mountPath: /cache}", "{name: a, nfs: {server: x, path: /y}}", "on none of the volumes"),
    ],
)
def test_the_store_may_be_on_a_volume_of_the_file(mount: str, volume: str, said: str | None, tmp_path: Path) -> None:
    file = given(tmp_path, _ours(f"workingDir: /nfs/team, volumeMounts: [{mount}]") + f"volumes: [{volume}]\n")
    options = Options(image="i", claims=(), template=file)
    if said is None:
        made = manifest(task("tiny-ptpc-fp8kv"), options)
        assert container(made["spec"]["template"])["workingDir"] == "/nfs/team"
    else:
        with pytest.raises(UserError, match=said):
            manifest(task("tiny-ptpc-fp8kv"), options)


@pytest.mark.parametrize(("store", "hidden"), [("store/mine", True), ("other", False)])
def test_a_store_is_not_hidden_by_a_folder_that_ends_with_its_pod(store: str, hidden: bool, tmp_path: Path) -> None:
    text = _ours("volumeMounts: [{name: a, mountPath: /work/store}]") + "volumes: [{name: a, emptyDir: {}}]\n"
    options = Options(image="i", claims=(Claim("shared"),), template=given(tmp_path, text))
    if hidden:
        with pytest.raises(UserError, match="on none of the volumes"):
            manifest(task("tiny-ptpc-fp8kv", store=store), options)
    else:
        assert manifest(task("tiny-ptpc-fp8kv", store=store), options)


def test_the_template_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/scheduling.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(metadata:.*?)```", page, flags=re.DOTALL)
    made = pod(given(tmp_path, text), cpus=None)
    held_against_the_api(made, "V1PodTemplateSpec")
    wrong = re.search(r"`pod\.yaml:(7:3: .*?)`", page, flags=re.DOTALL)
    assert wrong is not None
    with pytest.raises(RecipeError, match=re.escape(" ".join(wrong[1].split()))):
        given(
            tmp_path,
            text.replace("  tolerations:", "  toleration:"),
        )


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tiny-ptpc-fp8kv", "--kubernetes", "--image", IMAGE, "--pvc", "shared", "--dry-run", "--pod-template")
    assert ended(*words, str(TEMPLATE)) == 0
    assert "priorityClassName: batch" in capsys.readouterr().out
    assert ended(*words, str(tmp_path / "none.yaml")) == 2
    assert "cannot be read" in capsys.readouterr().err
