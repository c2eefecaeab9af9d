"""An input that several modules read is rounded once, and no input before the last one is remembered."""

from __future__ import annotations

import torch

from quantmint.calibration.inputs import InputRounder, rounding_inputs


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


def test_the_same_tensor_for_the_same_rounding_is_rounded_once() -> None:
    rounder, tensor = InputRounder(), torch.ones(2)
    first = rounder(tensor, halved, "q_proj")
    assert first.tolist() == [0.5, 0.5]
    assert rounder(tensor, halved, "k_proj") is first
    assert rounder.reader == "q_proj"


def test_equal_tensors_and_other_roundings_are_other_inputs() -> None:
    rounder, tensor = InputRounder(), torch.ones(2)
    first = rounder(tensor, halved, "q_proj")
    assert rounder(tensor, lambda inputs: inputs / 2, "k_proj") is not first
    assert rounder.reader == "k_proj"
    assert rounder(torch.ones(2), halved, "v_proj") is not first
    assert rounder(tensor, halved, "o_proj") is not first, "the last input alone is remembered"
    assert rounder.reader == "o_proj"


def test_a_cleared_input_is_rounded_again() -> None:
    rounder, tensor = InputRounder(), torch.ones(2)
    first = rounder(tensor, halved)
    rounder.clear()
    assert rounder(tensor, halved) is not first


def test_modules_get_rounded_inputs_within_the_block() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in ("q", "k", "v")})
    calls: list[torch.Tensor] = []

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor / 2

    tensor = torch.ones(1, 2)
    with torch.no_grad():
        plain = {name: module(tensor) for name, module in model.items()}
        with rounding_inputs(model, {"q": counted, "k": counted}):
            rounded = {"q": model["q"](tensor), "k": model["k"](input=tensor), "v": model["v"](tensor)}
        assert torch.equal(model["q"](tensor), plain["q"])
    assert torch.equal(rounded["q"], plain["q"] / 2)
    assert torch.equal(rounded["k"], plain["k"] / 2)
    assert torch.equal(rounded["v"], plain["v"])
    assert calls == [tensor]
