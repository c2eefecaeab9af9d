"""CronJobs: every field is one that the API has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.clusters.submit.pod import Pod, SecretVariable, VolumeClaim
from quantmint.pipeline.upkeep.schedule.export import Export, cron_job
from tests.upkeep.schedule.conftest import Written

DIGEST = "registry.example.com/quantmint@sha256:" + "0a" * 32
CLUSTER = Pod(image=DIGEST, claims=(VolumeClaim("work"),), secrets=(SecretVariable("HF_TOKEN", "hub", "token"),))


def export(**more: Any) -> Export:
    return Export(("quantmint",), "quantmint schedule export --kubernetes", **more)


def manifest(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text))


def pod_of(text: str) -> dict[str, Any]:
    return dict(manifest(text)["spec"]["jobTemplate"]["spec"]["template"]["spec"])


def test_the_api_takes_it(written: Written) -> None:
    pytest.importorskip("kubernetes.client", reason="the API's own models are the oracle")
    from tests.serving.render.test_kubernetes import held_against_the_api

    for recipe in (written("0 3 * * sat", "Europe/Berlin"), written("0 3 * * 6", target={"hardware": "cpu"})):
        (text,) = cron_job(recipe, export(variables={"A": "$(B)"}), CLUSTER).values()
        held_against_the_api(manifest(text), "V1CronJob")


def test_a_cron_job(written: Written) -> None:
    item = written("0 3 * * sat", "Europe/Berlin", name="llama.8b")
    ((file, text),) = cron_job(item, export(), CLUSTER, "models").items()
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
    (tagged,) = cron_job(item, export(), Pod(image="quantmint:1")).values()
    assert "QUANTMINT_IMAGE" not in tagged
    assert "# the image is named by a tag" in tagged


def test_a_recipe_that_signs_gets_its_passphrase_and_a_local_source_is_told_of(written: Written) -> None:
    sign = {"folder": "published", "licence": {"id": "apache-2.0"}, "sign": {"key": "signing.pem"}}
    (text,) = cron_job(written("0 3 * * 6", publish=sign), export(), CLUSTER).values()
    (container,) = manifest(text)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    secrets = {entry["name"]: entry["valueFrom"] for entry in container["env"] if "valueFrom" in entry}
    key = "QUANTMINT_SIGNING_PASSPHRASE"
    assert secrets[key] == {"secretKeyRef": {"name": "quantmint", "key": key}}
    assert f"# the Secret quantmint must hold {key}; --secret NAME=SECRET:KEY names another" in text
    assert "# source.folder model must lie on the volume of the claim" in text
    named = replace(CLUSTER, secrets=(*CLUSTER.secrets, SecretVariable(key, "keys", "passphrase")))
    (text,) = cron_job(written("0 3 * * 6", publish=sign), export(), named).values()
    assert "the Secret quantmint" not in text


def test_on_a_ray_cluster_the_pod_itself_holds_no_gpu(written: Written) -> None:
    item = written("0 3 * * 6", target={"hardware": "mi300x", "gpus": 16})
    (text,) = cron_job(item, export(on="http://head:8265"), CLUSTER).values()
    (container,) = pod_of(text)["containers"]
    assert container["command"][-2:] == ["--on", "http://head:8265"]
    assert "resources" not in container


def test_what_kubernetes_cannot_say(written: Written) -> None:
    with pytest.raises(UserError, match="both must hold, and one is enough"):
        cron_job(written("0 3 */2 * 1"), export(), CLUSTER)
    for expression in ("0 3 1 * 1", "0 3 */2 * *", "30 2 * * *"):
        assert cron_job(written(expression), export(), CLUSTER)
    with pytest.raises(UserError, match="one node"):
        cron_job(written("0 3 * * 6", target={"hardware": "mi300x", "gpus": 16}), export(), CLUSTER)
