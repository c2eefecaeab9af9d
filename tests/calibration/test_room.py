from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.calibration import room
from quantmint.calibration.container import memory_left
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.room import Need, decide, forward_bytes, free_bytes

GB = 10**9
NEED = Need(weights=100 * GB, layer=3 * GB, forward=5 * GB, states=30 * GB)


def chosen(mode: Any, free: int, devices: tuple[str, ...] = ("cuda:0",), reason: str | None = None) -> tuple[str, str]:
    decision = decide(mode, NEED, devices, dict.fromkeys(devices, free * GB), reason)
    return decision.mode, decision.reason


@pytest.mark.parametrize(("free", "mode"), [(200, "resident"), (124, "resident"), (123, "layer"), (20, "layer")])
def test_resident_where_the_weights_and_a_forward_fit_with_a_share_to_spare(free: int, mode: str) -> None:
    found, reason = chosen("auto", free)
    assert found == mode
    assert reason == f"the model takes 105.0 GB to run, and cuda:0 has room for {free * 0.85:,.1f} GB"


@pytest.mark.parametrize(("states", "mode"), [(23, "layer"), (24, "resident")])
def test_layers_where_they_take_less_than_the_model_with_hidden_states_in_a_quarter_of_the_memory(
    states: int, mode: str
) -> None:
    decision = decide("auto", replace(NEED, states=states * GB), ("cpu",), {"cpu": 200 * GB}, None)
    assert decision.mode == mode
    assert "the model takes 105.0 GB to run" in decision.reason


@pytest.mark.parametrize(("count", "mode"), [(1, "resident"), (2, "layer")])
def test_copies_share_a_device(count: int, mode: str) -> None:
    assert chosen("auto", 200, ("cpu",) * count)[0] == mode


def test_the_smallest_device_decides() -> None:
    decision = decide("auto", NEED, ("cuda:0", "cuda:1"), {"cuda:0": 200 * GB, "cuda:1": 90 * GB}, None)
    assert decision.mode == "layer"
    assert "cuda:1" in decision.reason


@pytest.mark.parametrize("free", [20, 200])
@pytest.mark.parametrize("mode", ["resident", "layer"])
def test_what_is_asked_for_is_taken(mode: str, free: int) -> None:
    assert chosen(mode, free) == (mode, "as the recipe asks")


def test_layers_that_cannot_be_replayed_need_a_device_that_holds_all() -> None:
    mode, reason = chosen("auto", 200, reason="they share")
    assert mode == "resident"
    assert reason.startswith("its layers cannot be run one at a time: they share; the model takes 105.0 GB")
    assert chosen("resident", 50, reason="they share") == ("resident", "as the recipe asks")
    with pytest.raises(CalibrationError, match=r"105\.0 GB .* either: they share\. Take .* or a larger device"):
        chosen("auto", 50, reason="they share")
    for free in (50, 200):
        with pytest.raises(
            CalibrationError, match=r"found calibration\.mode layer, but .*: they share; take mode: resi"
        ):
            chosen("layer", free, reason="they share")


@pytest.mark.parametrize("mode", ["auto", "layer"])
def test_two_layers_must_fit(mode: str) -> None:
    assert chosen(mode, 13)[0] == "layer"
    with pytest.raises(CalibrationError, match=r"two layers .* take 11\.0 GB, .* smaller calibration\.batch_size"):
        chosen(mode, 12)


def test_a_forward_grows_with_the_square_of_the_length() -> None:
    config = SimpleNamespace(hidden_size=4096, num_attention_heads=32, intermediate_size=14336)
    short, long = forward_bytes(config, 8, 1024), forward_bytes(config, 8, 4096)
    assert long > 8 * short
    assert forward_bytes(config, 16, 1024) == 2 * short
    assert short > 8 * 32 * 1024 * 1024 * (2 + 4 + 2), "the scores of all heads, thrice"


def test_a_forward_without_attention_has_the_states_of_its_channels() -> None:
    """As transformers computes a chunked scan without kernels; sizes that differ by layer count by the largest."""
    config = SimpleNamespace(
        hidden_size=2560, num_heads=80, state_size=128, chunk_size=256, intermediate_size=[1, 9000]
    )
    assert forward_bytes(config, 1, 2048) > 2048 * 256 * 80 * 128 * 4
    assert forward_bytes(config, 2, 2048) == 2 * forward_bytes(config, 1, 2048)
    del config.chunk_size, config.num_heads
    assert 2048 * 3 * 4 * 10240 * 128 < forward_bytes(config, 1, 2048) < 2048 * 4 * 4 * 10240 * 128


def test_the_limits_of_all_control_groups_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of a group above ours is the least, as where a job's step has no limit of its own."""
    available = free_bytes("cpu")
    assert available > 0
    inner = tmp_path / "sys/fs/cgroup/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (inner / "memory.max").write_text("max\n")
    for name, text in (("max", "3000000"), ("current", "2500000"), ("stat", "anon 1\ninactive_file 200000")):
        (inner.parent / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(room, "memory_left", partial(memory_left, tmp_path))
    assert free_bytes("cpu") == 700_000
    (inner.parent / "memory.max").write_text("max\n")
    assert free_bytes("cpu") > 700_000


def test_what_gptq_takes_is_bounded_by_the_rows_that_are_rounded_at_a_time() -> None:
    """Measured on an H200 in MXFP4 with compensation: 6.51, 4.80 and 19.18 GB at the peak."""
    for shape, measured in (((28672, 4096), 6.51e9), ((4096, 14336), 4.80e9), ((8192, 28672), 19.18e9)):
        assert measured <= room.rounding_bytes([shape]) <= 1.25 * measured
    assert room.rounding_bytes([(106496, 16384)]) < 40e9, "a gate and up projection of 405B"
    assert room.rounding_bytes([(16384, 53248)]) < 45e9, "a down projection of 405B"
    assert room.rounding_bytes([(8, 8), (28672, 4096)]) == room.rounding_bytes([(28672, 4096)])


def test_gptq_is_refused_where_its_squares_do_not_fit() -> None:
    need, rounding = Need(0, 10**9, 10**9, 0), room.rounding_bytes([(16384, 53248)])
    with pytest.raises(
        CalibrationError, match=r"GPTQ takes 46\.7 GB, of which 44\.7 GB .* and cuda:0 has room for 34\.0 GB"
    ):
        room.require_rounding_room(need, rounding, 40 * 10**9, "cuda:0")
    assert room.require_rounding_room(need, rounding, 58 * 10**9, "cuda:0")
    assert not room.require_rounding_room(need, rounding, 55 * 10**9, "cuda:0"), "no room to read the next layer"


def test_weights_to_learn_lie_on_a_device_with_room_for_them_or_in_the_host_s_memory() -> None:
    takes, weights = 30 * 10**9, 16 * 10**9
    assert room.learning_place(takes, weights, "cuda:0", 100 * 10**9) == "cuda:0"
    assert room.learning_place(takes, weights, "cuda:0", 60 * 10**9) == "cpu", "whatever the host has"
    room.require_learning_room(takes, "cpu", 36 * 10**9)
    with pytest.raises(CalibrationError, match=r"takes 30\.0 GB, and cpu has room for 29\.8 GB: take `tuned"):
        room.require_learning_room(takes, "cpu", 35 * 10**9)


def test_a_fused_forward_keeps_no_scores() -> None:
    config = SimpleNamespace(hidden_size=7168, num_attention_heads=128, intermediate_size=18432)
    assert forward_bytes(config, 8, 2048, is_fused=True) < 6e9 < 40e9 < forward_bytes(config, 8, 2048)
