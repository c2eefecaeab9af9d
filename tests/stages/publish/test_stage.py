"""Only what was judged, only after a PASS, only byte for byte: the stage in the real runner."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.quantize.digest import file_digests, folder_digest
from quantmint.pipeline.stages.publish import published_in

SIZE = 2 << 20  # bytes; more than what the store reads at every look


def published() -> dict[str, bytes] | None:
    link = Path("published/r")
    if not os.path.lexists(link):
        return None
    return {path.relative_to(link).as_posix(): path.read_bytes() for path in link.rglob("*") if path.is_file()}


def test_what_is_published_is_what_was_judged(orchestra: Any, stages: Any, tmp_path: Path) -> None:
    outcome = orchestra.run(*stages())
    found = published()
    assert found is not None
    expected = {
        name.removeprefix("checkpoint/"): outcome.entry("quantize").file(name).read_bytes()
        for name in ("checkpoint/config.json", "checkpoint/model.safetensors")
    }
    for key in ("gate", "report", "inspect"):
        entry = outcome.entry(key)
        expected |= {f"quantmint/{name}": entry.file(name).read_bytes() for name in entry.record.files}
    package, publish = outcome.entry("package"), outcome.entry("publish")
    expected |= {name: package.file(name).read_bytes() for name in ("README.md", "quantmint.json")}
    assert found == expected
    digests = file_digests(Path("published/r").resolve(), tmp_path / "memory")
    digest = folder_digest({name: known for name, known in digests.items() if name != "quantmint.json"})
    gate, manifest = json.loads(found["quantmint/gate.json"]), json.loads(found["quantmint.json"])
    assert digest == gate["artefact"] == manifest["artefact"]
    [place] = published_in(publish)
    assert (publish.record.result["tag"], place.tag) == (package.record.result["tag"],) * 2
    assert (place.place, place.current, place.again) == (str(Path.cwd() / "published" / "r"), True, False)


def test_the_published_record_judges_again(orchestra: Any, stages: Any, quantmint: Any) -> None:
    orchestra.run(*stages())
    ended = quantmint("gate", "published/r", "--json")
    assert (ended.code, ended.json["verdict"]) == (0, "PASS")


def test_a_second_run_publishes_nothing(orchestra: Any, stages: Any) -> None:
    orchestra.run(*stages())
    release = Path("published/r").resolve()
    before = release.stat().st_ino
    outcome = orchestra.run(*stages())
    assert outcome.steps[-1].cached
    assert Path("published/r").resolve() == release
    assert release.stat().st_ino == before


@pytest.mark.parametrize("loss", ["link", "release", "everything", "page"])
def test_what_was_removed_by_hand_is_published_again(orchestra: Any, stages: Any, loss: str) -> None:
    import shutil

    orchestra.run(*stages())
    whole = published()
    link = Path("published/r")
    match loss:
        case "link":
            link.unlink()
        case "release":
            shutil.rmtree(link.resolve())
        case "everything":
            shutil.rmtree("published")
        case "page":
            (link / "quantmint" / "report.html").unlink()
    outcome = orchestra.run(*stages())
    assert [step.planned.key for step in outcome.steps if not step.cached] == ["publish"]
    assert published() == whole


def test_a_run_does_not_undo_a_rollback(orchestra: Any, stages: Any, quantmint: Any) -> None:
    first_tag = orchestra.run(*stages(1)).entry("publish").record.result["tag"]
    first = published()
    orchestra.run(*stages(2))
    second = published()
    assert second != first
    assert quantmint("release", "rollback", "published/r", first_tag).code == 0
    assert published() == first
    for redo in ([], ["publish"]):
        outcome = orchestra.run(*stages(2), redo=redo)
        assert outcome.steps[-1].cached == (not redo)
        assert published() == first
    assert "readers get another release, which stays so; `quantmint release rollback" in orchestra.lines[-2]
    orchestra.run(*stages(1))
    assert orchestra.ran == ["quantize", "inspect", "gate", "report", "package"] * 2


def test_inputs_that_moved_there_and_back(orchestra: Any, stages: Any, quantmint: Any) -> None:
    """A release that is there is left as it is: what to type is said."""
    tags = [orchestra.run(*stages(option)).entry("publish").record.result["tag"] for option in (1, 2)]
    assert orchestra.run(*stages(1)).steps[-1].cached
    assert quantmint("publish", "r.yaml", "--dry-run").out.rstrip().endswith("nothing to do, it is there")
    entry = orchestra.run(*stages(1), redo=["publish"]).entry("publish")
    assert [(one.current, one.again) for one in published_in(entry)] == [(False, True)]
    assert f"`quantmint release rollback published/r {tags[0]}` gives them this one" in orchestra.lines[-2]
    assert Path("published/r").resolve().name == tags[1]


def test_a_byte_that_flips_after_the_verdict(orchestra: Any, stages: Any) -> None:
    orchestra.run(*stages(1))
    old = published()
    new = stages(2)
    orchestra.run(*new[:-1])
    [quantize] = orchestra.plan(*new)[:1]
    path = orchestra.setting.store.find("quantize", quantize.fingerprint).file("checkpoint/model.safetensors")
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a failing disk would: no trace
    with pytest.raises(StageError, match=r"model\.safetensors is not what was judged") as refused:
        orchestra.run(*new)
    assert "--redo quantize" in str(refused.value.hint)
    assert published() == old
    assert orchestra.last_run.exit_code == 5

    orchestra.run(*new, redo=["quantize"])
    assert published() != old


def edited_to_pass(folder: Path) -> None:
    path = folder / "gate.json"
    record = json.loads(path.read_text())
    record["verdict"] = "PASS"
    for finding in record["findings"]:
        finding["verdict"] = "PASS"
    path.write_text(json.dumps(record))


def edited_to_shine(folder: Path) -> None:
    path = folder / "gate.json"
    record = json.loads(path.read_text())
    record["accuracy"][0]["candidate"] = 1.0
    path.write_text(json.dumps(record))


def better_scores(folder: Path) -> None:
    baseline, candidate = folder / "samples" / "t.baseline.json.gz", folder / "samples" / "t.candidate.json.gz"
    candidate.write_bytes(baseline.read_bytes())


def no_scores(folder: Path) -> None:
    (folder / "samples" / "t.candidate.json.gz").unlink()


@pytest.mark.parametrize("numbers", ["FAIL", "INCONCLUSIVE", "INVALID"])
def test_a_record_that_was_edited_to_pass(orchestra: Any, stages: Any, numbers: str) -> None:
    with pytest.raises(StageError, match=f"the gate's record says {numbers}, only a PASS is published"):
        orchestra.run(*stages(numbers=numbers, after=edited_to_pass))
    assert published() is None


def test_a_pass_with_figures_that_were_edited(orchestra: Any, stages: Any) -> None:
    with pytest.raises(StageError, match=r"is not what its numbers say\. Other figures than recorded: accuracy"):
        orchestra.run(*stages(after=edited_to_shine))
    assert published() is None


@pytest.mark.parametrize("tamper", [better_scores, no_scores])
def test_scores_that_were_exchanged(orchestra: Any, stages: Any, tamper: Callable[[Path], None]) -> None:
    with pytest.raises(StageError, match="the gate's record cannot be judged again"):
        orchestra.run(*stages(numbers="FAIL", after=tamper))
    assert published() is None


def test_the_verdict_of_another_checkpoint(orchestra: Any, stages: Any) -> None:
    orchestra.run(*stages(1))
    old = published()
    with pytest.raises(StageError, match="the gate judged another checkpoint"):
        orchestra.run(*stages(2, artefact="cd" * 32))
    assert published() == old


def test_what_others_put_there(orchestra: Any, stages: Any) -> None:
    Path("published/r").mkdir(parents=True)
    Path("published/r/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="move it away"):
        orchestra.run(*stages())
    assert published() == {"mine.txt": b"mine"}


@pytest.mark.parametrize("fatal", [1, 3, 6, 9])
def test_killed_while_it_publishes(
    orchestra: Any, stages: Any, forked: Any, code_of: Any, die: Callable[[], None], fatal: int
) -> None:
    orchestra.run(*stages(1))
    old = published()
    new = stages(2)

    def attempt() -> None:
        calls = 0
        original = os.fsync

        def fsync(fd: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == fatal:
                die()
            original(fd)

        orchestra.run(*new[:-1])
        os.fsync = fsync
        orchestra.run(*new)

    assert code_of(forked(attempt)) == -signal.SIGKILL
    assert published() == old
    outcome = orchestra.run(*new)
    assert [step.planned.key for step in outcome.steps if not step.cached] == ["publish"]
    assert published() != old
    assert [path.name for path in Path("published").rglob("*") if "partial" in path.name] == []
