from __future__ import annotations

import weakref

import pytest
import torch

from quantmint.calibration.hooks import EarlyStop


def test_a_forward_that_was_ended_holds_no_tensor_though_its_exception_lives() -> None:
    """On some versions of Python that exception lay in a cycle, and gigabytes waited for the garbage collector."""
    exceptions: list[BaseException] = []
    tensors: list[weakref.ref[torch.Tensor]] = []

    def forward(stop: EarlyStop) -> None:
        inside = torch.ones(3)
        tensors.append(weakref.ref(inside))
        try:
            stop.reached("q_proj")
        except BaseException as error:
            exceptions.append(error)
            raise

    with EarlyStop({"q_proj"}) as stop:
        forward(stop)
    assert exceptions
    assert tensors[0]() is None


def test_an_error_of_the_model_passes_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught, EarlyStop({"q_proj"}):
        _ = 1 / 0
    assert caught.traceback
