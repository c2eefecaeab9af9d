"""Tables that lie as YAML beside the code that reads them.

>>> list(beside(__file__, "schemes.yaml"))[:2]
['ptpc_fp8', 'fp8']
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def beside(module: str, name: str) -> Any:
    """What stands in file ``name`` in the folder of ``module``, a ``__file__``; read once, and not to be changed."""
    return yaml.safe_load(Path(module).with_name(name).read_text(encoding="utf-8"))
