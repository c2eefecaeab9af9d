"""The site on disk: brought up to date, never half, and with the memory that a collected store lacks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.runs import site as building
from quantmint.pipeline.runs.site import build
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store
from tests.checkpoints import GOOD, SMALL, run

Quantmint = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_every_run_has_a_row_with_how_it_ended(store: Store, tmp_path: Path) -> None:
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    run(store.root, "small", SMALL, "2026-01-02T10:00:00Z")
    run(store.root, "broken", None, "2026-01-03T10:00:00Z", error="vLLM did not start")
    run(store.root, "half", None, "2026-01-04T10:00:00Z", unfinished=True)
    run(store.root, "cut", None, "2026-01-05T10:00:00Z", until="inspect")
    rows = build(tmp_path / "site", store)[0]
    assert [(row.recipe, row.status) for row in rows] == [
        ("cut", "NO VERDICT"), ("half", "UNFINISHED"), ("broken", "BROKEN"), ("small", "FAIL"), ("good", "PASS")
    ]  # fmt: skip
    assert rows[0].reasons == ("It was only to run up to inspect.",)
    assert "It still runs, or was killed" in rows[1].reasons[0]
    assert rows[2].reasons == ("vLLM did not start",)
    judged = rows[3].judged
    assert judged is not None
    # facts lost 3.5 points of 1.0 that are accepted; prose 5 % of 2 %.
    assert (judged.worst and judged.worst.task, judged.size_ratio, judged.hardware) == ("facts", 5 / 16, "mi300x")
    assert judged.speed is not None
    assert judged.speed.low <= judged.speed.ratio <= judged.speed.high


def test_what_is_there_is_reused(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    assert build(site, store)[1] == 1
    assert build(site, store)[1] == 0
    run(store.root, "good", GOOD, "2026-01-02T10:00:00Z")
    rows, copied = build(site, store)
    assert (len(rows), copied) == (2, 0)  # the run found everything in the store: one report
    run(store.root, "good", replace(GOOD, lost={"facts": 14, "sums": 6}), "2026-01-03T10:00:00Z")
    assert build(site, store)[1] == 1


def test_a_finished_run_replaces_its_unfinished_row(store: Store, tmp_path: Path) -> None:
    name = run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    path = store.root / "runs" / f"{name}.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "finished": None, "verdict": None, "facts": {}}))
    assert [row.status for row in build(tmp_path / "site", store)[0]] == ["UNFINISHED"]
    path.write_text(json.dumps(whole))
    (row,) = build(tmp_path / "site", store)[0]
    assert (row.status, row.judged is not None) == ("PASS", True)


def test_rows_that_another_site_adds_while_this_one_waits_stay(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, other = tmp_path / "site", Store(tmp_path / "other")
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    run(other.root, "small", SMALL, "2026-01-02T10:00:00Z")
    free = building.Lock

    def taken_by_another(path: Path) -> Lock:
        monkeypatch.setattr(building, "Lock", free)
        build(site, other)
        return free(path)

    monkeypatch.setattr(building, "Lock", taken_by_another)
    assert [row.recipe for row in build(site, store)[0]] == ["small", "good"]
    assert {row["recipe"] for row in json.loads((site / "index.json").read_text())["runs"]} == {"small", "good"}


def test_what_a_first_build_left_that_was_cut_off_is_not_foreign(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name in (".lock", ".lock.0a1b2c3d.probe", "index.json.partial"):
        (site / name).write_text("half")
    (site / ".lock").unlink()
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    assert len(build(site, store)[0]) == 1


def test_what_the_store_forgot_stays(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    build(site, store)
    shutil.rmtree(store.root)
    other = Store(tmp_path / "other")
    run(other.root, "small", SMALL, "2026-01-02T10:00:00Z")
    assert [row.recipe for row in build(site, other)[0]] == ["small", "good"]
    text = (site / "index.html").read_text()
    assert text.count("/report.html") == 4  # the newest of each, and the list of each


def test_a_report_that_is_nowhere_is_not_linked(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    build(site, store)
    shutil.rmtree(site / "reports")
    shutil.rmtree(store.root / "report")
    (row,) = build(site, store)[0]
    assert row.judged is not None  # the figures are known all the same
    assert "report.html" not in (site / "index.html").read_text()


def test_a_report_of_another_version_is_said(store: Store, tmp_path: Path) -> None:
    name = run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    plan = dict(json.loads((store.root / "runs" / f"{name}.json").read_text())["plan"])
    folder = store.root / "report" / plan["report"]
    raw = (folder / "report.json").read_bytes()
    old = raw.replace(b'"baseline_bytes"', b'"baseline_bytez"')
    (folder / "report.json").write_bytes(old)
    record = (folder / "record.json").read_text()
    (folder / "record.json").write_text(
        record.replace(hashlib.sha256(raw).hexdigest(), hashlib.sha256(old).hexdigest())
    )
    (row,) = build(tmp_path / "site", store)[0]
    assert (row.status, row.judged) == ("PASS", None)
    assert "size.baseline_bytes: Field required" in row.reasons[-1]


def test_a_kill_leaves_the_old_index_and_no_half_report(
    store: Store, tmp_path: Path, forked: Callable[..., int], code_of: Callable[[int], int], die: Callable[[], None]
) -> None:
    site = tmp_path / "site"
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    build(site, store)
    before = (site / "index.html").read_bytes()
    run(store.root, "small", SMALL, "2026-01-02T10:00:00Z")

    def killed() -> None:
        copy = shutil.copyfile

        def half(source: Path, target: Path) -> None:
            copy(source, target)
            die()

        building.shutil.copyfile = half  # type: ignore[assignment]
        build(site, store)

    assert code_of(forked(killed)) == -9
    assert (site / "index.html").read_bytes() == before
    assert build(site, store)[1] == 1
    assert not list(site.rglob("*.partial"))
    assert all((folder / "report.html").is_file() for folder in (site / "reports").iterdir())


def test_a_folder_with_other_files_is_left_alone(store: Store, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "index.html").write_text("mine")
    with pytest.raises(UserError, match="found a folder with other files"):
        build(tmp_path / "home", store)
    assert [path.read_text() for path in (tmp_path / "home").iterdir()] == ["mine"]


def test_rows_that_lead_out_of_the_site_are_refused(store: Store, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(store.root, "good", GOOD, "2026-01-01T10:00:00Z")
    build(site, store)
    data = json.loads((site / "index.json").read_text())
    data["runs"][0]["judged"]["page"] = "../../etc"
    (site / "index.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"index.json cannot be read: .*judged.page"):
        build(site, store)


def test_the_command(quantmint: Quantmint, tmp_path: Path) -> None:
    run(Path("store"), "good", GOOD, "2026-01-01T10:00:00Z")
    ended = quantmint("site")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "1 runs, 1 new reports\npage  site/index.html\n"
    told = quantmint("site", "--json").json
    assert (told["copied"], [row["status"] for row in told["runs"]]) == (0, ["PASS"])
    assert Path(told["page"]).is_file()
    assert quantmint("site", "--output", tmp_path / "new", "--store", tmp_path / "none").code == 0
    assert "The store has no runs yet" in (tmp_path / "new" / "index.html").read_text()
