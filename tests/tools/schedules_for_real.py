"""Exported schedules run by a real cron and a real systemd, in namespaces of their own. By hand, as root, two minutes.

    sudo python -m tests.tools.schedules_for_real [cron] [systemd]

Each scheduler sees its own processes, mounts and control groups: the machine's crontabs and units are neither read nor
changed, and everything ends with the scheduler. A recipe for every minute is exported by the command line, with a
folder, a variable and a token that need quoting. What is run is a stand-in that writes down how it was called.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WAIT_S = 90
_RECIPE = """\
name: mine
source: {folder: model}
quantization: {scheme: ptpc_fp8}
gate: {throughput: {min_ratio: null}}
refresh: {schedule: '* * * * *', timezone: UTC, missed: skip}
publish: {folder: published, licence: {id: apache-2.0}}
"""
_STAND_IN = """\
import json, os, sys
seen = {"argv": sys.argv[1:], "cwd": os.getcwd(), "A": os.environ.get("A"), "TOKEN": os.environ.get("HF_TOKEN")}
path = sys.argv[0] + ".seen"
with open(path + ".new", "w") as file:
    json.dump(seen, file)
os.replace(path + ".new", path)
"""
_NAMESPACES = ("unshare", "--fork", "--kill-child", "--pid", "--mount", "--uts", "--ipc", "--mount-proc")
_CRON = """
set -e
mount --make-rprivate /
for folder in /run /var/spool/cron/crontabs /etc/cron.d; do mount -t tmpfs tmpfs "$folder"; done
printf '# nothing of the machine\\n' > /run/crontab && mount --bind /run/crontab /etc/crontab
chgrp crontab /var/spool/cron/crontabs && chmod 1730 /var/spool/cron/crontabs
crontab "$1/quantmint.crontab"
exec cron -f
"""
_SYSTEMD = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/groups && mount -t cgroup2 none /run/groups
mkdir "/run/groups/$2" && echo $$ > "/run/groups/$2/cgroup.procs" && umount /run/groups
mkdir /run/units && cp "$1"/quantmint-* /run/units
printf '[Unit]\\nDefaultDependencies=no\\nWants=quantmint-mine.timer\\n' > /run/units/only.target
for unit in quantmint-mine.timer quantmint-mine.service; do
  mkdir "/run/units/$unit.d"
  printf '[Unit]\\nDefaultDependencies=no\\n' > "/run/units/$unit.d/alone.conf"
done
export container=unshare SYSTEMD_UNIT_PATH=/run/units
# From here on the group is the root of all that systemd sees and makes.
exec unshare --cgroup bash -c '
  umount -l /sys/fs/cgroup || true
  mount -t cgroup2 none /sys/fs/cgroup
  exec /lib/systemd/systemd --system --unit=only.target --log-target=null'
"""
_CLEAN = """
mount -t tmpfs tmpfs /run && mkdir /run/groups && mount -t cgroup2 none /run/groups
while ! find "/run/groups/$2" -depth -type d -exec rmdir {} + 2> /dev/null; do sleep 0.1; done
"""


def main() -> int:
    """Run those that are named, by default both; 0 where each called the command as it was meant."""
    if os.getuid() != 0:
        sys.exit("this makes namespaces with their own mounts, which needs root")
    asked = sys.argv[1:] or ["cron", "systemd"]
    failed = [name for name in asked if not _held(name, *_forms()[name])]
    return 1 if failed else 0


def _forms() -> dict[str, tuple[list[str], str, list[str]]]:
    """How each is exported, what starts it, and the words that its command has more."""
    return {
        "cron": (["--cron", "--machine-timezone", "UTC"], _CRON, ["--no-wait"]),
        "systemd": (["--systemd", "--system", "--run-as", "root"], _SYSTEMD, []),
    }


def _held(name: str, form: list[str], script: str, more: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="quantmint-") as made:
        folder = Path(made) / "it's 5% $HOME"
        (folder / "recipes").mkdir(parents=True)
        (folder / "recipes" / "mine.yaml").write_text(_RECIPE, encoding="utf-8")
        stand_in, tokens = folder / "stand-in.py", folder / "tokens"
        stand_in.write_text(_STAND_IN, encoding="utf-8")
        tokens.write_text("HF_TOKEN=hf_x\n", encoding="utf-8")
        _export(folder, form, [sys.executable, str(stand_in), "100%", "$HOME"], tokens)
        seen = _waited(script, folder, Path(f"{stand_in}.seen"))
    expected = {
        "argv": ["100%", "$HOME", "requantize", "mine", "--due", *more],
        "cwd": str(folder),
        "A": "5% $B",
        "TOKEN": "hf_x",
    }
    print(f"{name}: {'as it was meant' if seen == expected else f'found {seen}, expected {expected}'}")  # noqa: T201
    return seen == expected


def _export(folder: Path, form: list[str], program: list[str], tokens: Path) -> None:

    argv = [sys.executable, "-m", "pipeline", "schedule", "export", *form, "--command", shlex.join(program)]
    argv += ["--env", "A=5% $B", "--environment-file", str(tokens), "--output", str(folder / "out")]
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(argv, cwd=folder, env=here, check=True)


def _waited(script: str, folder: Path, seen: Path) -> Any:
    """What the stand-in wrote, once the scheduler has called it; None where it did not in time."""
    words = ["sh", str(folder / "out"), f"quantmint-{os.getpid()}"]
    shell = [*_NAMESPACES, "bash", "-c", script, *words]
    scheduler = subprocess.Popen(shell, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end and scheduler.poll() is None:
            if seen.exists():
                return json.loads(seen.read_text(encoding="utf-8"))
            time.sleep(0.5)
        return None
    finally:
        os.killpg(scheduler.pid, signal.SIGKILL)
        scheduler.wait()
        if script == _SYSTEMD:
            subprocess.run(["timeout", "20", "unshare", "--mount", "bash", "-c", _CLEAN, *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
