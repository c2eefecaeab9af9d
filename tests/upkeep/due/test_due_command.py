from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.publish.release import MANIFEST
from tests.hub.standin import Fault, HubStandIn
from tests.stages.conftest import Ended
from tests.upkeep.due.world import CONFIG, World

Command = Callable[..., Ended]
ROOT = Path(__file__).parents[3]


def test_something_is_due(world: World, quantmint: Command) -> None:
    world.release()
    world.recipe(gate={"accuracy": {"margin": 0.03}})
    ended = quantmint("due", "r.yaml")
    assert ended.code == 10
    assert ended.out.startswith("r  due      v20261120-")
    assert "recipe: gate.accuracy.margin 0.02 -> 0.03" in ended.out
    assert "reruns: all stages" in ended.out


def test_nothing_is_due(world: World, quantmint: Command) -> None:
    world.release()
    ended = quantmint("due", "r.yaml")
    assert (ended.code, ended.err) == (0, "")
    assert "current" in ended.out
    assert "nothing changed" in ended.out


def test_json(world: World, quantmint: Command) -> None:
    tag = world.release()
    world.finished()
    world.vllm = "0.33.0"
    ended = quantmint("due", "r.yaml", "--json")
    (found,) = ended.json["recipes"]
    assert (ended.code, ended.json["due"]) == (10, 1)
    assert (found["name"], found["recipe"], found["state"]) == ("r", "r.yaml", "due")
    assert found["release"]["tag"] == tag
    change = {"cause": "serving", "path": "$.tools.vllm", "before": "0.32.0", "after": "0.33.0"}
    assert found["changes"][0] == {**change, "stage": "serve-baseline"}
    states = {stage["stage"]: stage["state"] for stage in found["stages"]}
    assert (states["quantize"], states["serve-candidate"]) == ("cached", "rerun")
    assert len(found["inputs"]) == 64


def test_what_is_broken_is_told_and_the_others_looked_at(world: World, quantmint: Command) -> None:
    world.release()
    (world.folder / "bad.yaml").write_text("name: bad\n")
    ended = quantmint("due", "bad.yaml", "r.yaml")
    assert ended.code == 2
    assert [line.split()[1] for line in ended.out.splitlines()] == ["broken", "current"]
    world.recipe("new")
    assert quantmint("due", "bad.yaml", "new.yaml").code == 10


def test_a_damaged_release_is_no_silence(world: World, quantmint: Command) -> None:
    """At night nobody reads warnings: a code, a state and a reason of its own, and the others are looked at and run."""
    tag = world.release()
    world.recipe("good")
    world.release("good")
    (world.folder / "published" / ".releases" / "r" / tag / MANIFEST).write_text("{")
    ended = quantmint("due", "r.yaml", "good.yaml", "--json")
    assert ended.code == 5
    assert [(one["state"], f"{tag} is damaged" in one["reason"]) for one in ended.json["recipes"]] == [
        ("damaged", True), ("current", False),
    ]  # fmt: skip
    (world.folder / "bad.yaml").write_text("name: bad\n")
    assert quantmint("due", "bad.yaml", "r.yaml").code == 5
    ended = quantmint("requantize", "r.yaml", "good.yaml", "--json")
    assert (ended.code, ended.json["exit_code"]) == (5, 5)
    assert {one["recipe"]: (one["state"], one["exit_code"]) for one in ended.json["ended"]} == {
        "r": ("damaged", 5), "good": ("current", 0),
    }  # fmt: skip
    ended = quantmint("requantize", "r.yaml")
    assert f"{tag} is damaged" in ended.out
    world.recipe("new")
    assert quantmint("due", "r.yaml", "new.yaml").code == 10


def test_what_cannot_be_asked_is_told_once_and_is_no_failure(world: World, hub: HubStandIn, quantmint: Command) -> None:
    for name in ("one", "two"):
        world.recipe(name, source={"repo": "my-org/base"}, publish={"folder": None, "hub": {"repo": "my-org/r"}})
    hub.put("my-org/base", {"config.json": CONFIG})
    hub.faults.append(Fault("GET", "/", times=99, status=503))
    ended = quantmint("due", "one.yaml", "two.yaml", "--json")
    assert (ended.code, ended.json["due"]) == (0, 0)
    assert [found["state"] for found in ended.json["recipes"]] == ["unknown", "unknown"]
    assert ended.err.count("my-org/base") == 1
    assert hub.token not in ended.err + ended.out


def test_without_a_name_those_of_the_working_folder(world: World, quantmint: Command) -> None:
    ended = quantmint("due")
    assert ended.code == 2
    assert "no recipe is named" in ended.err
    mine = world.folder / "recipes"
    mine.mkdir()
    (world.folder / "r.yaml").rename(mine / "r.yaml")
    (mine / "_base.yaml").write_text("description: For others.\n")
    (mine / "words.yaml").write_text("name: words\nfile: words.jsonl\ntext: text\n")
    found = quantmint("due", "--json").json["recipes"]
    assert [one["recipe"] for one in found] == ["r"]


@pytest.mark.parametrize("image", ["rocm/vllm:latest"])
def test_an_image_that_is_none_is_one_error(
    world: World, quantmint: Command, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    monkeypatch.setenv("QUANTMINT_IMAGE", image)
    ended = quantmint("due", "r.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert f"QUANTMINT_IMAGE: found {image!r}, expected an image by its digest" in ended.err


def test_nothing_heavy_is_imported(world: World) -> None:
    """A cold process must answer at once: PyTorch alone takes seconds."""
    world.vllm = None
    code = (
        "import sys\n"
        "from quantmint.pipeline.commands.cli import main\n"
        "try:\n"
        "    main(['due', 'r.yaml'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, [name for name in ('torch', 'transformers', 'datasets', 's3fs') if name in sys.modules])\n"
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "10 []"
