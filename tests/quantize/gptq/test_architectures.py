"""X^T X layer by layer of architectures that are not Llama's: of recurrent layers, and of what layers hand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.activations import Activations
from quantmint.calibration.hessians import InputStatistics
from quantmint.calibration.replica import load_resident, replica
from quantmint.pipeline.quantize.gptq.runner import GptqRunner, InputRoundings

Zoo = Callable[..., Path]
# With phi and phi3 a dropout of nothing follows attention; phi runs it twice.
NAMES = [
    "phi",
    "phi3",
    "bamba",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "glm_moe_dsa",
    "lfm2",
    "nemotron_h",
    "qwen3_next",
]


def walked(
    folder: Path,
    batches: list[torch.Tensor],
    work: Path,
    *,
    reference: bool,
    room: int = 10**9,
    devices: int = 1,
    fused: bool = False,
) -> dict[str, InputStatistics]:
    """What enters the linear modules of all layers, none of which is changed."""
    replicas = [replica(folder, "cpu") for _ in range(devices)]
    for one in replicas if fused else ():
        one.fuse_attention()
    inside = tuple(f"{name}." for name in replicas[0].walkable.layers)
    modules = replicas[0].model.named_modules()
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear) and name.startswith(inside)]
    seen: dict[str, InputStatistics] = {}

    roundings = InputRoundings(dict.fromkeys(linear, lambda entering: entering))
    states = Activations(work, room)
    gptq = GptqRunner(replicas, batches, states, "", lambda _: None, roundings, reference=reference)
    with torch.inference_mode(), gptq:
        gptq.record()
        for layer in gptq:
            for step in gptq.steps(layer):
                for inputs in gptq.collect(step):
                    seen.update(dict.fromkeys(inputs.modules, replace(inputs, hessian=inputs.hessian.clone())))
            gptq.finish(layer)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hessians_are_those_of_the_whole_model(zoo: Zoo, blocks: torch.Tensor, tmp_path: Path, name: str) -> None:
    batches = list(blocks[:6, :24].split(2))
    seen = walked(zoo(name), batches, tmp_path, reference=False)
    whole = load_resident(zoo(name), "cpu")
    expected: dict[str, torch.Tensor] = {}

    def hook(module: str) -> Callable[[Any, Any], None]:
        def before(_: Any, args: Any) -> None:
            rows = args[0].flatten(0, -2).double()
            expected[module] = expected.get(module, torch.zeros(())) + rows.t() @ rows

        return before

    for module in seen:
        whole.model.get_submodule(module).register_forward_pre_hook(hook(module))
    with torch.inference_mode():
        for batch in batches:
            whole.model.base_model(input_ids=batch)
    assert expected.keys() == seen.keys()
    for module, square in expected.items():
        found = seen[module].hessian.double()
        torch.testing.assert_close(found, square, rtol=1e-3, atol=1e-3 * float(square.abs().max()), msg=module)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_beside_the_16_bit_model_nothing_is_missing_where_nothing_was_changed(
    zoo: Zoo, blocks: torch.Tensor, tmp_path: Path, name: str
) -> None:
    """Both models hand on their own choices, keys and values; also where nothing is kept of a turn, on two devices."""
    batches = list(blocks[:6, :24].split(2))
    seen = walked(zoo(name), batches, tmp_path / "whole", reference=True)
    for module, inputs in seen.items():
        assert inputs.has_reference, module
        for lacking in (inputs.input_gap, inputs.output_gap):
            assert lacking is None or not lacking.any(), module
    for room, devices in ((0, 1), (10**9, 2)):
        again = walked(zoo(name), batches, tmp_path / f"{devices}", reference=True, room=room, devices=devices)
        assert again.keys() == seen.keys()
        for module, inputs in again.items():
            other = seen[module].hessian
            limit = 1e-4 * float(other.abs().max())
            torch.testing.assert_close(inputs.hessian, other, rtol=1e-4, atol=limit, msg=module)


@pytest.mark.parametrize("name", ["llama", "phi3", "phi"])
def test_a_part_that_answers_is_one_that_holds_the_module_it_ends_by(
    zoo: Zoo, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Behind it nothing would be spared, and what the module adds to the hidden states would be counted twice."""
    ends: list[dict[str, Any]] = []
    trace = GptqRunner._trace

    def remembered(self: GptqRunner, layer: int, linear: Any) -> Any:
        found = trace(self, layer, linear)
        ends.append(dict(found.ends))
        return found

    monkeypatch.setattr(GptqRunner, "_trace", remembered)
    walked(zoo(name), [blocks[:2, :16]], tmp_path, reference=True, fused=True)
    parts = [[part.rpartition(".")[2] for part, _ in of_layer.values()] for of_layer in ends]
    assert parts == [["self_attn", "mlp"]] * 2
    assert all(module.startswith(f"{part}.") for of_layer in ends for module, (part, _) in of_layer.items())
