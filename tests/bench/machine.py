"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe(device: str) -> dict[str, Any]:
    """Processor, cores, memory, accelerator and PyTorch of this machine."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "accelerator": None if device == "cpu" else torch.cuda.get_device_name(device),
    }
