"""What the words of `quantmint serve` mean: the model, the target, the load, the knobs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.runs import serving as module
from quantmint.pipeline.runs.serving import (
    ServedModel,
    ServeRequest,
    fetched,
    find_model,
    overrides_of,
    profile_for,
    speculation_of,
    target_for,
    version_of,
)
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target, profile
from quantmint.pipeline.stages.setting import SourceIdentity

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
COMMIT = "a" * 40


def latency(model: ServedModel) -> ServeRequest:
    request = ServingRequest(model.model, model.facts, parse_target("mi300x:1"), profile("latency"), "0.33.0")
    return ServeRequest(model, request)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub with one model, of which only the config.json is here until it is fetched."""
    snapshot = tmp_path / "hub" / "models--org--Name-8B" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copyfile(CONFIGS / "Llama-3.1-8B-Instruct" / "config.json", snapshot / "config.json")
    monkeypatch.setattr(module, "identify", lambda section, folder, store: SourceIdentity(None, COMMIT, section.repo))
    monkeypatch.setattr(module, "config_folder", lambda identity: snapshot)
    monkeypatch.setattr(module, "fetch", lambda identity, *, with_code, progress: snapshot)
    return snapshot


def test_a_repository_is_planned_for_at_its_commit(hub: Path, tmp_path: Path) -> None:
    found = find_model("org/Name-8B@main", store=tmp_path)
    assert (found.model, found.name, found.missing) == ("org/Name-8B", "Name-8B", None)
    plan, _ = latency(found).plan()
    assert plan.argv[:3] == ("vllm", "serve", "org/Name-8B")
    assert plan.argv[-2:] == ("--revision", COMMIT)


def test_a_repository_is_served_from_its_snapshot(hub: Path, tmp_path: Path) -> None:
    found = fetched(find_model("org/Name-8B", store=tmp_path), with_code=False, progress=PlainReporter())
    plan, _ = latency(found).plan()
    assert plan.argv[2] == str(hub)
    assert "--revision" not in plan.argv, "a folder is what it is"


def test_a_folder_is_served_by_its_name_and_only_whole(models: Callable[..., Path], tmp_path: Path) -> None:
    release = tmp_path / "NAME"
    release.symlink_to(models("llama"))
    found = find_model(str(release), store=tmp_path)
    assert found.name == "NAME"
    assert fetched(found, with_code=False, progress=PlainReporter()) == found
    broken = shutil.copytree(models("llama"), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"broken: found weights that .* config\.json: model\.layers\.2\."):
        fetched(find_model(str(broken), store=tmp_path), with_code=False, progress=PlainReporter())


def test_knobs() -> None:
    assert overrides_of(["max_num_seqs=256", "--enforce-eager", "VLLM_ROCM_USE_AITER=false", "--dtype=a=b"]) == {
        "--max-num-seqs": "256",
        "--enforce-eager": True,
        "VLLM_ROCM_USE_AITER": False,
        "--dtype": "a=b",
    }
    with pytest.raises(UserError, match='did you mean "--max-num-seqs"'):
        overrides_of(["max-num-seq=1"])


def test_speculation() -> None:
    assert speculation_of("ngram:4").model_dump() == {"method": "ngram", "model": None, "tokens": 4}
    assert speculation_of("mtp").tokens == 2
    assert speculation_of("eagle3:C:/odd:1").model == "C:/odd"
    with pytest.raises(UserError, match="--speculative: found 'eagle3:/draft:many', expected METHOD"):
        speculation_of("eagle3:/draft:many")


def test_versions_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [version_of(text) for text in ("0.24.0", "v0.24", "0.33.0rc1", "0.32.0+cpu")] == [
        "0.24.0",
        "0.24",
        "0.33.0rc1",
        "0.32.0+cpu",
    ]
    assert [version_of(text) for text in (None, "/opt/vllm", "vllm", ".venv-vllm")] == [None] * 4
    monkeypatch.chdir(tmp_path)
    Path("0.24.0").mkdir()
    assert version_of("0.24.0") is None, "a folder of that name is an environment"


def test_targets() -> None:
    recipe = load_recipe("llama70b-fp8kv").recipe
    assert target_for(None, recipe) == ServingTarget("mi300x", 8)
    assert target_for("mi355x:16", recipe) == ServingTarget("mi355x", 8, 2)
    found = target_for("auto", recipe)
    assert found == target_for(None, None), "this machine"


def test_loads() -> None:
    recipe = load_recipe("llama70b-fp8kv").recipe
    of_recipe = profile_for(None, recipe, concurrency=None, max_model_len=None)
    assert (of_recipe.name, of_recipe.concurrency, of_recipe.max_model_len) == ("throughput", 256, 8192)
    serve = recipe.serve.model_copy(update={"profile": "offline"})
    offline = profile_for(None, recipe.model_copy(update={"serve": serve}), concurrency=7, max_model_len=4096)
    assert (offline.name, offline.concurrency, offline.max_model_len) == ("offline", 7, 4096)
    named = profile_for("latency", recipe, concurrency=None, max_model_len=None)
    assert (named.name, named.concurrency) == ("latency", profile("latency").concurrency)
    workload = profile_for("tiny", None, concurrency=None, max_model_len=None)
    assert (workload.concurrency, workload.max_model_len, workload.longest) == (16, None, 96)
    longer = profile_for("long-context", recipe, concurrency=None, max_model_len=None)
    assert (longer.max_model_len, longer.longest) == (None, 33280)
    assert profile_for("long-context", recipe, concurrency=None, max_model_len=4096).max_model_len == 4096
