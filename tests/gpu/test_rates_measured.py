"""Rates of a GPU that the table does not know are measured, those of loading and of the link too."""

from __future__ import annotations

import pytest
import torch

from quantmint.pipeline.stages.rates import known, measured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_a_file_is_loaded_no_faster_than_the_link_is() -> None:
    rates = measured(known("h100"), "cuda:0", "this GPU")
    assert rates.link is not None
    assert 0 < rates.load <= rates.link
    assert rates.load != known("h100").load
