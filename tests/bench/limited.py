"""quantmint on a GPU of which it may take so many GB alone: `python limited.py GB ARGUMENTS...`.

The last line of the standard error says how much it took: what PyTorch's allocator reserved at its peak.
"""

from __future__ import annotations

import atexit
import sys

import torch

from quantmint.__main__ import main


def report() -> None:
    """Print the largest amount of GPU memory that was taken."""
    sys.stderr.write(f"GPU memory: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB\n")


if __name__ == "__main__":
    torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)) * 1e9 / torch.cuda.mem_get_info()[1])
    atexit.register(report)
    main()
