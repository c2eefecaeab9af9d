"""Hessians and new weights layer by layer, against the whole model run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.activations import Activations, committed_layers
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.hessians import InputStatistics
from quantmint.calibration.replica import load_resident, replica
from quantmint.pipeline.quantize.gptq.runner import GptqRunner, InputRoundings, LinearStep, NewWeight

LINEAR = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


def unchanged(entering: torch.Tensor) -> torch.Tensor:
    return entering


def coarse(entering: torch.Tensor) -> torch.Tensor:
    return (entering * 4).round() / 4


def names(layers: int = 6) -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in range(layers) for part in LINEAR]


class Interrupted(Exception):  # noqa: N818
    pass


class Halving:
    """Keeps the statistics of each module, and puts half of each weight in its place."""

    def __init__(self, *, change: bool = True, last: int = 99) -> None:
        self.change, self.last = change, last
        self.seen: dict[str, InputStatistics] = {}
        self.layers: list[int] = []
        self.steps: list[list[str]] = []

    def run(self, runner: GptqRunner) -> None:
        with torch.inference_mode(), runner:
            runner.record()
            for layer in runner:
                for step in runner.steps(layer):
                    self.solve(runner, step)
                self.layers.append(layer)
                runner.finish(layer)

    def solve(self, runner: GptqRunner, step: Any) -> None:
        assert isinstance(step, LinearStep)
        if step.layer == self.last:
            raise Interrupted
        statistics = runner.collect(step)
        modules = [name for inputs in statistics for name in inputs.modules]
        self.steps.append(modules)
        for inputs in statistics:
            copy = replace(inputs, hessian=inputs.hessian.clone())
            self.seen.update(dict.fromkeys(inputs.modules, copy))
        weights = [f"{name}.weight" for name in modules if self.change]
        parameter = runner.replica.model.get_parameter
        runner.apply(step, [NewWeight(name, parameter(name).detach() / 2) for name in weights])


@pytest.fixture(autouse=True)
def each_layer_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)


def renew(
    folder: Path,
    blocks: torch.Tensor,
    work: Path,
    how: Any = unchanged,
    facts: str = "",
    *,
    reference: bool = False,
    room: int = 10**9,
    fused: bool = False,
    devices: int = 1,
    **more: Any,
) -> Halving:
    replicas = [replica(folder, "cpu") for _ in range(devices)]
    for one in replicas if fused else ():
        one.fuse_attention()
    halving = Halving(**more)
    batches = list(torch.split(blocks[:, :16], 4))
    roundings = InputRoundings(dict.fromkeys(names(), how))
    states = Activations(work, room)
    halving.run(GptqRunner(replicas, batches, states, facts, lambda _: None, roundings, reference=reference))
    return halving


def expected(folder: Path, blocks: torch.Tensor, how: Callable[..., Any], *, layers: int) -> dict[str, torch.Tensor]:
    """X^T X of the whole model, whose first ``layers`` have half of their weights."""
    model = load_resident(folder, "cpu").model
    found: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def before(_module: Any, args: Any) -> Any:
            rows = how(args[0])
            found[name] = (
                found.get(name, torch.zeros(())) + rows.flatten(0, -2).double().t() @ rows.flatten(0, -2).double()
            )
            return (rows,)

        return before

    for name in names():
        model.get_submodule(name).register_forward_pre_hook(hook(name))
        if int(name.split(".")[2]) < layers:
            model.get_submodule(name).weight.data = model.get_submodule(name).weight.data / 2
    with torch.inference_mode():
        for batch in torch.split(blocks[:, :16], 4):
            model.model(input_ids=batch)
    return found


@pytest.mark.parametrize("how", [unchanged, coarse])
@pytest.mark.parametrize("layer", [0, 3])
def test_hessians_are_those_of_inputs_that_new_weights_have_made(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, how: Callable[..., Any], layer: int
) -> None:
    seen = renew(deep, blocks, tmp_path, how).seen
    wanted = expected(deep, blocks, how, layers=layer)
    assert list(seen) == names()
    for name in (name for name in names() if name.startswith(f"model.layers.{layer}.")):
        torch.testing.assert_close(
            seen[name].hessian.double(), wanted[name], rtol=1e-4, atol=1e-4 * float(wanted[name].max())
        )
        assert seen[name].tokens == blocks[:, :16].numel()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_devices_that_share_the_batches_sum_what_one_does(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, devices: int
) -> None:
    alone = renew(deep, blocks, tmp_path / "alone", coarse, reference=True).seen
    shared = renew(deep, blocks, tmp_path / "shared", coarse, reference=True, devices=devices).seen
    assert list(shared) == list(alone)
    for name, one in alone.items():
        assert (shared[name].modules, shared[name].tokens) == (one.modules, one.tokens)
        for part in ("hessian", "input_gap", "output_gap"):
            here, there = getattr(one, part), getattr(shared[name], part)
            assert (here is None) == (there is None)
            assert here is None or torch.equal(there, here), "to the last bit"


def test_a_device_that_fails_ends_the_others(deep: Path, blocks: torch.Tensor, tmp_path: Path) -> None:
    """The first device waits for the sums of a part that the second one does not make."""

    def breaking(rows: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.endswith("_1"):
            raise RuntimeError("this device is gone")
        return rows

    with pytest.raises(CalibrationError, match="this device is gone"):
        renew(deep, blocks, tmp_path, breaking, devices=2)


def test_modules_with_one_input_have_one_hessian(deep: Path, blocks: torch.Tensor, tmp_path: Path) -> None:
    seen = renew(deep, blocks, tmp_path).seen
    at = "model.layers.2"
    assert seen[f"{at}.self_attn.k_proj"].modules == tuple(f"{at}.self_attn.{part}_proj" for part in "qkv")
    assert seen[f"{at}.self_attn.o_proj"].modules == (f"{at}.self_attn.o_proj",)
    assert seen[f"{at}.mlp.gate_proj"].modules == (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")


def test_inputs_that_are_rounded_otherwise_are_counted_apart(deep: Path, blocks: torch.Tensor, tmp_path: Path) -> None:
    one = replica(deep, "cpu")
    halving, roundings = Halving(change=False), dict.fromkeys(names(), unchanged)
    roundings["model.layers.0.self_attn.k_proj"] = coarse
    states, batches = Activations(tmp_path, 10**9), [blocks[:4, :16]]
    halving.run(GptqRunner([one], batches, states, "", lambda _: None, InputRoundings(roundings), reference=False))
    q, k, v = (halving.seen[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv")
    assert not torch.equal(q.hessian, k.hessian)
    assert torch.equal(q.hessian, v.hessian)


def test_beside_the_16_bit_model_nothing_is_missing_where_nothing_was_changed(
    deep: Path, blocks: torch.Tensor, tmp_path: Path
) -> None:
    halving = renew(deep, blocks, tmp_path, change=False, reference=True)
    by_step = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    by_step += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    steps = [[f"model.layers.{layer}.{name}" for name in step] for layer in range(6) for step in by_step]
    assert halving.steps == steps
    for name, inputs in halving.seen.items():
        lacking = inputs.output_gap if name.endswith(("o_proj", "down_proj")) else inputs.input_gap
        assert lacking is not None
        assert not lacking.any()
        assert inputs.input_gap is None or inputs.output_gap is None


def test_what_the_16_bit_model_has_more_is_of_its_inputs_and_of_its_hidden_states(
    deep: Path, blocks: torch.Tensor, tmp_path: Path
) -> None:
    halving = renew(deep, blocks, tmp_path, coarse, reference=True)
    model, layer = load_resident(deep, "cpu").model, "model.layers.1"
    entering: list[torch.Tensor] = []  # gate_proj and down_proj, twice
    states: list[torch.Tensor] = []

    def after(_module: Any, args: Any, _found: torch.Tensor) -> None:
        entering.append(args[0].flatten(0, -2).double())

    def around(_module: Any, args: Any) -> None:  # what down_proj adds to: what entered the norm before the MLP
        states.append(args[0].flatten(0, -2).double())

    def size(_module: Any, _args: Any, found: torch.Tensor) -> None:
        states.append(found.flatten(0, -2).double())

    for part in ("gate_proj", "down_proj"):
        model.get_submodule(f"{layer}.mlp.{part}").register_forward_hook(after)
    model.get_submodule(f"{layer}.post_attention_layernorm").register_forward_pre_hook(around)
    model.get_submodule(layer).register_forward_hook(size)
    with torch.inference_mode():
        model.model(input_ids=blocks[:, :16])
        for name in names(2)[:-1]:
            module = model.get_submodule(name)
            module.weight.data = module.weight.data / 2
            module.register_forward_pre_hook(lambda _, args: (coarse(args[0]),))
        model.model(input_ids=blocks[:, :16])
    (whole_gate, original, gate, before), (wanted, after_it, here, _) = entering, states
    lost = (original - coarse(before)) @ model.get_submodule(f"{layer}.mlp.down_proj").weight.detach().double().t()
    rows = coarse(before)
    weight = after_it.square().mean(dim=1, keepdim=True).rsqrt()
    found, reading = (halving.seen[f"{layer}.mlp.{part}_proj"] for part in ("down", "gate"))
    scaled = rows * weight
    assert found.output_gap is not None
    assert reading.input_gap is not None
    output_gap, input_gap = (  # with the rows that are held out from the sums
        gap + sum(part.inputs.t() @ part.gaps for part in inputs.held_out)
        for gap, inputs in ((found.output_gap, found), (reading.input_gap, reading))
    )
    assert not torch.equal(input_gap, reading.input_gap)
    with torch.inference_mode():
        hessian = found.add_held_out().hessian
    for one, other in [
        (input_gap, gate.t() @ (whole_gate - gate)),
        (hessian, scaled.t() @ scaled),
        (output_gap, scaled.t() @ ((wanted - here + lost) * weight)),
    ]:
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=2e-3 * float(other.abs().max()))


@pytest.mark.parametrize("room", [0, 300_000])
def test_what_there_is_no_room_for_is_made_again(deep: Path, blocks: torch.Tensor, tmp_path: Path, room: int) -> None:
    whole = renew(deep, blocks, tmp_path / "whole", coarse, reference=True, fused=True)
    some = renew(deep, blocks, tmp_path / "some", coarse, reference=True, fused=True, room=room)
    assert whole.seen.keys() == some.seen.keys()
    for name, one in whole.seen.items():
        other = some.seen[name]
        assert one.has_reference
        assert torch.equal(one.hessian, other.hessian)
        for mine, its in ((one.input_gap, other.input_gap), (one.output_gap, other.output_gap)):
            assert (mine is None) == (its is None)
            assert mine is None or its is None or torch.equal(mine, its)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("facts", ["", "others"])
def test_an_interrupted_run_goes_on_where_it_was_committed(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, facts: str, reference: bool
) -> None:
    whole = renew(deep, blocks, tmp_path / "whole", reference=reference)
    with pytest.raises(Interrupted):
        renew(deep, blocks, tmp_path / "work", last=4, reference=reference)
    assert committed_layers(tmp_path / "work") == [4]
    rest = renew(deep, blocks, tmp_path / "work", facts=facts, reference=reference)
    assert rest.layers == ([4, 5] if not facts else [0, 1, 2, 3, 4, 5])
    assert all(torch.equal(rest.seen[name].hessian, whole.seen[name].hessian) for name in rest.seen)
