"""Fingerprints change with what shapes a result, and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.eval.suites import Suite
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.canonical import canonical_json
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.sections import CanaryGate
from quantmint.pipeline.runs.planner import after_stop, build_plan, cut
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.setting import Setting

ROOT = Path(__file__).parents[2]
JUDGED = {"gate", "report", "package", "publish"}
STOPPING = {"evaluate-candidate"} | JUDGED  # a clear case stops as soon as it is one, by the margin
CANARY = {"canary-baseline", "canary-candidate"}
ASKED = {"evaluate-baseline", "control", "evaluate-candidate"}
BASELINE = {"serve-baseline", "canary-baseline", "evaluate-baseline", "control"}
CANDIDATE = {"serve-candidate", "canary-candidate", "evaluate-candidate", "bench"}
FROM_QUANTIZE = {"quantize", "inspect"} | CANDIDATE | JUDGED
EVERYTHING = {"source", "calibrate"} | FROM_QUANTIZE | BASELINE

WithVllm = Callable[..., Setting]


def fingerprints(setting: Setting) -> dict[str, str]:
    return {planned.key: planned.fingerprint for planned in build_plan(setting)}


def changed(one: Setting, other: Setting) -> set[str]:
    before, after = fingerprints(one), fingerprints(other)
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def edit(setting: Setting, old: str, new: str) -> Setting:
    """The setting of the same project with one edit of its recipe."""
    path = setting.loaded.path
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    opened = open_setting(str(path), store=setting.store)
    return replace(opened, vllm=setting.vllm)


def test_the_order(setting: Setting) -> None:
    assert [planned.key for planned in build_plan(setting)] == [
        "source", "calibrate", "quantize", "inspect",
        "serve-baseline", "canary-baseline", "serve-candidate", "canary-candidate",
        "evaluate-baseline", "control", "evaluate-candidate", "bench",
        "gate", "report", "package", "publish",
    ]  # fmt: skip


def test_a_recipe_can_leave_stages_out(setting: Setting) -> None:
    unpromised = edit(setting, "gate: {", "gate: {throughput: {min_ratio: null}, ")
    assert changed(setting, unpromised) == {"bench"} | JUDGED
    assert "bench" not in {planned.key for planned in build_plan(unpromised)}
    shown = edit(setting, "min_ratio: null", "min_ratio: null, launches: 4")
    assert changed(setting, shown) == JUDGED
    without = edit(setting, "concurrency: 8", "concurrency: 8, control: null, runtime: reference")
    assert {planned.key for planned in build_plan(without)} == EVERYTHING - {"control", "bench"}


def test_speculative_decoding_is_measured_where_the_recipe_serves_with_it(setting: Setting) -> None:
    before = [planned.key for planned in build_plan(setting)]
    speculates = edit(setting, "gate: {", "serve: {speculative: {method: ngram, tokens: 3}}\ngate: {")
    after = [planned.key for planned in build_plan(speculates)]
    assert [key for key in after if key not in before] == ["acceptance-baseline", "acceptance-candidate"]
    assert after.index("acceptance-baseline") < after.index("serve-candidate") < after.index("acceptance-candidate")
    promised = edit(speculates, "gate: {", "gate: {acceptance: {margin: 0.05}, ")
    assert changed(speculates, promised) == JUDGED
    assert [planned.key for planned in after_stop(build_plan(promised), promised)][-3:] == [
        "canary-candidate",
        "gate",
        "report",
    ]
    other = edit(promised, "tokens: 3", "tokens: 2")
    assert {"acceptance-baseline", "acceptance-candidate", "serve-baseline", "gate"} <= changed(promised, other)


def test_without_a_canary_all_tasks_are_asked_and_nothing_else_changes(setting: Setting) -> None:
    without = edit(setting, "gate: {", "gate: {canary: null, ")
    assert {planned.key for planned in build_plan(without)} == EVERYTHING - CANARY
    assert changed(setting, without) - CANARY == JUDGED


def test_the_canary_s_limits_are_those_of_the_fewest_bits() -> None:
    many, few = CanaryGate().policy({"ptpc_fp8", "mxfp6_e2m3"}), CanaryGate().policy({"ptpc_fp8", "mxfp4_fp8"})
    assert (many.min_agreement, many.max_kl, many.broken_agreement, many.broken_kl) == (0.7, 0.5, None, None)
    assert (few.min_agreement, few.max_kl, few.broken_agreement, few.broken_kl) == (0.45, 1.2, 0.35, 2.0)
    own = CanaryGate(max_kl=0.3).policy({"mxfp4"})
    assert (own.min_agreement, own.max_kl, own.broken_agreement, own.broken_kl) == (0.45, 0.3, 0.35, None)


def test_the_plan_of_a_stopped_run_is_the_same_up_to_the_canary(setting: Setting) -> None:
    whole = build_plan(setting)
    stopped = after_stop(whole, setting)
    assert stopped[:8] == whole[:8]
    assert [planned.key for planned in stopped[7:]] == ["canary-candidate", "gate", "report"]
    last = {planned.key: planned for planned in whole[8:]}
    for planned in stopped[8:]:
        assert planned.fingerprint != last[planned.key].fingerprint
        assert not set(planned.inputs) & {"evaluate-baseline", "evaluate-candidate", "control", "bench"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("margin: 0.02", "margin: 0.03", STOPPING, id="margin"),
        pytest.param("gate: {", "gate: {throughput: {min_ratio: 1.2}, ", JUDGED, id="speed"),
        pytest.param("gate: {", "gate: {canary: {max_kl: 0.1}, ", {"canary-candidate"} | JUDGED, id="canary"),
        pytest.param(
            "concurrency: 8",
            "concurrency: 12",
            ASKED | JUDGED,
            id="requests in flight, fewer than the workload's",
        ),
        pytest.param(
            "concurrency: 8", "concurrency: 64", CANDIDATE | BASELINE | JUDGED, id="more than the workload's: a flag"
        ),
        pytest.param("scheme: ptpc_fp8", "scheme: fp8", FROM_QUANTIZE, id="scheme"),
        pytest.param("kv_cache: fp8", "kv_cache: auto", FROM_QUANTIZE | {"calibrate"}, id="no cache, no calibration"),
        pytest.param("seed: 0", "seed: 1", {"calibrate"} | FROM_QUANTIZE, id="calibration seed"),
        pytest.param("max_model_len: 512", "max_model_len: 256", CANDIDATE | BASELINE | JUDGED, id="length"),
        pytest.param("folder: published", "folder: elsewhere", {"publish"}, id="target"),
        pytest.param(
            "description: A test.", "description: Another.", {"report", "package", "publish"}, id="description"
        ),
        pytest.param("name: r\n", "# A thought.\nname: r\n", set(), id="comment"),
        pytest.param("gpus: 1, ", "", set(), id="a default left out"),
    ],
)
def test_a_recipe_edit_redoes_what_it_shapes(setting: Setting, old: str, new: str, expected: set[str]) -> None:
    assert changed(setting, edit(setting, old, new)) == expected


def test_another_vllm_is_served_and_measured_again(setting: Setting, with_vllm: WithVllm) -> None:
    assert changed(setting, with_vllm(setting, "0.33.0")) == CANDIDATE | BASELINE | JUDGED
    assert changed(setting, replace(setting, vllm=None)) == CANDIDATE | BASELINE | JUDGED


def test_one_byte_of_the_source_redoes_everything(setting: Setting) -> None:
    path = Path("model/model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    after = replace(open_setting("r.yaml", store=setting.store), vllm=setting.vllm)
    assert changed(setting, after) == EVERYTHING


def test_other_texts_under_the_same_name_are_another_calibration(setting: Setting) -> None:
    Path("words.jsonl").write_text('{"text": "one two four"}\n')
    assert changed(setting, setting) == set()
    before = fingerprints(setting)
    Path("words.jsonl").write_text('{"text": "one two five"}\n')
    after = fingerprints(setting)
    assert {key for key in before if before[key] != after[key]} == {"calibrate"} | FROM_QUANTIZE


def test_a_task_of_the_suite_is_its_content(setting: Setting) -> None:
    suite: Suite = setting.suite
    first = replace(suite.tasks[0], num_fewshot=3)
    other = replace(setting, suite=replace(suite, tasks=(first, *suite.tasks[1:])))
    assert changed(setting, other) == ASKED | JUDGED


def test_a_cell_is_benched_again(setting: Setting) -> None:
    workload: Workload = setting.workload
    last = replace(workload.cells[-1], num_prompts=workload.cells[-1].num_prompts + 1)
    other = replace(setting, workload=replace(workload, cells=(*workload.cells[:-1], last)))
    assert changed(setting, other) == {"bench"} | JUDGED


def test_other_prompts_are_read_again(setting: Setting) -> None:
    other = replace(setting, suite=replace(setting.suite, canary="general"))
    assert changed(setting, other) == CANARY | JUDGED


def test_two_recipes_of_a_model_share_the_baseline(setting: Setting) -> None:
    text = setting.loaded.path.read_text()
    other = text.replace("name: r", "name: other").replace("format: compressed-tensors", "format: quark")
    Path("other.yaml").write_text(other.replace("A test.", "Another."))
    second = replace(open_setting("other.yaml", store=setting.store), vllm=setting.vllm)
    same = EVERYTHING - changed(setting, second)
    assert same == {"source", "calibrate"} | BASELINE


def test_a_copy_of_the_model_is_the_same_model(setting: Setting, tmp_path: Path) -> None:
    Path("model").rename(tmp_path / "moved")
    other = edit(setting, "folder: model", f"folder: {os.path.relpath(tmp_path / 'moved')}")
    assert changed(setting, other) == {"report", "package", "publish"}  # they print the recipe


def strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_no_payload_knows_where_it_was_made(setting: Setting, tmp_path: Path) -> None:
    for planned in build_plan(setting):
        found = list(strings(json.loads(canonical_json(planned.payload))))
        machine = [text for text in found if str(tmp_path) in text or str(ROOT) in text or str(Path.home()) in text]
        if planned.key == "publish":
            assert machine == [str(Path("published").resolve())]
        else:
            assert machine == [], planned.key


_PRINT = """
import json, sys
from dataclasses import dataclass, replace
from pathlib import Path
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.store.tree import Store

@dataclass
class Vllm:
    version: str

setting = open_setting("r.yaml", store=Store(Path(sys.argv[1])))
print(json.dumps({p.key: p.fingerprint for p in build_plan(replace(setting, vllm=Vllm("0.32.0")))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "4711"])
def test_other_processes_agree(setting: Setting, tmp_path: Path, seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT, str(tmp_path / "another store")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == fingerprints(setting)


@pytest.mark.parametrize(
    ("until", "last"),
    [
        ("source", "source"),
        ("inspect", "inspect"),
        ("serve-candidate", "serve-candidate"),
        ("canary", "canary-candidate"),
        ("bench", "bench"),
        ("evaluate", "evaluate-candidate"),
        ("publish", "publish"),
        (None, "publish"),
    ],
)
def test_cut(setting: Setting, until: str | None, last: str) -> None:
    plan = build_plan(setting)
    kept = cut(plan, until)
    assert kept == plan[: len(kept)]
    assert kept[-1].key == last


@pytest.mark.parametrize(
    ("typo", "near"), [("quantise", "quantize"), ("evaluate_candidate", "evaluate-candidate"), ("Inspect", "inspect")]
)
def test_cut_names_what_was_meant(setting: Setting, typo: str, near: str) -> None:
    with pytest.raises(UserError) as refused:
        cut(build_plan(setting), typo)
    assert f"found '{typo}', expected one of source, calibrate" in refused.value.message
    assert f'did you mean "{near}"' in refused.value.message
