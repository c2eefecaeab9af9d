"""systemd's own reading of the timers and services: its times, its checks, its words of a command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.schedule.cron import doubled, follows_clock, next_times, skipped
from pipeline.schedule.exported import Export
from pipeline.schedule.expression import InexpressibleError
from pipeline.schedule.recipes import Scheduled
from pipeline.schedule.systemd import on_calendar, units
from tests.schedule.conftest import Written
from tests.schedule.expressions import expressions

ANALYZE = shutil.which("systemd-analyze")
MANAGER = Path("/lib/systemd/systemd")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
NOW = datetime(2026, 11, 21, 17, 38, 21, tzinfo=UTC)
BERLIN = "Europe/Berlin"
_COUNT = 6
# As systemd's own steps, it gives up on these in a zone with summer time.
STEPS = ("4-6/10 12 5 */5 0-6/2", "31 */7 * * 6", "30,34,37 */9 * * *", "13,14,54 */10 * * *")


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


def union(lines: Iterable[str], known: dict[str, list[datetime]]) -> list[datetime]:
    return sorted({time for line in lines for time in known[line]})[:_COUNT]


@needs_systemd
@pytest.mark.parametrize(
    ("zone", "after"),
    [
        ("UTC", NOW),
        ("Asia/Kolkata", NOW),
        (BERLIN, NOW),
        (BERLIN, datetime(2027, 3, 27, 12, tzinfo=UTC)),
        (BERLIN, datetime(2027, 10, 30, 12, tzinfo=UTC)),
    ],
)
def test_timers_elapse_when_cron_would_run(zone: str, after: datetime) -> None:
    translated, refused = {}, []
    for expression in (*expressions(60), *STEPS):
        floating = follows_clock(expression)
        if (doubled if floating else skipped)(expression, zone, after - timedelta(days=1)):
            continue  # refused by `export`, and held against below
        try:
            translated[expression] = on_calendar(expression, zone)
        except InexpressibleError:
            refused.append(expression)
    assert len(translated) > 40
    assert not refused
    known = elapses((line for lines in translated.values() for line in lines), after)
    for expression, lines in translated.items():
        ours = [time.astimezone(UTC) for time in next_times(expression, zone, after, _COUNT)]
        assert union(lines, known) == ours, (expression, lines)


@needs_systemd
def test_what_is_refused_is_different() -> None:
    """Were systemd to do what cron does, the refusals would have no reason any more."""
    skips, once, fixed = "30 2 * * *", "30 * * * *", "30 2 * * 0"
    spring, autumn = datetime(2027, 3, 27, 23, tzinfo=UTC), datetime(2027, 10, 30, 23, 45, tzinfo=UTC)
    seen: dict[str, list[str]] = defaultdict(list)
    for expression, after in ((skips, spring), (once, autumn), (fixed, autumn), (once, spring)):
        lines = on_calendar(expression, BERLIN)
        theirs = union(lines, elapses(lines, after))[:2]
        ours = [time.astimezone(UTC) for time in next_times(expression, BERLIN, after, 2)]
        seen[expression].append("same" if theirs == ours else f"{theirs[0]:%d %H:%M}, {theirs[1]:%d %H:%M}")
    # A skipped time is left out; the second of a doubled hour is left out, though not for what names its hour.
    assert seen == {skips: ["29 00:30, 30 00:30"], once: ["31 00:30, 31 02:30", "same"], fixed: ["same"]}


def test_days_from_both_ends_at_once() -> None:
    with pytest.raises(InexpressibleError, match="at once"):
        on_calendar("0 0 */2 * 5L", "UTC")


@pytest.mark.parametrize("expression", ["30 2 * * *", "30 * * * *"])
def test_clock_changes_are_refused_unless_accepted(written: Written, expression: str) -> None:
    item = written(expression, BERLIN)
    with pytest.raises(UserError, match=r"clock change of 2027-.* in Europe/Berlin") as refused:
        units(item, export())
    assert "--accept clock-change" in str(refused.value)
    assert "OnCalendar=" in units(item, export(accepted=frozenset({"clock-change"})))["quantmint-mine.timer"]
    units(written(expression, "UTC"), export())
    units(written("0 3 * * *", BERLIN), export())


def export(program: tuple[str, ...] = ("/bin/true",), **more: object) -> Export:
    return Export(program=program, made_by="quantmint schedule export --systemd", now=NOW, **more)  # type: ignore[arg-type]


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
@pytest.mark.parametrize("system", [False, True])
def test_systemd_verifies_the_units(written: Written, tmp_path: Path, system: bool) -> None:
    item = written("0 3 1 * 6", BERLIN)
    more = {"directory": f"{tmp_path}/a b 5%", "environment_file": f"{tmp_path}/to ken", "store": "/srv/it's $HOME"}
    made = export(variables={"QUANTMINT_VLLM": '/opt/"v" $x 5%'}, **more)
    files = units(item, made, system=system, run_as="root" if system else None)
    paths = put(files, tmp_path)
    done = verified(paths, tmp_path, "--system" if system else "--user")
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
    files = units(written("0 3 * * 6", BERLIN, missed="skip"), export(directory="/srv/models"))
    assert list(files) == ["quantmint-mine.service", "quantmint-mine.timer"]
    service, timer = files.values()
    assert "Persistent=no\n" in timer
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
    assert files == units(written("0 3 * * 6", BERLIN, missed="skip"), export(directory="/srv/models"))


@pytest.mark.parametrize(("system", "run_as"), [(True, None), (False, "root"), (True, "no body"), (True, "a\nb")])
def test_whose_process_it_is(written: Written, system: bool, run_as: str | None) -> None:
    item: Scheduled = written("0 3 * * 6")
    with pytest.raises(UserError, match="--run-as"):
        units(item, export(), system=system, run_as=run_as)
