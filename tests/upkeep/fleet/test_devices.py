from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.upkeep.fleet.devices import Devices, devices_of, free_of, take

UUIDS = "GPU-aaaa\nGPU-bbbb\nGPU-cccc\nGPU-dddd\n"


def machine(tmp_path: Path, **environ: str) -> Host:
    """A machine with four NVIDIA GPUs."""
    return Host(root=tmp_path, environ=environ, run=lambda argv: UUIDS if argv[0] == "nvidia-smi" else None)


def test_a_machine_without_accelerators(tmp_path: Path) -> None:
    none = devices_of(Host(root=tmp_path, environ={}, run=lambda _: None))
    assert none == Devices(None, {})
    assert none.environment({"PATH": "x", "CUDA_VISIBLE_DEVICES": "3"}, ()) == {
        "PATH": "x",
        "CUDA_VISIBLE_DEVICES": "3",
    }


def test_devices_are_the_machines_whatever_variables_leave(tmp_path: Path) -> None:
    assert list(devices_of(machine(tmp_path)).values) == [0, 1, 2, 3]
    some = devices_of(machine(tmp_path, CUDA_VISIBLE_DEVICES="3, GPU-bb"))
    assert some.values == {3: "3", 1: "GPU-bb"}


def test_a_child_sees_its_devices_by_one_variable() -> None:
    ours = {"PATH": "x", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "4,5"}
    amd = Devices("HIP_VISIBLE_DEVICES", {4: "0", 5: "1"})
    assert amd.environment(ours, (5,)) == {"PATH": "x", "ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}
    assert amd.environment(ours, ())["HIP_VISIBLE_DEVICES"] == "-1", "a recipe for a CPU sees none"


def test_all_or_none(tmp_path: Path) -> None:
    first = take(tmp_path, (1,))
    assert first is not None
    assert free_of(tmp_path, (0, 1, 2)) == (0, 2)
    assert take(tmp_path, (0, 1, 2)) is None
    assert free_of(tmp_path, (0, 1, 2)) == (0, 2), "what was taken on the way is given back"
    first.close()
    second = take(tmp_path, (2, 0, 1))
    assert second is not None
    assert free_of(tmp_path, (0, 1, 2)) == ()
    second.close()
    assert list((tmp_path / "refresh" / "devices").iterdir()) == []


def test_a_dead_fleets_device_is_free_at_once(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from quantmint.pipeline.upkeep.fleet.devices import take\n"
    code += "assert take(Path(sys.argv[1]), (0,)); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path.cwd(), env=os.environ).returncode == 9
    assert free_of(tmp_path, (0,)) == (0,)
    held = take(tmp_path, (0,))
    assert held is not None
    held.close()
