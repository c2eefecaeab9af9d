"""Crontabs: Debian's own syntax check, and what the shell makes of a command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.schedule.crontab import crontab, zone_of_machine
from pipeline.schedule.exported import Export
from tests.schedule.conftest import Written

CRONTAB = shutil.which("crontab")
NOW = datetime(2026, 11, 21, tzinfo=UTC)
_ENTRY = re.compile(r"(?m)^((?:\S+ ){5})(.*)$")


def export(*program: str, **more: Any) -> Export:
    accepted = frozenset({"missed"})
    return Export(program or ("/bin/true",), "quantmint schedule export --cron", NOW, accepted=accepted, **more)


def entries(text: str) -> list[tuple[str, str]]:
    body = "\n".join(line for line in text.splitlines() if not line.startswith(("#", "SHELL=")))
    return [(times.strip(), command) for times, command in _ENTRY.findall(body)]


def checked(text: str) -> subprocess.CompletedProcess[str]:
    """`crontab -n`, which only reads."""
    assert CRONTAB is not None
    return subprocess.run([CRONTAB, "-n", "-"], input=text, capture_output=True, text=True)


@pytest.mark.skipif(CRONTAB is None, reason="no crontab here")
def test_debians_crontab_takes_it(written: Written) -> None:
    if (sound := checked("0 3 * * 6 /bin/true\n")).returncode:
        pytest.skip(f"this crontab cannot check: {sound.stderr.strip()}")
    items = [
        written(expression, name=f"r{number}")
        for number, expression in enumerate(("0 3 * * sat", "*/15 9-17 1,15 JAN-MAR mon-fri", "5/20 0 * * 7"))
    ]
    (text,) = crontab(items, export(directory="/srv/100%/a b"), machine_zone="UTC").values()
    done = checked(text)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert checked(text.replace("0 3 * * 6", "0 3 * * 9")).returncode != 0, "it would have said so"


def test_the_shell_gets_the_words_that_were_meant(written: Written, tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME 5%"
    folder.mkdir()
    (folder / "tokens").write_text("HF_TOKEN='a b'\n", encoding="utf-8")
    seen = tmp_path / "seen.json"
    script = "import json, os, sys; json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], open(sys.argv[1], 'w'))"
    made = export(
        sys.executable, "-c", script, str(seen), "$(exit 3)", "%n;", "a'b",
        directory=str(folder), environment_file=str(folder / "tokens"), variables={"A": "5% $B"}, store="/srv/it's",
    )  # fmt: skip
    (text,) = crontab([written("0 3 * * 6")], made, machine_zone="UTC").values()
    ((_, command),) = entries(text)
    assert re.search(r"(?<!\\)%", command) is None, "cron would cut it there"
    # cron takes away the backslash of an escaped percent sign, and nothing else.
    subprocess.run(["/bin/sh", "-c", command.replace("\\%", "%")], check=True, env={"PATH": os.environ["PATH"]})
    argv, where, environment = json.loads(seen.read_text(encoding="utf-8"))
    assert argv[1:] == ["$(exit 3)", "%n;", "a'b", "requantize", "mine", "--due", "--store", "/srv/it's", "--no-wait"]
    assert where == str(folder)
    assert (environment["A"], environment["HF_TOKEN"]) == ("5% $B", "a b")


def test_times_are_the_machines(written: Written) -> None:
    def times(expression: str, zone: str, machine: str) -> list[str]:
        (text,) = crontab([written(expression, zone)], export(), machine_zone=machine).values()
        return [time for time, _ in entries(text)]

    assert times("0 3 * * sat", "Europe/Berlin", "Europe/Berlin") == ["0 3 * * 6"]
    assert times("0 3 * * sat", "Asia/Kolkata", "UTC") == ["30 21 * * 5"]
    assert times("0 3 * * sat", "UTC", "Etc/UTC") == ["0 3 * * 6"]
    assert times("0 22 * * sat", "UTC", "Asia/Kolkata") == ["30 3 * * 0"]
    for zone, machine in (("Europe/Berlin", "UTC"), ("UTC", "Europe/Berlin"), ("Europe/Berlin", "Europe/Paris")):
        with pytest.raises(UserError, match="not always as far apart"):
            times("0 3 * * sat", zone, machine)
    with pytest.raises(UserError, match="another day"):
        times("0 3 1 * *", "Asia/Kolkata", "UTC")


def test_what_cron_cannot_say(written: Written) -> None:
    plain = Export(("/bin/true",), "", NOW)
    with pytest.raises(UserError, match="missed: run cannot be kept"):
        crontab([written("0 3 * * 6")], plain, machine_zone="UTC")
    crontab([written("0 3 * * 6", missed="skip")], plain, machine_zone="UTC")
    with pytest.raises(UserError, match="not cron's own"):
        crontab([written("0 3 L * *")], export(), machine_zone="UTC")
    with pytest.raises(UserError, match="998 characters"):
        crontab([written("0 3 * * 6")], export(directory="/" + "a" * 1000), machine_zone="UTC")


def test_the_machines_own_crontab(written: Written) -> None:
    files = crontab([written("0 3 * * 6")], export(), machine_zone="UTC", system=True, run_as="quant")
    assert list(files) == ["quantmint"], "cron.d leaves out names with a dot"
    assert "\n0 3 * * 6 quant exec /bin/true requantize mine --due --no-wait\n" in files["quantmint"]


def test_this_machine_has_a_zone() -> None:
    try:
        zone = zone_of_machine()
    except UserError as error:
        pytest.skip(str(error))
    own = Path("/usr/share/zoneinfo") / zone
    if not own.is_file():
        pytest.skip("no zones here to compare with")
    assert own.read_bytes() == Path("/etc/localtime").read_bytes()
