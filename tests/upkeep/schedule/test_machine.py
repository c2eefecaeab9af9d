"""Timers and services by systemd's own reading; crontabs by Debian's own check and what the shell makes of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.times import next_times
from quantmint.pipeline.upkeep.schedule.export import Export, crontab, on_calendar, units
from tests.upkeep.schedule.conftest import Written

ANALYZE = shutil.which("systemd-analyze")
MANAGER = Path("/lib/systemd/systemd")
CRONTAB = shutil.which("crontab")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
NOW = datetime(2026, 11, 21, 17, 38, 21, tzinfo=UTC)
BERLIN = "Europe/Berlin"
_COUNT = 6
_ENTRY = re.compile(r"(?m)^((?:\S+ ){5})(.*)$")
EXPRESSIONS = (
    "0 3 * * 6", "0 3 1 * 6", "*/15 9-17 * * 1-5", "0 0 31 * *", "5/20 */6 * * *", "0 12 * * 5-7",
    "0 12 */2 * 1", "0 12 1-31 * 1", "59 23 31 12 sun", "0 4 1,15 JAN-MAR,oct mon,wed-fri", "0 12 1-7 * *",
    "4-6/10 12 5 */5 0-6/2", "31 */7 * * 6", "30,34,37 */9 * * *", "13,14,54 */10 * * *", "* * * * *", "7 4 * 2 *",
)  # fmt: skip


def export(program: tuple[str, ...] = ("/bin/true",), **more: Any) -> Export:
    return Export(program=program, made_by="quantmint schedule export --systemd", **more)


def elapses(lines: Iterable[str], after: datetime) -> dict[str, list[datetime]]:
    """When systemd's timers elapse, by their OnCalendar lines: one process for all."""
    lines = tuple(dict.fromkeys(lines))
    assert ANALYZE is not None
    base = after.strftime("%Y-%m-%d %H:%M:%S UTC")
    told = subprocess.run(
        [ANALYZE, "calendar", f"--base-time={base}", f"--iterations={_COUNT}", *lines],
        env={"PATH": os.environ["PATH"], "TZ": "UTC", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    blocks = told.strip().split("\n\n")
    assert len(blocks) == len(lines), told
    stamp = re.compile(r"(?:Next elapse|Iter\. #\d+): \w{3} (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC")
    return {
        line: [datetime.fromisoformat(text).replace(tzinfo=UTC) for text in stamp.findall(block)]
        for line, block in zip(lines, blocks, strict=True)
    }


@needs_systemd
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", BERLIN])
def test_timers_elapse_when_cron_would_run(zone: str) -> None:
    lines = {expression: on_calendar(expression, zone) for expression in EXPRESSIONS}
    known = elapses((line for some in lines.values() for line in some), NOW)
    for expression, some in lines.items():
        theirs = sorted({time for line in some for time in known[line]})[:_COUNT]
        ours = [time.astimezone(UTC) for time in next_times(expression, zone, NOW, _COUNT)]
        assert theirs == ours, (expression, some)


def put(files: dict[str, str], folder: Path) -> list[str]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / name) for name in files]


def verified(paths: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze verify`, which exits with 0 also after a warning: what it says counts, too."""
    assert ANALYZE is not None
    environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(folder), "HOME": str(folder)}
    return subprocess.run([ANALYZE, "verify", *options, *paths], env=environment, capture_output=True, text=True)


@needs_systemd
def test_systemd_verifies_the_units(written: Written, tmp_path: Path) -> None:
    item = written("0 3 1 * 6", BERLIN)
    more = {"directory": f"{tmp_path}/a b 5%", "environment_file": f"{tmp_path}/to ken", "store": "/srv/it's $HOME"}
    made = export(variables={"QUANTMINT_VLLM": '/opt/"v" $x 5%'}, **more)
    files = units(item, made)
    paths = put(files, tmp_path)
    done = verified(paths, tmp_path, "--user")
    told = [line for line in done.stderr.splitlines() if "quantmint-" in line]
    assert (done.returncode, told) == (0, [])
    # It would have said so.
    broken = tmp_path / "quantmint-mine.timer"
    broken.write_text(broken.read_text(encoding="utf-8").replace("OnCalendar=", "OnCalendar=Xyz "), encoding="utf-8")
    assert "quantmint-mine" in verified(paths, tmp_path, "--user").stderr


@needs_systemd
def test_systemd_reads_the_words_that_were_meant(written: Written, tmp_path: Path) -> None:
    """A manager loads the service (without starting anything) and shows what it would run, in quotes of its own."""
    if not MANAGER.is_file() or (os.getuid() == 0 and shutil.which("setpriv") is None):
        pytest.skip("no systemd that could load a unit")
    item = written("0 3 * * 6")
    words = ("/bin/echo", "a b", "100%", "$HOME", "${HOME}", 'q"uo\\te', "it's", ";", "%n", "äö", "\\x41", "")
    made = export(words, directory="/tmp/5% b", variables={"A": "x y%n", "B": "q\"$h \\ '"}, environment_file="/a b/%t")
    text = loaded(units(item, made), tmp_path)
    (command,) = re.findall(r"Command Line: (.*)", text)
    assert shown(command) == [*_expanded(words), "requantize", "mine", "--due"]
    assert "WorkingDirectory: /tmp/5% b\n" in text
    assert "Environment: A=x y%n\n" in text
    assert "Environment: B=q\"$h \\ '\n" in text
    assert "EnvironmentFile: /a b/%t\n" in text


def _expanded(words: Iterable[str]) -> list[str]:
    """What the manager holds: variables are put in when the process starts, and $$ becomes $ then."""
    return [word.replace("$", "$$") for word in words]


def loaded(files: dict[str, str], folder: Path) -> str:
    put(files, folder)
    running = folder / "run"
    running.mkdir()
    running.chmod(0o777)
    argv = [str(MANAGER), "--user", "--test", "--no-pager", "--unit=quantmint-mine.service"]
    if os.getuid() == 0:  # which a manager of users refuses to test for
        only = ("--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+dac_read_search")
        argv = ["setpriv", *only, "--ambient-caps=+dac_read_search", *argv]
    environment = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(running), "HOME": str(running)}
    environment |= {"SYSTEMD_UNIT_PATH": f"{folder}:", "SYSTEMD_LOG_TARGET": "console"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no systemd that could load a unit: {done.stderr.strip()[-200:]}")
    (block,) = re.findall(r"-> Unit quantmint-mine\.service:\n((?:\t\t.*\n)*)", done.stdout)
    return str(block)


def shown(line: str) -> list[str]:
    """systemd's own way to print words: like a shell's double quotes, with backslashes."""
    found = re.findall(r'"((?:\\.|[^"\\])*)"|(\S+)', line)
    return [plain or re.sub(r"\\(.)", r"\1", quoted) for quoted, plain in found]


def test_a_units_mission(written: Written) -> None:
    files = units(written("0 3 * * 6", BERLIN), export(directory="/srv/models"))
    assert list(files) == ["quantmint-mine.service", "quantmint-mine.timer"]
    service, timer = files.values()
    assert "Persistent=yes\n" in timer
    assert "OnCalendar=Sat *-*-* 03:00:00 Europe/Berlin\n" in timer
    assert "ExecStart=/bin/true requantize mine --due\n" in service
    assert "User=" not in service
    # What would take the GPUs away, the memory of compiled kernels, or the folder where Ray's processes meet.
    for directive in (
        "PrivateDevices",
        "DevicePolicy",
        "MemoryDenyWriteExecute",
        "DynamicUser",
        "ProtectHome",
        "PrivateTmp",
    ):
        assert directive not in service
    assert files == units(written("0 3 * * 6", BERLIN), export(directory="/srv/models"))


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
        (sys.executable, "-c", script, str(seen), "$(exit 3)", "%n;", "a'b"),
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


def test_what_cannot_be_said_is_refused(written: Written) -> None:
    for zone, machine in ((BERLIN, "UTC"), ("UTC", BERLIN), ("Asia/Kolkata", "UTC")):
        with pytest.raises(UserError, match=f"only knows this machine's time zone, {machine}"):
            crontab([written("0 3 * * 6", zone)], export(), machine_zone=machine)
    assert crontab([written("0 3 * * 6", "Etc/UTC")], export(), machine_zone="UTC")


def test_a_line_of_a_crontab(written: Written) -> None:
    files = crontab([written("0 3 * * 6")], export(), machine_zone="UTC")
    assert list(files) == ["quantmint.crontab"]
    assert "\n0 3 * * 6 exec /bin/true requantize mine --due --no-wait\n" in files["quantmint.crontab"]
