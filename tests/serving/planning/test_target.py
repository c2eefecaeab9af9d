"""What a server is for, and the machines it is planned for."""

from __future__ import annotations

from typing import get_args

import pytest

from quantmint.eval import records, workloads
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target, profile, profiles


def test_workloads_and_plans_call_profiles_by_the_same_names():
    assert set(get_args(workloads.Profile)) == set(profiles())
    assert {workloads.load(name).profile for name in records.names(workloads.FOLDER)} <= set(profiles())


def test_a_profile_with_its_load():
    busy = profile("throughput", concurrency=256, max_model_len=4096)
    assert (busy.concurrency, busy.max_model_len, busy.for_throughput) == (256, 4096, True)
    assert profile("latency").concurrency == profiles()["latency"].concurrency
    assert not profile("streaming").for_throughput
    with pytest.raises(UserError, match=r"unknown profile 'troughput' \(did you mean \"throughput\"\?\)"):
        profile("troughput")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mi300x", ServingTarget("mi300x")),
        ("MI300X:8", ServingTarget("mi300x", 8)),
        ("mi300x:16", ServingTarget("mi300x", 8, 2)),
        ("mi355x:4x2", ServingTarget("mi355x", 4, 2)),
        ("cpu", ServingTarget("cpu")),
    ],
)
def test_a_target(text, expected):
    assert parse_target(text) == expected
    assert parse_target(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mi300x:12", "do not fill a whole number of nodes"),
        ("mi300x:0", "1 to 8 in a node"),
        ("mi300x:9x2", "1 to 8 in a node"),
        ("mi300x:4x0", "nodes is 0"),
        ("cpu:2", "one device"),
        ("mi999:8", "unknown hardware 'mi999'"),
        ("mi300x 8", "not a target"),
    ],
)
def test_what_is_no_target(text, message):
    with pytest.raises(UserError, match=message):
        parse_target(text)
