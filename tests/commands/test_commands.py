"""The commands that only look: recipes, schemes, schema, knobs, runs, gc, explain, inspect, report."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint import recipes
from quantmint.pipeline.base.canonical import JsonDifference
from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.commands.run import _change_lines
from quantmint.pipeline.recipe.load import load_recipe, recipe_names
from quantmint.pipeline.serving.knobs.table import table as knobs
from quantmint.pipeline.store.gc import RunLog, plan_gc

Quantmint = Callable[..., Any]


def test_recipes(quantmint: Quantmint) -> None:
    ended = quantmint("recipe", "list")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split()[0] for line in ended.out.splitlines()] == list(recipe_names())
    told = quantmint("recipe", "list", "--json").json
    assert [entry["name"] for entry in told] == list(recipe_names())
    assert all(entry["description"] for entry in told)


def test_one_recipe_is_written_out(quantmint: Quantmint, project: Path) -> None:
    ended = quantmint("recipe", "show", "llama70b-fp8kv")
    (project / "llama70b-fp8kv.yaml").write_text(ended.out)
    assert load_recipe("llama70b-fp8kv.yaml").recipe == load_recipe("llama70b-fp8kv").recipe
    assert "extends" not in ended.out
    assert quantmint("recipe", "show", "llama70b-fp8kv", "--json").json["target"]["gpus"] == 8


def test_schemes(quantmint: Quantmint) -> None:
    ended = quantmint("schemes")
    assert ended.code == 0
    assert all(name in ended.out for name in table())
    told = {row["scheme"]: row for row in quantmint("schemes", "--json").json}
    assert told.keys() == table().keys()
    assert told["mxfp4"]["bits_per_weight"] == 4.25
    assert "stream" in told["ptpc_fp8"]["engines"]
    assert (told["fp8"]["calibration"], told["ptpc_fp8"]["calibration"]) == (True, False)
    assert told["mxfp4"]["native"] == ["mi350x", "mi355x"]
    assert told["fp8_block"]["formats"] == ["compressed-tensors", "quark"]


def test_the_page_has_the_table_of_schemes_as_it_is(quantmint: Quantmint) -> None:
    page = Path(__file__).parents[2] / "docs" / "schemes.md"
    assert quantmint("schemes", "--markdown").out in page.read_text()


def test_the_page_of_knobs_is_their_table(quantmint: Quantmint) -> None:
    page = Path(__file__).parents[2] / "docs" / "serving-knobs.md"
    assert quantmint("knobs", "--markdown").out == page.read_text(), (
        "run `quantmint knobs --markdown > docs/serving-knobs.md`"
    )


def test_knobs(quantmint: Quantmint) -> None:
    assert {row["name"] for row in quantmint("knobs", "--json").json} == knobs().keys()
    spelled = {quantmint("knobs", name).out for name in ("--max-num-seqs", "max-num-seqs", "max_num_seqs")}
    assert len(spelled) == 1
    old = {row["name"] for row in quantmint("knobs", "--vllm-version", "0.19.0", "--json").json}
    assert "--attention-backend" in old
    assert "--numa-bind" not in old
    unknown = ("knobs", "VLLM_CPU_ATTN_SPLIT_KV", "--vllm-version", "0.19.0")
    assert "vLLM 0.19.0 does not have it." in quantmint(*unknown).out
    assert quantmint(*unknown, "--json").json["known"] is False
    assert "--attention-backend replaces it" in quantmint("knobs", "VLLM_ATTENTION_BACKEND").err
    assert 'did you mean "NCCL_MIN_NCHANNELS"' in quantmint("knobs", "NCCL_MIN_CHANNELS").err
    assert "--kv-cache-dtype" in quantmint("knobs").out


def test_the_schema_is_the_one_beside_the_recipes(quantmint: Quantmint) -> None:
    ended = quantmint("recipe", "schema")
    assert ended.code == 0
    assert ended.out == (Path(recipes.__path__[0]) / "recipe.schema.json").read_text()
    json.loads(ended.out)


def _untimed(line: str) -> str:
    """A line of `runs` without how long it took, which every run that ended has."""
    short, found = re.subn(r" +\d+\.\d s$", "", line)
    assert found, line
    return short


def test_runs(orchestra: Any, quantmint: Quantmint) -> None:
    assert quantmint("runs").err.startswith("no runs in")
    assert quantmint("runs", "--json").json == []

    def broken(job: Any) -> None:
        raise RuntimeError("broken")

    gate = orchestra.stage("gate", result={"verdict": "INCONCLUSIVE", "reasons": []})
    orchestra.run(gate)
    orchestra.run(orchestra.stage("source"))
    orchestra.plan(orchestra.stage("only", work=broken))
    assert quantmint("run", "r.yaml", "--until", "only").code == 5
    RunLog.start(orchestra.setting.store.root, "other", "0" * 64, [])

    told = quantmint("runs", "--json").json
    assert [(run["recipe"], run["verdict"], run["exit_code"]) for run in told] == [
        ("other", None, None),
        ("r", None, 5),
        ("r", None, 0),
        ("r", "INCONCLUSIVE", 3),
    ]
    lines = quantmint("runs").out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC  ", line) for line in lines)
    assert [line.split()[3:] for line in [lines[0], *map(_untimed, lines[1:])]] == [
        ["other", "running"],
        ["r", "exit", "5"],
        ["r", "exit", "0"],
        ["r", "INCONCLUSIVE"],
    ]
    assert len(quantmint("runs", "--recipe", "r", "--json").json) == 3


def test_gc(orchestra: Any, quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is younger than an hour is kept anyway.
    monkeypatch.setattr("quantmint.pipeline.store.gc.time", SimpleNamespace(time=lambda: time.time() + 7200))
    for option in range(3):
        orchestra.run(orchestra.stage("first"), orchestra.stage("second", "first", option=option))
    store = orchestra.setting.store
    files = sorted(store.root.rglob("*"))
    dry = quantmint("gc", "--keep", "1", "--dry-run")
    assert dry.code == 0
    assert "would free" in dry.out
    assert "needed by no run" not in dry.out
    with monkeypatch.context() as now:
        now.undo()
        now.setattr("quantmint.pipeline.store.gc.time", time)
        assert quantmint("gc", "--keep", "1", "--dry-run").out.endswith("go once they have lain for an hour\n")
    assert sorted(store.root.rglob("*")) == files
    told = quantmint("gc", "--keep", "1", "--dry-run", "--json").json
    gone = [item["path"] for item in told["removed"]]
    assert len([path for path in gone if "/second/" in path]) == 2
    assert not [path for path in gone if "/first/" in path], "the newest run uses it"
    assert told["dry_run"]

    assert quantmint("gc", "--keep", "1", "--json").json["removed"] == told["removed"]
    assert not [path for path in gone if Path(path).exists()]
    assert plan_gc(store, keep=1).remove == ()
    assert orchestra.committed(orchestra.stage("first"), orchestra.stage("second", "first", option=2)) == [
        "first",
        "second",
    ]


def test_explain(orchestra: Any, quantmint: Quantmint) -> None:
    def stages(**options: Any) -> list[Any]:
        return [
            orchestra.stage("calibrate", option={"seed": 0, "set": "tiny"}),
            orchestra.stage("quantize", "calibrate", **options),
            orchestra.stage("gate", "quantize", result={"verdict": "PASS", "reasons": []}),
        ]

    orchestra.plan(*stages())
    assert [entry["state"] for entry in quantmint("explain", "r.yaml", "--json").json] == [
        "to do: never finished with this recipe"
    ] * 3
    before = {planned.key: planned.fingerprint for planned in orchestra.plan(*stages(option={"scheme": "a", "n": 1}))}
    orchestra.run(*stages(option={"scheme": "a", "n": 1}))
    after = {planned.key: planned.fingerprint for planned in orchestra.plan(*stages(option={"scheme": "b", "n": 1}))}

    told = quantmint("explain", "r.yaml", "--json").json
    assert told == [
        {"stage": "calibrate", "state": "cached", "changes": []},
        {
            "stage": "quantize",
            "state": "changed",
            "changes": [{"path": "$.settings.option.scheme", "old": "a", "new": "b"}],
        },
        {
            "stage": "gate",
            "state": "changed",
            "changes": [{"path": "$.inputs.quantize", "old": before["quantize"], "new": after["quantize"]}],
        },
    ]
    ended = quantmint("explain", "r")
    assert not ended.err, "one that was run before is known by its name"
    lines = ended.out.splitlines()
    assert lines[2].split() == ["settings.option.scheme:", "'a'", "->", "'b'"]
    digests = [f"{side['quantize'][:12]}…" for side in (before, after)]
    assert lines[4].split() == ["inputs.quantize:", digests[0], "->", digests[1]], "its first digits tell it apart"
    assert orchestra.ran == ["calibrate", "quantize", "gate"], "nothing is made"


@pytest.fixture
def made(quantize: Callable[..., Any], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of the engine to break, and what it was made from."""
    source = quantize("llama", "compressed-tensors")
    copy = tmp_path / "checkpoint"
    shutil.copytree(source.folder, copy)
    return copy, source.source.folder


def test_inspect(quantmint: Quantmint, made: tuple[Path, Path]) -> None:
    checkpoint, source = made
    ended = quantmint("inspect", checkpoint)
    assert ended.code == 0
    assert ended.out.startswith(f"PASS  {checkpoint} (compressed-tensors)")
    told = quantmint("inspect", checkpoint, "--source", source, "--json")
    assert (told.code, told.json["verdict"], told.json["compared_with_source"]) == (0, "PASS", True)


def test_inspect_finds_a_harmed_scale(quantmint: Quantmint, made: tuple[Path, Path]) -> None:
    checkpoint, source = made
    path = next(checkpoint.glob("*.safetensors"))
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    tensors = load(path)
    name = next(name for name in tensors if name.endswith("up_proj.weight_scale"))
    tensors[name] = tensors[name] * 4
    save(tensors, path, metadata={"format": "pt"})
    ended = quantmint("inspect", checkpoint, "--source", source)
    assert ended.code == 1
    assert ended.out.startswith("FAIL")
    assert "up_proj" in ended.out

    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save(tensors, path, metadata={"format": "pt"})
    told = quantmint("inspect", checkpoint, "--json")
    assert (told.code, told.json["verdict"]) == (1, "FAIL")


def test_report(orchestra: Any, quantmint: Quantmint, tmp_path: Path) -> None:
    orchestra.run(
        orchestra.stage(
            "report", work=lambda job: [(job.path / f"report.{kind}").write_text(kind) for kind in ("html", "json")]
        )
    )
    ended = quantmint("report", "r.yaml")
    assert ended.code == 0
    assert Path(ended.out.strip()).read_text() == "html"
    copy = tmp_path / "page.html"
    assert quantmint("report", "r.yaml", "--output", copy).out.strip() == str(copy)
    assert copy.read_text() == "html"
    told = quantmint("report", "r.yaml", "--json").json
    assert [Path(path).read_text() for path in (told["report"], told["data"])] == ["html", "json"]
    ended = quantmint("report", "r.yaml", "--output", tmp_path / "none" / "page.html")
    assert (ended.code, "unexpected" in ended.err) == (2, False)


def test_the_report_of_the_last_run(orchestra: Any, quantmint: Quantmint) -> None:
    def stage(option: int) -> Any:
        def work(job: Any) -> None:
            for name in ("report.html", "report.json"):
                (job.path / name).write_text("page")

        return orchestra.stage("report", option=option, work=work)

    orchestra.run(stage(1))
    ended = quantmint("report", "r.yaml")
    assert (ended.code, Path(ended.out.strip()).read_text()) == (0, "page")
    orchestra.plan(stage(2))
    Path("r.yaml").unlink()
    assert quantmint("report", "r").out == ended.out, "by its name, wherever its recipe is"


def test_a_recipe_that_changed_is_explained_by_the_lines_that_differ() -> None:
    """Two whole recipes were printed, with \\n for each end of a line."""
    change = JsonDifference(
        "$.settings.recipe", "name: r\nscheme: mxfp4\nseed: 0\n", "name: r\nscheme: auto\nseed: 0\n"
    )
    assert list(_change_lines(change)) == ["settings.recipe:", "  -scheme: mxfp4", "  +scheme: auto"]
    assert list(_change_lines(JsonDifference("$.tools.torch", "2.12.0", "2.13.0"))) == [
        "tools.torch: '2.12.0' -> '2.13.0'"
    ]
