"""CronJobs: every field is one that the API has, and the deadline lets exactly one missed time be begun."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import UserError
from pipeline.schedule.cron import LATE_S, times
from pipeline.schedule.exported import Export
from pipeline.schedule.kubernetes import Cluster, cron_jobs, deadline
from pipeline.submit.pod import Claim, Reference
from pipeline.submit.pod_template import read_template
from tests.schedule.conftest import Written
from tests.schedule.expressions import expressions
from tests.submit.cases import TEMPLATE

DIGEST = "registry.example.com/quantmint@sha256:" + "0a" * 32
NOW = datetime(2026, 11, 21, tzinfo=UTC)
CLUSTER = Cluster(
    image=DIGEST, namespace="models", claims=(Claim("work"),), secrets=(Reference("HF_TOKEN", "hub", "token"),)
)


def export(**more: Any) -> Export:
    return Export(("quantmint",), "quantmint schedule export --kubernetes", NOW, **more)


def manifest(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


def pod_of(text: str) -> dict[str, Any]:
    return dict(manifest(text)["spec"]["jobTemplate"]["spec"]["template"]["spec"])


def test_the_api_takes_it(written: Written) -> None:
    pytest.importorskip("kubernetes.client", reason="the API's own models are the oracle")
    from tests.serving.render.test_kubernetes import held_against_the_api

    for recipe in (written("0 3 * * sat", "Europe/Berlin"), written("0 3 * * 6", target={"hardware": "cpu"})):
        (text,) = cron_jobs([recipe], export(variables={"A": "$(B)"}), CLUSTER).values()
        held_against_the_api(manifest(text), "V1CronJob")
    wrong = manifest(text)
    wrong["spec"]["concurrency"] = "Forbid"
    with pytest.raises(ValueError, match="concurrency"):
        held_against_the_api(wrong, "V1CronJob")


def test_a_cron_job(written: Written) -> None:
    item = written("0 3 * * sat", "Europe/Berlin", name="llama.8b")
    ((file, text),) = cron_jobs([item], export(), CLUSTER).items()
    assert file == "quantmint-llama.8b.yaml"
    made = manifest(text)
    assert made["metadata"] | {"labels": {}} == {"name": "quantmint-llama-8b", "namespace": "models", "labels": {}}
    spec = made["spec"]
    assert (spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == ("0 3 * * 6", "Europe/Berlin", "Forbid")
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["quantmint", "requantize", "llama.8b", "--due"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "2"}
    variables = {entry["name"]: entry for entry in container["env"]}
    assert variables["QUANTMINT_IMAGE"]["value"] == DIGEST
    assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    (tagged,) = cron_jobs([item], export(), Cluster(image="quantmint:1")).values()
    assert "QUANTMINT_IMAGE" not in tagged
    assert "# the image is named by a tag" in tagged


def test_what_a_pod_asks_for(written: Written) -> None:
    """As `quantmint submit` has it: kept free, not a limit; and a cluster's own template."""
    pytest.importorskip("kubernetes.client", reason="the API's own models hold the template")
    from tests.serving.render.test_kubernetes import held_against_the_api

    item = written("0 3 * * 6")
    (text,) = cron_jobs([item], export(), replace(CLUSTER, cpus=32, memory_gb=200)).values()
    (container,) = pod_of(text)["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "32", "memory": "200G", "amd.com/gpu": "2"},
        "limits": {"amd.com/gpu": "2"},
    }
    (text,) = cron_jobs([item], export(), replace(CLUSTER, template=read_template(TEMPLATE))).values()
    held_against_the_api(manifest(text), "V1CronJob")
    assert pod_of(text)["priorityClassName"] == "batch"
    assert [container["name"] for container in pod_of(text)["containers"]] == ["quantmint", "watch"]


def test_a_store_is_not_hidden_by_a_folder_that_ends_with_its_pod(written: Written, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes.client", reason="the API's own models hold the template")
    path = tmp_path / "pod.yaml"
    mount = "containers: [{name: quantmint, volumeMounts: [{name: a, mountPath: /work/store}]}]\n"
    path.write_text(mount + "volumes: [{name: a, emptyDir: {}}]\n", encoding="utf-8")
    hidden = replace(CLUSTER, template=read_template(path))
    with pytest.raises(UserError, match="/work/store, which is on none of the volumes"):
        cron_jobs([written("0 3 * * 6")], export(), hidden)
    assert cron_jobs([written("0 3 * * 6")], export(store="/work/other"), hidden)


def test_on_a_ray_cluster_the_pod_itself_holds_no_gpu(written: Written) -> None:
    item = written("0 3 * * 6", target={"hardware": "mi300x", "gpus": 16})
    (text,) = cron_jobs([item], export(on="http://head:8265"), CLUSTER).values()
    (container,) = pod_of(text)["containers"]
    assert container["command"][-2:] == ["--on", "http://head:8265"]
    assert "resources" not in container


def test_missed_times(written: Written) -> None:
    def seconds(missed: str) -> int:
        (text,) = cron_jobs([written("0 3 * * 6", missed=missed)], export(), CLUSTER).values()
        return int(manifest(text)["spec"]["startingDeadlineSeconds"])

    assert seconds("skip") == LATE_S
    assert seconds("run") == 7 * 86400 + 3600


@pytest.mark.parametrize("expression", expressions(40, own=False))
def test_a_missed_time_can_be_begun_until_the_next(expression: str) -> None:
    found = list(islice(times(expression, "UTC", NOW), 300))
    longest = max(later - former for former, later in pairwise(found))
    assert timedelta(seconds=deadline(expression)) >= longest + timedelta(hours=1)


@pytest.mark.parametrize(
    ("expression", "longest"),
    [
        ("0 * * * *", timedelta(hours=1)),
        ("0 3 * * 6", timedelta(days=7)),
        ("*/15 9-17 * * 1-5", timedelta(days=2, hours=15, minutes=15)),
        ("0 3 1 * *", timedelta(days=31)),
        ("0 3 29 2 *", timedelta(days=8 * 365 + 1)),  # from 2096 to 2104
    ],
)
def test_and_no_longer(expression: str, longest: timedelta) -> None:
    assert timedelta(seconds=deadline(expression)) == longest + timedelta(hours=1)


@pytest.mark.parametrize("expression", ["30 2 * * *", "30 2 * * 0"])
def test_clock_changes_are_refused_unless_accepted(written: Written, expression: str) -> None:
    item = written(expression, "Europe/Berlin")
    with pytest.raises(UserError, match="clock change of 2027-"):
        cron_jobs([item], export(), CLUSTER)
    assert cron_jobs([item], export(accepted=frozenset({"clock-change"})), CLUSTER)
    assert cron_jobs([written("30 * * * *", "Europe/Berlin")], export(), CLUSTER)


def test_what_kubernetes_cannot_say(written: Written) -> None:
    with pytest.raises(UserError, match="not cron's own"):
        cron_jobs([written("0 3 L * *")], export(), CLUSTER)
    with pytest.raises(UserError, match="both must hold for cron, and one is enough"):
        cron_jobs([written("0 3 */2 * 1")], export(), CLUSTER)
    assert cron_jobs([written("0 3 1 * 1")], export(), CLUSTER)
    assert cron_jobs([written("0 3 */2 * *")], export(), CLUSTER)
    with pytest.raises(UserError, match="one node"):
        cron_jobs([written("0 3 * * 6", target={"hardware": "mi300x", "gpus": 16})], export(), CLUSTER)
    with pytest.raises(UserError, match="one name in Kubernetes"):
        cron_jobs([written("0 3 * * 6", name="a.b"), written("0 3 * * 6", name="a-b")], export(), CLUSTER)
