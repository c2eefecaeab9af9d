"""How the served side rounded the scales of MX inputs, from what its launch recorded."""

from __future__ import annotations

import pytest

from quantmint.pipeline.recipe.load import recipe_of
from quantmint.pipeline.stages.gate import served_rounding
from quantmint.pipeline.store.toolchain import Distribution, Environment


@pytest.mark.parametrize(
    ("served_on", "version", "rounding"),
    [
        ("mi300x", "0.1.20", "even"),  # vLLM emulates there
        ("mi355x", "0.1.15.post3", "even"),
        ("mi355x", "0.1.16", None),  # the kernels that ran decide: Triton's round to even, others up
        ("mi355x", None, None),
        ("unknown", "0.1.15", None),
    ],
)
def test_the_version_of_the_servers_aiter_tells(served_on: str, version: str | None, rounding: str | None) -> None:
    target = {"hardware": "mi355x", "mx_scales": "up"}
    sections = {"source": {"folder": "."}, "quantization": {"scheme": "mxfp4"}, "target": target}
    packages = {} if version is None else {"amd-aiter": Distribution(version)}
    launch = {"device": {"hardware": served_on, "name": "GPU"}}
    recipe = recipe_of(sections).recipe
    assert served_rounding(recipe, launch, Environment("3.12", packages)) == rounding
    if version is None:
        assert served_rounding(recipe, launch, None) is None
    unnamed = recipe_of({**sections, "target": {"hardware": "mi355x"}}).recipe
    assert served_rounding(unnamed, launch, Environment("3.12", packages)) is None
