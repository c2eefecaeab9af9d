"""PyTorch, imported when it is first used: what only plans, checks or prints starts without those seconds.

from quantmint.calibration.lazy import torch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
