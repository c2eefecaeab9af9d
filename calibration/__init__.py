"""On what ranges are measured, and how."""

import os

# PyTorch reads it when it first takes memory: then a large tensor on a CPU costs a page fault every 2 MiB, not every
# 4 KiB, which was a third of the time of a forward with long sequences.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
