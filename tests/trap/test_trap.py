"""Twelve faults of twelve are stopped, each by what names it, and no sound checkpoint is."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.hardware import local_cpu_flags, refusal
from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.trap.checkpoints import SOUND, Sound, Workshop
from tests.trap.faults import FAULTS, ROUNDED, TRANSPOSED
from tests.trap.run import table, try_fault, try_layouts, try_sound, write
from tests.trap.tensor_parallel import EXPECTED, verdict

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("trap"))


@pytest.mark.parametrize("base", SOUND, ids=lambda base: base.name)
def test_a_sound_checkpoint_passes(workshop: Workshop, base: Sound) -> None:
    result = try_sound(workshop, base)
    assert result.stoppers == (), result.reasons
    assert len(result.verdicts) == (4 if base.is_trained else 2)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in (TRANSPOSED, ROUNDED)])
def test_a_fault_of_the_files_is_named(workshop: Workshop, name: str) -> None:
    fault = FAULTS[name]
    result = try_fault(workshop, fault)
    assert any(reason.startswith(f"{fault.rule}: ") for reason in result.reasons["inspection"]), result.reasons


def test_a_proof_by_another_rounding_than_the_target_s_is_void(workshop: Workshop) -> None:
    result = try_fault(workshop, FAULTS[ROUNDED])
    assert result.stoppers == ("servers",)
    assert "rounded with MX scales to 'even', the target rounds to 'up'" in result.reasons["servers"][0]


@pytest.mark.vllm
def test_a_transposed_shard_of_tensor_parallelism_is_stopped(workshop: Workshop, warm_vllm: VllmEnvironment) -> None:
    """In a real vLLM on two processes: the sound launch passes, and the same with one shard transposed does not."""
    if (reason := refusal("cpu", "ptpc_fp8", "fp8", "compressed-tensors", cpu_flags=local_cpu_flags())) is not None:
        pytest.skip(reason)
    good, broken = try_layouts(workshop, warm_vllm)
    assert good.verdicts == {"layout": Verdict.PASS}, good.reasons
    assert broken.verdicts == {"layout": Verdict.FAIL}, broken.reasons
    assert "TP 2 beside TP 1 of the same weights: reading" in broken.reasons["layout"][0]


@pytest.mark.vllm
def test_on_two_gpus_both_runs_end_with_the_layout(warm_vllm: VllmEnvironment, tmp_path: Path) -> None:
    """The stages alone: this machine need not have a GPU."""
    runs = [verdict(tmp_path, name, "h100", dry_run=True) for name in EXPECTED]
    assert [run["stages"] for run in runs] == [["source", "quantize", "serve-candidate", "layout"]] * 2


def test_the_table_is_written_between_its_marks(workshop: Workshop, tmp_path: Path) -> None:
    name = "weights of two layers exchanged"
    text = table({name: try_fault(workshop, FAULTS[name])}, {"sound": try_sound(workshop, SOUND[0])})
    assert f"| {name} | **error too large** | passes |" in text
    assert "| sound | passes | passes | passes | passes |" in text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- trap: written by `make trap` -->\nold\n<!-- trap: end -->\nafter\n")
    write(text, page=page)
    content = page.read_text()
    assert text in content
    assert "old" not in content
    assert content.startswith("before\n")
    assert content.endswith("\nafter\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="found no <!-- trap"):
        write(text, page=page)
