"""A Slurm of one node on this machine, with two made-up GPUs, that ends with its block; nothing is system-wide."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
GresTypes=gpu
NodeName=localhost CPUs=2 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there is none here."""
    absent = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    return f"found no {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else None


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Its configuration, for SLURM_CONF. RuntimeError with what the daemons said where it does not start."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    ports = dict(zip(("controller", "node"), free_ports(2), strict=True))
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, user=getpass.getuser(), **ports), encoding="utf-8")
    devices = "".join(f"NodeName=localhost Name=gpu File={device}\n" for device in ("/dev/zero", "/dev/full"))
    (folder / "gres.conf").write_text(devices, encoding="utf-8")
    env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(config)}
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    with ExitStack() as stack:
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files.values()]
        stack.enter_context(_daemon(munge, folder, env))
        until(lambda: (folder / "munge.socket").exists(), folder)
        stack.enter_context(_daemon(["slurmctld", "-D", "-c", "-f", str(config)], folder, env))
        stack.enter_context(_daemon(["slurmd", "-D", "-f", str(config), "-N", "localhost"], folder, env))
        stack.callback(subprocess.run, ["scancel", "--user", getpass.getuser()], env=env, capture_output=True)
        until(lambda: idle(env), folder)
        yield config


@contextmanager
def _daemon(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()


def idle(env: dict[str, str]) -> bool:
    """Whether the node waits for a job."""
    command = ["sinfo", "-h", "-o", "%T"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30).stdout == "idle\n"


def until(holds: Callable[[], bool], folder: Path, seconds: float = 60) -> None:
    """Wait until it holds; RuntimeError with what the daemons said where it does not."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            said = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.out"))
            raise RuntimeError(f"still waiting:\n{said}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
