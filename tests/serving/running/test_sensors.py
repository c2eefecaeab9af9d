"""What machines say of themselves: recorded trees of sysfs and procfs, and a stand-in for nvidia-smi on PATH."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.serving.running.sensors import SensorReading, amd_sensor, sensor_for, summarize
from tests.serving.host import trees

SMI = """\
#!/bin/sh
# Two H100s; the first field that is unknown ends it, as nvidia-smi does.
case "$1" in
  *{unknown}*) echo 'Field "{unknown}" is not a valid field to query.'; exit 2;;
  --query-gpu=uuid) printf 'GPU-aaaa\\nGPU-bbbb\\n';;
  --query-gpu=clocks_*_reasons.active) echo 0x0000000000000004;;
  --query-gpu=clocks.sm,*) echo "$@" >> "{asked}"; cat "{rows}";;
  *) exit 2;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a nvidia-smi on PATH that prints these rows; returns the file that its questions go to."""

    def make(rows: str, unknown: str = "no_such") -> Path:
        (tmp_path / "rows").write_text(rows)
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(SMI.format(unknown=unknown, rows=tmp_path / "rows", asked=tmp_path / "asked"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return tmp_path / "asked"

    return make


def test_nvidia_by_its_tool(smi: Callable[..., Path]) -> None:
    smi("1980, 61, 412.55, 0x0000000000000004\n1755, 64, 690.10, 0x0000000000000000\n")
    sensor = sensor_for("cuda", gpus=2, env={})
    assert sensor is not None
    assert sensor() == SensorReading((1980.0, 1755.0), 64.0, pytest.approx(1102.65), ())


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        ("0x0000000000000001", ()),  # idle
        ("0x0000000000000004", ()),  # the power cap: as it should be under load
        ("0x0000000000000020", ("temperature (software slowdown)",)),
        ("0x0000000000000048", ("hardware slowdown", "temperature (hardware slowdown)")),
        ("0x0000000000000088", ("hardware slowdown", "power brake")),
        ("[N/A]", ()),
    ],
)
def test_what_slows_nvidia_down(smi: Callable[..., Path], bits: str, names: tuple[str, ...]) -> None:
    smi(f"[N/A], 61, [Not Supported], {bits}\n")
    sensor = sensor_for("cuda", gpus=1, env={})
    assert sensor is not None
    assert sensor() == SensorReading((), 61.0, None, names)


def test_only_the_gpus_of_the_server_are_asked(smi: Callable[..., Path]) -> None:
    asked = smi("1980, 61, 412.55, 0x0\n")
    for gpus, env in ((2, {"CUDA_VISIBLE_DEVICES": "1"}), (1, {"CUDA_VISIBLE_DEVICES": "GPU-bb,0"})):
        sensor = sensor_for("cuda", gpus=gpus, env=env)
        assert sensor is not None
        assert sensor() is not None
    assert [line.split()[-1] for line in asked.read_text().splitlines()] == ["GPU-bbbb", "GPU-bbbb"]
    assert sensor_for("cuda", gpus=1, env={"CUDA_VISIBLE_DEVICES": ""}) is None


def hwmon(root: Path, card: int, *, mhz: int, junction: int, power: str = "power1_average") -> Path:
    """amdgpu's hwmon of an Instinct card, as its kernel driver names the files."""
    device = f"sys/bus/pci/devices/0000:{0x0C + 8 * card:02x}:00.0"
    at = f"{device}/hwmon/hwmon{card + 3}"
    trees.write(root, f"{at}/name", "amdgpu")
    trees.write(root, f"{at}/freq1_input", mhz * 1_000_000)
    trees.write(root, f"{at}/freq1_label", "sclk")
    for number, (label, degrees) in enumerate((("junction", junction), ("mem", 90)), start=2):
        trees.write(root, f"{at}/temp{number}_label", label)
        trees.write(root, f"{at}/temp{number}_input", degrees * 1000)
    trees.write(root, f"{at}/{power}", 612_000_000)
    return root / device


def limiters(device: Path, *counts: int, revision: tuple[int, int] = (1, 6)) -> None:
    """gpu_metrics: the header, 12 bytes of temperatures and power, 16 of counters, the accumulators."""
    body = struct.pack("<6H2Q6I", 61, 70, 55, 612, 99, 40, 1, 2, 1000, *counts)
    (device / "gpu_metrics").write_bytes(struct.pack("<HBB", 4 + len(body) + 8, *revision) + body + b"\0" * 8)


def test_instinct_by_its_files(tmp_path: Path) -> None:
    trees.instinct(tmp_path, count=2)
    first, second = hwmon(tmp_path, 0, mhz=2100, junction=61), hwmon(tmp_path, 1, mhz=1900, junction=74)
    limiters(first, 0, 50, 0, 0, 0)
    limiters(second, 3, 50, 7, 0, 0)
    sensor = amd_sensor(trees.machine(tmp_path), 2)
    assert sensor is not None
    before = sensor()
    assert before is not None
    assert (before.clocks_mhz, before.temperature_c, before.power_w) == ((2100.0, 1900.0), 74.0, 1224.0)
    limiters(second, 3, 900, 9, 0, 4)
    after = sensor()
    assert after is not None
    state = summarize([[before, after]])
    assert state.throttled == ("memory temperature", "socket temperature")  # the power limit is no fault
    assert (state.clock_mhz, state.temperature_c, state.power_w, state.samples) == (2000.0, 74.0, 1224.0, 2)


def test_instinct_of_the_server_alone(tmp_path: Path) -> None:
    trees.instinct(tmp_path, count=3)
    for card, mhz in enumerate((1000, 2000, 3000)):
        hwmon(tmp_path, card, mhz=mhz, junction=50, power="power1_input")
    machine = trees.machine(tmp_path, {"HIP_VISIBLE_DEVICES": "2,0"})
    sensor = amd_sensor(machine, 1)
    assert sensor is not None
    assert sensor() == SensorReading((3000.0,), 50.0, 612.0)


def test_partitions_of_a_card_are_one_device(tmp_path: Path) -> None:
    trees.partitioned(tmp_path, count=2)
    for card in range(2):
        hwmon(tmp_path, card, mhz=2100, junction=50)
    sensor = amd_sensor(trees.machine(tmp_path), 8)
    assert sensor is not None
    assert sensor() == SensorReading((2100.0,), 50.0, 612.0)


@pytest.mark.parametrize("revision", [(1, 5), (2, 6), (1, 9)])
def test_tables_of_other_drivers_are_not_guessed(tmp_path: Path, revision: tuple[int, int]) -> None:
    trees.instinct(tmp_path, count=1)
    limiters(hwmon(tmp_path, 0, mhz=2100, junction=50), 1, 2, 3, 4, 5, revision=revision)
    sensor = amd_sensor(trees.machine(tmp_path), 1)
    assert sensor is not None
    assert sensor() == SensorReading((2100.0,), 50.0, 612.0)


def test_a_launch_is_the_readings_of_its_cells() -> None:
    one = SensorReading((1000.0,), 50.0, 400.0, ("power brake",), {"heat": 5})
    cells = [[one, replace(one, clocks_mhz=(1980.0,), temperature_c=72.0)], [replace(one, counters={"heat": 9})], []]
    state = summarize(cells)
    # Between cells nothing is measured: what happened there slowed nothing down.
    assert (state.throttled, state.samples, state.temperature_c) == (("power brake",), 3, 72.0)
    assert (state.clock_mhz, state.clock_mhz_low, state.power_w) == (1000.0, 1000.0, 400.0)
    assert summarize([[SensorReading(tuple(range(100, 200)))]]).clock_mhz_low == 104.0
