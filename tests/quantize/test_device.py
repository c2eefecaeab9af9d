"""The devices that commands compute on, as PyTorch's own rules have their names."""

from types import SimpleNamespace

import pytest
import torch

from quantmint.pipeline.quantize.device import resolve_device, resolve_devices


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give this machine two GPUs that hold nothing; the list receives the numbers that become current."""
    numbers: list[int] = []

    def empty(size: int, *, device: str) -> SimpleNamespace:
        named = torch.device(device)
        return SimpleNamespace(device=named if named.index is not None else torch.device(named.type, 0))

    def set_device(device: str | torch.device) -> None:
        numbers.append(torch._utils._get_device_index(device))  # PyTorch's own check, which needs a number

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return numbers


def test_a_gpu_without_a_number_is_the_first(current: list[int]) -> None:
    assert (resolve_device("cuda"), current) == ("cuda", [0])


def test_the_first_of_several_gpus_becomes_current(current: list[int]) -> None:
    assert (resolve_devices("cuda:1, cuda:0"), current[-1]) == (("cuda:1", "cuda:0"), 1)
