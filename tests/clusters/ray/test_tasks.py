"""What Ray answers, and what it does where it is not there any more; without a cluster."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from quantmint.calibration.calibrate import Share, ShareOrder
from quantmint.calibration.observers import Observation
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.clusters.ray import spread, tasks
from quantmint.pipeline.clusters.ray.nodes import Node, TaskResources
from quantmint.pipeline.clusters.ray.spread import RayWorkers
from tests.clusters.ray.conftest import Told

NODE = Node("1", "node one", 8, 0)
ASK = TaskResources("cpu", 8, 0)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cluster that answers with nothing; what was cancelled there."""
    found: list[Any] = []
    monkeypatch.setattr("ray.nodes", list)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.wait", lambda references, timeout: (references[:1], references[1:]))
    monkeypatch.setattr("ray.cancel", lambda reference, force: found.append(reference))
    return found


def task_error(cause: Exception) -> Exception:
    """As `ray.get` raises what a task raised."""
    from ray.exceptions import RayTaskError

    found: Exception = RayTaskError("f", "", cause, pid=1, ip="10.0.0.1").as_instanceof_cause()
    return found


def fails(error: BaseException) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("builtins:ConnectionError", "Client is shutting down."),
        ("grpc:RpcError", "gone"),
        ("ray.exceptions:RpcError", "gone"),
        ("ray.exceptions:LocalRayletDiedError", ""),
    ],
)
def test_a_broken_connection_is_told_as_one_that_passes(
    cancelled: list[Any], monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    error = resolve_name(kind)(*filter(None, [said]))
    there = iter([True, False])
    monkeypatch.setattr("ray.is_initialized", lambda: next(there))
    monkeypatch.setattr("ray.wait", fails(error))
    with pytest.raises(StageError, match="the connection to the Ray cluster broke") as caught:
        list(tasks.results({"a": 1, "b": 2}, ASK, print))
    assert caught.value.transient
    assert cancelled == []


def test_nothing_is_asked_of_a_cluster_that_is_gone(cancelled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever is asked now would start a cluster here
    monkeypatch.setattr("ray.wait", fails(AssertionError("asked")))
    with pytest.raises(StageError, match="the connection to the Ray cluster broke: it was closed"):
        list(tasks.results({"a": 1}, ASK, print))
    with pytest.raises(StageError, match="the connection to the Ray cluster broke: it was closed"):
        list(tasks.answers({"a": NODE}))
    assert cancelled == []


def test_a_fault_of_one_ends_the_others(cancelled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get", fails(task_error(StageError("full"))))
    with pytest.raises(StageError, match=r"^full$"):
        list(tasks.results({"a": 1, "b": 2}, ASK, print))
    assert cancelled == ["b"]


def test_a_node_without_quantmint_is_named(cancelled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The remote function failed to import:\n\nTraceback\nModuleNotFoundError: No module named 'quantmint'"
    monkeypatch.setattr("ray.get", fails(task_error(RuntimeError(said))))
    with pytest.raises(UserError, match=r"^node one: quantmint does not run there: ModuleNotFoundError") as caught:
        list(tasks.answers({"a": NODE}))
    assert "same installation" in str(caught.value.hint)


@pytest.mark.parametrize(("asked", "expected"), [(None, 50), (800, 100)])
def test_shares_on_one_node_divide_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, asked: int | None, expected: int
) -> None:
    given: list[ShareOrder] = []

    def start(order: ShareOrder, *_: Any) -> str:
        given.append(order)
        return "a"

    monkeypatch.setattr(spread, "_remote", lambda *_: start)
    monkeypatch.setattr(spread, "results", lambda left, ask, say: iter([(share, None) for share in left.values()]))
    share = Share(0, (0,), 1)
    places = RayWorkers({}, ASK, Told(), together=8, states=50)
    order = ShareOrder(tmp_path, tmp_path, Observation(), "layer", asked, False, 2)
    assert list(places.measure(order, [share])) == [share]
    assert [one.activation_bytes for one in given] == [expected]
