from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.activations import Activations, States, committed_layers
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.layers import run_layers
from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import Ranges, load_ranges, ranges_of
from quantmint.calibration.replica import load_resident, replica
from quantmint.calibration.weights import Weights, held
from tests.measuring import observe

Same = Callable[[Ranges, Ranges], None]


class Interrupted(Exception):  # noqa: N818
    pass


def measure(folder: Path, batches: list[torch.Tensor], work: Path, *, budget: int = 10**9, **more: Any) -> Ranges:
    one = replica(folder, "cpu")
    return ranges_of(one, run_layers(one, batches, Observation(), Activations(work, budget), **more).finish())


@pytest.fixture
def each_layer_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)


def interrupt_at(step: int) -> Callable[[int], None]:
    seen = 0

    def advance(_: int) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            raise Interrupted

    return advance


@pytest.mark.slow
@pytest.mark.usefixtures("each_layer_is_committed")
@pytest.mark.parametrize("budget", [0, 20_000, 10**9])
@pytest.mark.parametrize("step", [1, 5, 9, 21])
def test_an_interrupted_run_goes_on_at_the_first_layer_that_is_not_committed(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, same: Same, step: int, budget: int
) -> None:
    batches, work = list(blocks[:, :16].split(4)), tmp_path / "work"  # four steps a layer
    reference = observe(load_resident(deep, "cpu"), batches)
    with pytest.raises(Interrupted):
        # The first call tells what was done before.
        measure(deep, batches, work, budget=budget, advance=interrupt_at(step + 1))
    finished = (step - 1) // 4
    assert committed_layers(work) == ([finished] if finished else [])
    told: list[int] = []
    same(reference, measure(deep, batches, work, budget=budget, advance=told.append))
    assert told == [16 * finished] + [4] * (4 * (6 - finished))


@pytest.mark.slow
@pytest.mark.usefixtures("each_layer_is_committed")
@pytest.mark.parametrize("changed", ["tokens", "observation", "order"])
def test_another_run_is_not_gone_on_with(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, same: Same, changed: str
) -> None:
    batches, work = list(blocks[:, :16].split(4)), tmp_path / "work"
    with pytest.raises(Interrupted):
        measure(deep, batches, work, advance=interrupt_at(12))
    assert committed_layers(work)
    observation = Observation(cache="percentile", percentile=50.0) if changed == "observation" else Observation()
    other = {"tokens": [*batches[:3], batches[3] + 1], "observation": batches, "order": batches[::-1]}[changed]
    one, told = replica(deep, "cpu"), []
    found = run_layers(one, other, observation, Activations(work, 10**9), advance=told.append)  # type: ignore[func-returns-value]
    assert told[0] == 0
    same(observe(load_resident(deep, "cpu"), other, observation), ranges_of(one, found.finish()))


def test_nothing_is_committed_before_it_is_worth_it(deep: Path, blocks: torch.Tensor, tmp_path: Path) -> None:
    measure(deep, list(blocks[:, :16].split(4)), tmp_path / "work")
    assert committed_layers(tmp_path / "work") == []
    assert not list((tmp_path / "work").glob("*"))


KILLED_AFTER = (2, 7, 14, 23)


@pytest.fixture(scope="module")
def killed(deep: Path, blocks: torch.Tensor, warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of these numbers of steps, with what a run that was killed then, and the next one, left."""
    place = tmp_path_factory.mktemp("killed")
    torch.save(blocks[:, :16].clone(), place / "tokens.pt")
    arguments = (deep, place / "tokens.pt", place, *map(str, KILLED_AFTER))
    ended = subprocess.run(
        [warm_python, "-m", "tests.calibration.killed_layers", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[-signal.SIGKILL, 0]] * len(KILLED_AFTER), ended.stderr
    return place


@pytest.mark.slow
@pytest.mark.parametrize("steps", KILLED_AFTER)
def test_a_killed_run_finds_the_ranges_of_an_undisturbed_one(
    deep: Path, blocks: torch.Tensor, killed: Path, same: Same, steps: int
) -> None:
    place = killed / str(steps)
    assert len((place / "killed").read_text().splitlines()) == steps + 1
    assert not (place / "killed.safetensors").exists()
    assert (place / "resumed").read_text().splitlines()[0] == f"{16 * ((steps - 1) // 4)}"
    same(observe(load_resident(deep, "cpu"), list(blocks[:, :16].split(4))), load_ranges(place / "resumed.safetensors"))
    assert not (place / "work").exists()


def test_never_more_than_two_layers_are_there(
    deep: Path, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replica(deep, "cpu")
    names = [f"model.layers.{number}" for number in range(6)]
    state: dict[str, torch.nn.Parameter] = dict(one.model.named_parameters())
    assert all(parameter.is_meta for parameter in state.values())
    most, outside, threads = 0, set(), set()
    load, loads, calls = Weights.load, count(), count()
    finished = [threading.Event() for _ in range(1 + len(names))]  # the embedding part, and each layer

    def counting(self: Weights, wanted: Any) -> None:
        nonlocal most
        load(self, wanted)
        there = {name for name, parameter in one.model.named_parameters() if not parameter.is_meta}
        most = max(most, sum(any(name.startswith(f"{layer}.") for name in there) for layer in names))
        if most:
            outside.update(name for name in there if not name.startswith("model.layers."))
            threads.add(threading.current_thread().name)
        finished[next(loads)].set()

    def wait_for_the_next(_: int) -> None:
        """A layer whose forward is quick would be freed before the next one's weights are there."""
        layer = (next(calls) - 1) // 4  # told once before the first layer, then of its four batches
        if 0 <= layer < len(names) - 1:
            assert finished[layer + 2].wait(60)

    monkeypatch.setattr(Weights, "load", counting)
    activations = Activations(tmp_path, 10**9)
    run_layers(one, list(blocks[:, :16].split(4)), Observation(), activations, advance=wait_for_the_next)
    assert most == 2
    assert not outside
    assert threading.current_thread().name not in threads
    assert all(parameter.is_meta for parameter in one.model.parameters())


def test_what_is_freed_is_gone(deep: Path) -> None:
    """Not kept by the module, nor by transformers' bookkeeping."""
    import weakref

    one = replica(deep, "cpu")
    names = held(one.model, "model.layers.0")
    one.weights.load(names)
    watched = [weakref.ref(one.model.get_parameter(name)) for name in names]
    one.weights.free(names)
    assert [found for watch in watched if (found := watch()) is not None] == []


def test_a_disk_that_takes_nothing(deep: Path, blocks: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="the hidden states cannot be kept there"):
        measure(deep, [blocks[:2, :16]], tmp_path / "file", budget=0)


@pytest.mark.parametrize("room", [10**6, 0])
def test_states_that_were_set_aside_come_back_once(tmp_path: Path, room: int) -> None:
    """On the disk where there is no room, and only if they may be: others are computed again."""
    kept, states = Activations(tmp_path, room), States(torch.arange(6.0).view(1, 2, 3), {"more": torch.ones(2)})
    kept.start()
    assert kept.set_aside(3, states, spill=False) is (room > 0)
    assert kept.has_aside(3) is (room > 0)
    assert kept.set_aside(3, states, spill=True)
    assert bool(list(tmp_path.rglob("aside-*"))) is (room == 0)
    taken = kept.take_aside(3, "cpu")
    assert taken is not None
    assert torch.equal(taken.hidden, states.hidden)
    assert torch.equal(taken.carried["more"], states.carried["more"])
    assert kept.take_aside(3, "cpu") is None
    assert not list(tmp_path.rglob("aside-*"))
