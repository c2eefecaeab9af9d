"""Logging to a real MLflow server: once, whole, and never at the cost of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.runs import tracking as server_side
from quantmint.pipeline.runs.reports import find
from quantmint.pipeline.runs.tracking import FINGERPRINT, LoggedReport, content_of, log, log_run
from quantmint.pipeline.store.tree import Store
from tests.checkpoints import GOOD, run
from tests.runs.tracking.conftest import free_port

Quantmint = Callable[..., Any]
TASKS = ("facts", "sums", "prose")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    evidence = tmp_path / "published" / "good" / "quantmint"
    GOOD.write(evidence)
    (evidence / "junit.xml").write_text("<testsuites/>")
    return evidence.parent


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs(uri: str, experiment: str) -> list[Any]:
    found = client(uri).get_experiment_by_name(experiment)
    return [] if found is None else list(client(uri).search_runs([found.experiment_id]))


@pytest.mark.slow
def test_a_published_folder_is_logged_whole_and_once(
    quantmint: Quantmint, mlflow_server: str, published: Path, tmp_path: Path
) -> None:
    ended = quantmint("track", published, "--mlflow", mlflow_server, "--experiment", "whole", "--json")
    assert (ended.code, ended.err, ended.json["new"]) == (0, "", True)
    (found,) = runs(mlflow_server, "whole")
    store = Store(tmp_path / "none")
    content = content_of(find(str(published), store), store)
    assert found.info.run_id == ended.json["run_id"]
    assert (found.info.status, found.info.run_name) == ("FINISHED", GOOD.name)
    assert found.data.params == content.params == {"name": GOOD.name}
    assert found.data.metrics == content.metrics
    assert {f"accuracy/{task}/difference" for task in TASKS} < found.data.metrics.keys()
    assert content.tags.items() <= found.data.tags.items()
    files = {file.path for file in client(mlflow_server).list_artifacts(found.info.run_id)}
    assert files == {"report.html", "report.json", "gate.json", "junit.xml"}
    copy = client(mlflow_server).download_artifacts(found.info.run_id, "report.json", str(tmp_path))
    assert Path(copy).read_bytes() == (published / "quantmint" / "report.json").read_bytes()

    again = quantmint("track", published, "--mlflow", mlflow_server, "--experiment", "whole")
    assert (again.code, again.err) == (0, "")
    assert again.out == f"was logged before: {GOOD.name}, run {found.info.run_id}\n"
    assert len(runs(mlflow_server, "whole")) == 1


@pytest.mark.slow
def test_what_was_begun_is_gone_on_with(
    mlflow_server: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "none")
    content = content_of(find(str(published), store), store)
    fill = server_side._fill

    def half(connected: Any, run_id: str, whole: LoggedReport) -> None:
        fill(connected, run_id, replace(whole, artifacts=whole.artifacts[:1]))
        raise ConnectionResetError("the server went away")

    monkeypatch.setattr(server_side, "_fill", half)
    with pytest.raises(UserError, match=r"nothing, or not all, was logged .* the server went away"):
        log(content, mlflow_server, "half")
    monkeypatch.undo()
    (begun,) = runs(mlflow_server, "half")
    assert begun.info.status == "RUNNING"
    logged = log(content, mlflow_server, "half")
    (whole,) = runs(mlflow_server, "half")
    assert logged == (begun.info.run_id, True)
    assert whole.info.status == "FINISHED"
    assert len(client(mlflow_server).list_artifacts(whole.info.run_id)) == 4


@pytest.mark.slow
def test_another_report_of_the_same_recipe_is_another_run(mlflow_server: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    run(store.root, "good", GOOD)
    first = log(content_of(find("good", store), store), mlflow_server, "moved")
    run(store.root, "good", replace(GOOD, lost={"facts": 15, "sums": 6}))
    second = log(content_of(find("good", store), store), mlflow_server, "moved")
    assert first[0] != second[0]
    assert len({found.data.tags[FINGERPRINT] for found in runs(mlflow_server, "moved")}) == 2


def test_a_server_that_is_down_is_a_warning_to_a_run_and_an_error_to_the_command(
    quantmint: Quantmint, setting: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    uri = f"http://127.0.0.1:{free_port()}"
    run(setting.store.root, "r", GOOD)
    report = setting.store.find("report", next((setting.store.root / "report").glob("*/record.json")).parent.name)
    tracking = setting.recipe.tracking.model_copy(update={"mlflow": uri})
    recipe = setting.recipe.model_copy(update={"tracking": tracking})
    asking = replace(setting, loaded=replace(setting.loaded, recipe=recipe))
    told: list[str] = []
    assert log_run(asking, report, told.append) is None
    (warning,) = told
    assert f"was logged to MLflow at {uri}: " in warning
    assert f"quantmint track r --mlflow {uri}" in warning
    ended = quantmint("track", published, "--mlflow", uri)
    assert ended.code == 2
    assert f"nothing, or not all, was logged to MLflow at {uri}: " in ended.err
    ended = quantmint("track", published, "--mlflow", uri.removeprefix("http://"))
    assert (ended.code, f"with its scheme: {uri}" in ended.err) == (2, True)
    assert "s3cret" not in ended.err + warning
    assert log_run(setting, report, told.append) is None  # the recipe asks for none
    assert len(told) == 1


def stages(orchestra: Any) -> None:
    """A run that ends with a FAIL and a report."""
    failed = {"verdict": "FAIL", "reasons": ["too much was lost"]}
    gate = orchestra.stage("gate", result=failed)
    orchestra.plan(gate, orchestra.stage("report", "gate", work=lambda job: GOOD.write(job.path)))


def test_a_run_ends_as_it_would_have_where_the_server_is_down(
    quantmint: Quantmint, orchestra: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    stages(orchestra)
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(f"{text}tracking: {{mlflow: 'http://127.0.0.1:{free_port()}'}}\n")
    ended = quantmint("run", "r.yaml", "--json")
    assert (ended.code, ended.json["verdict"], ended.json["tracked"]) == (1, "FAIL", None)
    assert "the run is not affected. To log it later: quantmint track r --mlflow" in ended.err


@pytest.mark.slow
def test_a_run_is_logged_at_its_end(quantmint: Quantmint, orchestra: Any, project: Path, mlflow_server: str) -> None:
    stages(orchestra)
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(f"{text}tracking: {{mlflow: '{mlflow_server}', experiment: hooked}}\n")
    ended = quantmint("run", "r.yaml", "--json")
    (found,) = runs(mlflow_server, "hooked")
    assert (ended.code, ended.json["tracked"]) == (1, found.info.run_id)
    # All is cached now, and logged; and so it is for the command that logs later.
    assert quantmint("run", "r.yaml", "--json").json["tracked"] == found.info.run_id
    later = quantmint("track", "r", "--mlflow", mlflow_server, "--experiment", "hooked", "--json").json
    assert (later["run_id"], later["new"]) == (found.info.run_id, False)


def test_without_the_library_it_is_said_what_to_install(
    quantmint: Quantmint, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    ended = quantmint("track", published, "--mlflow", "http://127.0.0.1:1")
    assert ended.code == 2
    assert "needs mlflow, which is not installed\n  pip install 'quantmint[mlflow]'" in ended.err


@pytest.mark.parametrize("uri", ["http://me:s3cret@host:5000", "https://s3cret@host/x"])
def test_an_address_with_a_password_is_refused_unseen(
    quantmint: Quantmint, published: Path, project: Path, uri: str
) -> None:
    ended = quantmint("track", published, "--mlflow", uri)
    assert (ended.code, "s3cret" in ended.err) == (2, False)
    assert "MLFLOW_TRACKING_TOKEN" in ended.err
    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(f"{text}tracking: {{mlflow: '{uri}'}}\n")
    ended = quantmint("recipe", "show", "r.yaml")
    assert (ended.code, "s3cret" in ended.err) == (2, False)
    assert "tracking.mlflow: found an address with an @, expected an address without credentials" in ended.err


def test_logging_is_no_part_of_what_is_proven(setting: Any, project: Path) -> None:
    from quantmint.pipeline.runs.planner import build_plan
    from quantmint.pipeline.runs.session import open_setting

    text = (project / "r.yaml").read_text()
    (project / "r.yaml").write_text(f"{text}tracking: {{mlflow: 'http://internal:5000', experiment: nightly}}\n")
    with_it = replace(open_setting("r.yaml", store=setting.store), vllm=setting.vllm)
    assert with_it.recipe.tracking.mlflow == "http://internal:5000"
    assert "internal" not in with_it.loaded.text_proven
    prints = [[planned.fingerprint for planned in build_plan(each)] for each in (setting, with_it)]
    assert prints[0] == prints[1]
