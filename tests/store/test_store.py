from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.entries import Entry, EntryRecord
from quantmint.pipeline.store.tree import Store

MIB = 1 << 20
Make = Callable[..., Entry]
PAYLOAD: dict[str, object] = {"stage": "quantize", "version": 1, "inputs": {}, "recipe": {"scheme": "fp8"}}
DIGEST = fingerprint(PAYLOAD)


def commit_pieces(store: Store) -> None:
    with store.working("quantize", DIGEST) as work:
        if work.existing is None:
            for name in ("one", "two"):
                if not (work.path / name).exists():
                    (work.path / f"{name}.tmp").write_text(name)
                    os.rename(work.path / f"{name}.tmp", work.path / name)  # noqa: PTH104  (a step that is counted)
            work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})


def in_quarantine(store: Store) -> list[Path]:
    folder = store.root / "quarantine"
    return list(folder.iterdir()) if folder.exists() else []


def test_an_entry_is_found_again(store: Store, make: Make) -> None:
    made = make(store)
    found = store.find(made.stage, made.fingerprint)
    assert found == made
    found.verify()
    assert found.file("sub/b.bin").read_bytes() == b"beta" * 10
    assert found.record.result == {"n": 1}
    assert found.record.inputs == {"source": "ab" * 32}
    assert sorted(p.name for p in store.root.iterdir()) == ["CACHEDIR.TAG", "quantize"]
    assert [p.name for p in (store.root / "quantize").iterdir()] == [made.fingerprint]


def test_the_fields_of_a_record(store: Store, make: Make) -> None:
    entry = make(store)
    data = json.loads((entry.path / "record.json").read_bytes())
    assert EntryRecord.from_json(entry.record.to_json()) == entry.record
    assert data["files"]["a.bin"]["size"] == 5
    assert fingerprint(data["payload"]) == entry.fingerprint == data["fingerprint"]
    assert data["started"] <= data["finished"]
    assert data["finished"].endswith("Z")
    assert str(store.root) not in json.dumps(data)


def test_equal_outputs_have_equal_digests(tmp_path: Path, make: Make) -> None:
    one, other = make(Store(tmp_path / "1")), make(Store(tmp_path / "2"))
    assert one.digest == other.digest
    assert one.digest != make(Store(tmp_path / "3"), files={"a.bin": b"alphb"}).digest


@pytest.mark.parametrize(("stage", "digest"), [("runs", DIGEST), ("../x", DIGEST), ("", DIGEST), ("quantize", "abc")])
def test_names_that_would_leave_the_store_are_refused(store: Store, stage: str, digest: str) -> None:
    with pytest.raises(ValueError, match=r"fingerprint|name of a stage"):
        store.find(stage, digest)


def corrupt_small(entry: Entry) -> None:
    path = entry.file("small")
    times = path.stat()
    path.write_bytes(b"x" + path.read_bytes()[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def corrupt_large(entry: Entry) -> None:
    with entry.file("large").open("r+b") as file:
        file.seek(MIB)
        file.write(b"x")


def truncate(entry: Entry) -> None:
    os.truncate(entry.file("large"), MIB)


def remove(entry: Entry) -> None:
    entry.file("small").unlink()


def break_record(entry: Entry) -> None:
    (entry.path / "record.json").write_text('{"schema": 1, "stage"')


def edit_record(**changes: object) -> Callable[[Entry], None]:
    def edit(entry: Entry) -> None:
        path = entry.path / "record.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))

    return edit


OTHER_PAYLOAD = {**PAYLOAD, "version": 2}
WHOLE = {"size": 0, "sha256": "0" * 64, "mtime_ns": 0}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (corrupt_small, "small has other bytes"),
        (corrupt_large, "large has other bytes"),
        (truncate, "large has 1,048,576 bytes, its record says 2,097,152"),
        (remove, "small is missing"),
        (break_record, "not JSON"),
        (edit_record(schema=99), "its schema is 99"),
        (edit_record(files={"small": {"size": 1}}), "wrong shape"),
        (edit_record(files={"../small": WHOLE}), "no name inside an entry"),
        (edit_record(payload=OTHER_PAYLOAD), "has the fingerprint"),
        (edit_record(payload=OTHER_PAYLOAD, fingerprint=fingerprint(OTHER_PAYLOAD)), "its record is of quantize/"),
    ],
)
def test_a_damaged_entry_is_quarantined(
    store: Store, make: Make, warnings: list[str], damage: Callable[[Entry], None], reason: str
) -> None:
    entry = make(store, files={"small": b"abc", "large": b"a" * 2 * MIB})
    damage(entry)
    left = sorted(path.name for path in entry.path.iterdir())
    assert store.find(entry.stage, entry.fingerprint) is None
    (aside,) = in_quarantine(store)
    assert aside.name.startswith(f"quantize-{entry.fingerprint[:12]}-")
    assert sorted(path.name for path in aside.iterdir()) == left
    (warning,) = warnings
    assert reason in warning
    assert str(aside) in warning
    assert not entry.path.exists()
    again = make(store, files={"small": b"abc", "large": b"a" * 2 * MIB})
    assert again.digest == entry.digest
    assert store.find(entry.stage, entry.fingerprint) == again


def test_a_large_file_is_read_only_if_its_time_changed(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make(store, files={"small": b"abc", "large": b"a" * 2 * MIB})
    read: list[str] = []

    def noted(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("quantmint.pipeline.store.entries.sha256_of", noted)
    assert store.find(entry.stage, entry.fingerprint) == entry
    assert read == ["small"]
    os.utime(entry.file("large"), ns=(1, 1))
    assert store.find(entry.stage, entry.fingerprint) == entry
    assert read == ["small", "large", "small"]
    assert entry.file("large").stat().st_mtime_ns == entry.record.files["large"].mtime_ns
    assert store.find(entry.stage, entry.fingerprint) == entry
    assert read == ["small", "large", "small", "small"]


def test_verify_reads_everything(store: Store, make: Make) -> None:
    entry = make(store, files={"large": b"a" * 2 * MIB})
    times = entry.file("large").stat()
    corrupt_large(entry)
    os.utime(entry.file("large"), ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.find(entry.stage, entry.fingerprint) == entry
    with pytest.raises(StoreError, match="large has other bytes"):
        entry.verify()


def test_a_good_entry_made_meanwhile_is_not_quarantined(store: Store, make: Make, warnings: list[str]) -> None:
    entry = make(store)
    store.quarantine(entry.stage, entry.fingerprint, "judged long ago", identity=entry.path.stat().st_ino + 1)
    assert store.find(entry.stage, entry.fingerprint) == entry
    assert warnings == []


def test_a_retired_entry_is_made_again(store: Store, make: Make, warnings: list[str]) -> None:
    entry = make(store)
    store.retire(entry)
    assert store.find(entry.stage, entry.fingerprint) is None
    (away,) = (store.root / "trash").iterdir()
    assert (away / "a.bin").exists()
    again = make(store)
    store.retire(entry)
    assert store.find(entry.stage, entry.fingerprint) == again, "not what was to be taken away"
    store.retire(again)
    store.retire(again)
    assert warnings == []


def test_killed_at_every_step_of_a_commit(
    tmp_path: Path, warnings: list[str], killed_at_every_step: Callable[[Callable[[], None]], Iterator[int]]
) -> None:
    store = Store(tmp_path / "store", on_warning=warnings.append)
    outcomes = set()
    for _ in killed_at_every_step(lambda: commit_pieces(store)):
        entry = store.find("quantize", DIGEST)
        outcomes.add(entry is None)
        if entry is not None:
            entry.verify()
        commit_pieces(store)  # the same command again
        finished = store.find("quantize", DIGEST)
        assert finished is not None
        finished.verify()
        assert list(finished.record.files) == ["one", "two"]
        shutil.rmtree(store.root)
    assert outcomes == {True, False}
    assert warnings == []


def test_a_final_folder_without_record_becomes_the_working_folder(store: Store, warnings: list[str]) -> None:
    half = store.entry_path("quantize", DIGEST)
    half.mkdir(parents=True)
    (half / "one").write_text("kept")
    assert store.find("quantize", DIGEST) is None
    assert half.exists()
    with store.working("quantize", DIGEST) as work:
        assert (work.path / "one").read_text() == "kept"
        assert not half.exists()
    assert warnings == []


def test_the_working_folder_outlives_an_exception(store: Store) -> None:
    def interrupted() -> None:
        with store.working("quantize", DIGEST) as work:
            (work.path / "shard-1").write_text("done")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in (store.root / "quantize").iterdir()] == [f"{DIGEST}.work"]
    with store.working("quantize", DIGEST) as work:
        assert (work.path / "shard-1").read_text() == "done"
        work.discard()
        assert list(work.path.iterdir()) == []


def test_a_working_folder_without_a_file_does_not_outlive_a_refusal(store: Store) -> None:
    def refused() -> None:
        with store.working("sensitivity", DIGEST) as work:
            (work.path / "layers").mkdir()
            raise ValueError("too few tokens")

    with pytest.raises(ValueError, match="too few"):
        refused()
    assert list((store.root / "sensitivity").iterdir()) == []


def test_known_digests_are_trusted_and_sizes_are_checked(store: Store) -> None:
    started = datetime.now(UTC)
    with store.working("quantize", DIGEST) as work:
        (work.path / "shard").write_bytes(b"abc")
        with pytest.raises(StoreError, match="has 3 bytes, but 4 were written"):
            work.commit(payload=PAYLOAD, result={}, started=started, tools={}, hashed={"shard": (4, "0" * 64)})
        with pytest.raises(StoreError, match="gone was announced"):
            work.commit(payload=PAYLOAD, result={}, started=started, tools={}, hashed={"gone": (4, "0" * 64)})
        entry = work.commit(payload=PAYLOAD, result={}, started=started, tools={}, hashed={"shard": (3, "0" * 64)})
    assert entry.record.files["shard"].sha256 == "0" * 64


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"payload": {**PAYLOAD, "version": 2}}, "fingerprint"),
        ({"payload": {"stage": "quantize"}}, "needs the keys"),
        ({"payload": {**PAYLOAD, "inputs": {"source": "abc"}}}, "64 hex digits"),
        ({"result": {"x": float("nan")}}, "plain JSON"),
    ],
)
def test_a_commit_that_contradicts_itself(store: Store, change: dict[str, object], word: str) -> None:
    arguments = {"payload": PAYLOAD, "result": {}, "started": datetime.now(UTC), "tools": {}, **change}
    with store.working("quantize", DIGEST) as work:
        (work.path / "shard").touch()
        with pytest.raises(ValueError, match=word):
            work.commit(**arguments)  # type: ignore[arg-type]
        assert (work.path / "shard").exists()


def test_symbolic_links_are_refused(store: Store) -> None:
    with store.working("quantize", DIGEST) as work:
        (work.path / "x").symlink_to("/dev/null")
        with pytest.raises(StoreError, match="neither a file nor a folder"):
            work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})


def test_a_lost_lock_stops_the_commit(store: Store) -> None:
    with store.working("quantize", DIGEST) as work:
        (work.path / "shard").touch()
        work.lock.path.unlink()
        with pytest.raises(StoreError, match="taken over"):
            work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
    assert store.find("quantize", DIGEST) is None


ENTER = """
from pathlib import Path
from quantmint.pipeline.store.tree import Store
with Store(Path(sys.argv[1])).working("quantize", sys.argv[2], on_wait=lambda who: print(who, flush=True)) as work:
    print(work.existing is not None and not work.path.exists())
"""


def test_the_loser_of_a_race_finds_the_result(store: Store, python: list[str]) -> None:
    with store.working("quantize", DIGEST) as work:
        (work.path / "one").touch()
        command = [*python, ENTER, str(store.root), DIGEST]
        loser = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert loser.stdout is not None
        assert loser.stdout.readline().startswith(f"process {os.getpid()} on ")
        work.commit(payload=PAYLOAD, result={}, started=datetime.now(UTC), tools={})
    assert loser.communicate(timeout=60)[0] == "True\n"
    assert loser.returncode == 0
