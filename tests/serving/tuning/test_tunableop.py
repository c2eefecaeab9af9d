"""The TunableOp pass: what it launches, what it keeps, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile
from quantmint.pipeline.serving.tuning.space import BASE, SweepTrial
from quantmint.pipeline.serving.tuning.subject import TUNED_FILE as FILE
from quantmint.pipeline.serving.tuning.subject import with_tunableop
from quantmint.pipeline.serving.tuning.tunableop import read_kernels
from tests.serving.conftest import write_tiny_llama
from tests.serving.tuning.fake_vllm import CSV
from tests.serving.tuning.sweeping import run, starts, subject_in, sweep_of

Surface = Callable[..., Path]
KNOB = "PYTORCH_TUNABLEOP_ENABLED"


def written(folder: Path, devices: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    for device in range(devices):
        (folder / (FILE % device)).write_text(CSV.format(device=device))
    return folder


def test_the_launches_say_exactly_what_they_must(tmp_path: Path) -> None:
    base = subject_in(
        tmp_path, kind="rocm", tensor=2, base={"--max-num-seqs": "64", "HIP_FORCE_DEV_KERNARG": "1"}
    ).plan(())
    plan = with_tunableop(base, tmp_path / "csv", search=True)
    assert dict(plan.env) == {
        "HIP_FORCE_DEV_KERNARG": "1",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "1",
        "PYTORCH_TUNABLEOP_FILENAME": f"{tmp_path}/csv/tunableop_results%d.csv",
    }
    assert plan.argv == base.argv
    tuned = read_kernels(written(tmp_path / "kept"), 2)
    assert dict(with_tunableop(base, tuned.folder, search=False).env) == {
        "HIP_FORCE_DEV_KERNARG": "1",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "PYTORCH_TUNABLEOP_FILENAME": f"{tmp_path}/kept/tunableop_results%d.csv",
    }


def test_what_a_pass_wrote_is_read(tmp_path: Path) -> None:
    tuned = read_kernels(written(tmp_path), 2)
    assert dict(tuned.shapes) == {"0": 2, "1": 2}
    (tmp_path / (FILE % 1)).write_text(CSV.format(device=7))
    assert read_kernels(tmp_path, 2).digest != tuned.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "wrote no tunableop_results1.csv for device 1"),
        (lambda text: "", "no tuned shape"),
        (lambda text: "".join(line for line in text.splitlines(True) if "Validator" in line), "no tuned shape"),
    ],
)
def test_files_that_pytorch_would_not_use_are_refused(
    tmp_path: Path, change: Callable[[str], str] | None, message: str
) -> None:
    folder = written(tmp_path)
    file = folder / (FILE % 1)
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text()))
    with pytest.raises(StageError, match=message):
        read_kernels(folder, 2)


@pytest.mark.slow
def test_the_pass_comes_first_is_kept_and_is_served_without_tuning(surface: Surface) -> None:
    folder = surface(throughput={"PYTORCH_TUNABLEOP_TUNING": {"0": 1.3}, "--max-num-seqs": {"32": 1.2}}, devices=2)
    axes = {KNOB: ["1"], "--max-num-seqs": ["32"]}
    found = run(folder, sweep_of(folder, dict(axes), kind="rocm", tensor=2), tunableop=True)
    first, *rest = starts(folder)
    assert first["PYTORCH_TUNABLEOP_TUNING"] == "1"
    assert {entry.get("PYTORCH_TUNABLEOP_TUNING", "none") for entry in rest} == {"0", "none"}
    kept = folder / "out" / "tunableop"
    assert sorted(path.name for path in kept.iterdir()) == ["tunableop_results0.csv", "tunableop_results1.csv"]
    assert found["serve"] == {"knobs": {"--max-num-seqs": 32}, "tunableop": str(kept / FILE)}
    assert found["tunableop"] is not None
    assert found["tunableop"]["shapes"] == {"0": 2, "1": 2}
    count = len(starts(folder))
    again = run(folder, sweep_of(folder, dict(axes), kind="rocm", tensor=2), tunableop=True)
    assert len(starts(folder)) == count  # the pass is not run twice, nor what was served with it
    assert again["serve"] == found["serve"]


def test_what_was_measured_is_what_the_planner_makes_of_the_section_in_a_recipe(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")

    def plan(tunableop: str | None) -> LaunchPlan:
        return plan_serving(
            ServingRequest(
                model,
                model_facts(model),
                target=parse_target("mi300x:1"),
                profile=profile("throughput", concurrency=64, max_model_len=512),
                vllm_version="0.33.0",
                purpose="measure",
                tunableop=tunableop,
            )
        )

    served = plan(str(tmp_path / FILE))
    used = with_tunableop(plan(None), tmp_path, search=False)
    assert (dict(used.env), used.argv) == (dict(served.env), served.argv)


def test_where_the_files_lie_does_not_shape_a_trial(tmp_path: Path) -> None:
    subject = subject_in(tmp_path, kind="rocm", tensor=2)
    point = ((KNOB, "1"),)
    one, two = (replace(subject, tuned=read_kernels(written(tmp_path / name), 2)) for name in ("a", "b"))
    assert one.fingerprint(SweepTrial(point)) == two.fingerprint(SweepTrial(point)) != one.fingerprint(SweepTrial(BASE))
