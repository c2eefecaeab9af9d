"""quantmint: quantize a model, prove it against its source, publish it.

    import quantmint

    checkpoint = quantmint.quantize("models/llama", "out", "ptpc_fp8")

The functions are those of `quantmint.pipeline.api`, which is imported when one of them is first used. The folders
`pipeline`, `calibration`, `eval` and `recipes` of the repository are linked below this package, so that no program that
installs quantmint, and no folder that a run starts in, gets or gives a module of such a common name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantmint.pipeline.api import (
        LoadedRecipe,
        QuantizedCheckpoint,
        QuantmintError,
        RunResult,
        UserError,
        Verification,
        inspect,
        load_recipe,
        plan,
        quantize,
        run,
        verify,
    )

__all__ = [
    "LoadedRecipe",
    "QuantizedCheckpoint",
    "QuantmintError",
    "RunResult",
    "UserError",
    "Verification",
    "inspect",
    "load_recipe",
    "plan",
    "quantize",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the API for one of its names."""
    if name not in __all__:
        raise AttributeError(f"module 'quantmint' has no attribute {name!r}")
    from quantmint.pipeline import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """List the API's names."""
    return __all__
