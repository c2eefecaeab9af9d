"""What is counted of names and docstrings, and that no room gets worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import wording


def test_no_room_exceeds_its_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    assert wording.main([]) == 0, capsys.readouterr().out


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "room"
    room.mkdir()
    parameters = ", ".join(f"a{number}" for number in range(9))
    (room / "a.py").write_text(
        '"""What it is."""\n'
        f'def f({parameters}):\n    """Return a sum."""\n    found = 1\n'
        "    for each in ():\n        pass\n    return found\n"
        "class Thing:\n    pass\n"
    )
    (room / "b.py").write_text('"""Count."""\nclass Thing:\n    pass\n')
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    monkeypatch.setattr(wording, "_ROOMS", ("room",))
    assert [kind for kind, _ in wording.findings("room")] == ["questions", "wide", "names", "names"]
    assert wording.counts()["room"] == wording.Counts(questions=1, names=2, long=0, wide=1, classes=1)
