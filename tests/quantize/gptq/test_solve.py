"""The solve of a step over several devices, by names of one CPU that pass for two, and how problems are divided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.hessians import InputStatistics
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.gptq import runner as runner_module
from quantmint.pipeline.quantize.gptq import solve as solve_module
from quantmint.pipeline.quantize.gptq.request import GptqSettings
from quantmint.pipeline.quantize.gptq.solve import Solution, gptq_bytes, solve
from quantmint.pipeline.quantize.gptq.weights import InputGroup, Member
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.quantization import Quantization

ASSETS = Path(__file__).parents[2] / "assets" / "configs"


def groups_of(folder: Path, scheme: Any, *, targets: bool = False) -> list[InputGroup]:
    """Return the groups of a layer's attention and MLP, with random weights and statistics."""
    source = open_checkpoint(folder)
    structure = read_structure(folder, source.tensors)
    choice = select(structure, Quantization(scheme=scheme, format="quark"))
    plans = plan_shards(source, structure, choice, "quark", shared_scales=True)
    steps = {step.name: step for plan in plans for step in plan.steps}
    generator = torch.Generator().manual_seed(0)
    groups = []
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        block = "mlp" if names[0] in ("gate_proj", "down_proj") else "self_attn"
        members = tuple(
            Member(steps[module], f"{module}.weight") for module in (f"model.layers.0.{block}.{name}" for name in names)
        )
        shapes = [member.step.origin.shape for member in members]
        weights = tuple(torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
        rows = torch.randn(3 * shapes[0][1], shapes[0][1], generator=generator)
        rows *= torch.randn(shapes[0][1], generator=generator).exp()
        statistics = InputStatistics(tuple(member.parameter for member in members), rows.t() @ rows, len(rows))
        moved = tuple(weight * 1.25 for weight in weights) if targets else None
        groups.append(InputGroup(statistics, members, weights, moved))
    return groups


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have every product summed in one order: beside other work a CPU's library takes fewer threads for some."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def facts(solution: Solution) -> tuple[Any, ...]:
    parts = {role: part.reshape(-1).view(torch.uint8).tolist() for role, part in solution.rounded.parts.items()}
    return solution.member, parts, solution.gain


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("scheme", ["mxfp4", "fp8"])
def test_devices_share_the_problems_and_solve_them_alike(models: Any, scheme: str, targets: bool) -> None:
    groups = groups_of(models("llama"), scheme, targets=targets)
    alone = solve(groups, GptqSettings(), ["cpu"])
    assert [solution.member for solution in alone] == [member for group in groups for member in group.members]
    assert sum(solution.gain.after for solution in alone) < 0.9 * sum(solution.gain.before for solution in alone)
    for devices in (["cpu", "cpu:0"], ["cpu", "cpu:0", "cpu:0"]):
        assert list(map(facts, solve(groups, GptqSettings(), devices))) == list(map(facts, alone))


def test_each_device_gets_its_turn(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    attempt = solve_module._attempt

    def watched(batch: Any, settings: GptqSettings, device: str) -> Any:
        used.append(device)
        return attempt(batch, settings, device)

    monkeypatch.setattr(solve_module, "_attempt", watched)
    solve(groups_of(models("llama"), "mxfp4"), GptqSettings(), ["cpu", "cpu:0"])
    assert sorted(used) == ["cpu", "cpu", "cpu:0", "cpu:0"]


def test_on_a_gpu_problems_of_one_shape_are_solved_side_by_side(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the experts of a layer are; those with targets, which have a factor for themselves, are not."""
    groups = groups_of(models("llama"), "mxfp4")
    experts = [groups[3]] + [InputGroup(groups[3].statistics, groups[3].members, groups[3].weights) for _ in range(4)]
    problems = solve_module._problems(experts)
    assert [len(batch) for batch in solve_module._batches(problems, "cuda:0")] == [5]
    assert [len(batch) for batch in solve_module._batches(problems, "cpu")] == [1] * 5
    rows, columns = problems[0].shape
    monkeypatch.setattr(runner_module, "_STACK", 8 * columns * max(rows, columns))
    assert [len(batch) for batch in solve_module._batches(problems, "cuda:0")] == [2, 2, 1]
    compensated = solve_module._problems(groups_of(models("llama"), "mxfp4", targets=True))
    assert [len(batch) for batch in solve_module._batches(compensated, "cuda:0")] == [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "layer", "gigabytes"),
    [
        ("DeepSeek-R1-0528", "model.layers.30.mlp.experts", 21.9),  # sums of 29 experts twice, five rounded at a time
        ("Llama-3.1-70B-Instruct", "model.layers.30.mlp", 21.6),  # the down projection, 8192 x 28672
    ],
)
def test_experts_take_the_room_of_those_that_are_rounded_side_by_side(
    folder: str, layer: str, gigabytes: float
) -> None:
    """All experts of a layer as one matrix, which no GPU has room for, were reckoned with: 414 GB of DeepSeek R1."""
    _, structure = imagine(ASSETS / folder)
    modules = [name for name in structure.linear if name.startswith(layer)]
    assert gptq_bytes(structure, modules, on_gpu=True) == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert gptq_bytes(structure, modules, on_gpu=False) <= gptq_bytes(structure, modules, on_gpu=True)
