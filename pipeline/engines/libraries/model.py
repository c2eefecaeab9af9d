"""The 16-bit model as the libraries get it: resident, with attention step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.engines.libraries.job import LibraryJob
from pipeline.model.meta import meta_model


class UnfitError(Exception):
    """The library cannot do the job with this model: said in one line, without a traceback."""


def load_model(job: LibraryJob, device: str) -> Any:
    """Load the model of a local folder, safetensors only, in its own type.

    Attention is "eager": both libraries look at K and V there, and fused attention differs in the last bit.
    """
    folder = Path(job.source)
    kind = type(meta_model(folder, trust_remote_code=job.trust_remote_code))
    model = kind.from_pretrained(
        folder,
        dtype="auto",
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
    )
    # Written under the model's own names: what transformers would rename on the way out it renames in part, once
    # experts were taken apart. `adopt` gives every tensor the name that it has in the source.
    model._weight_conversions = []
    return model.to(device).eval()


def linear_names(model: Any) -> tuple[str, ...]:
    """Every linear module of a model, experts that were taken apart included."""
    import torch

    return tuple(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))


def require_modules(model: Any, job: LibraryJob, library: str) -> None:
    """Raise `UnfitError` where a module that is to be quantized is no linear module of the model at hand."""
    missing = sorted(job.schemes.keys() - set(linear_names(model)))
    if missing:
        raise UnfitError(
            f"{library} has no linear module {missing[0]} in this model"
            + (f", nor {len(missing) - 1} others: it does not take its experts apart" if missing[1:] else "")
        )


def run_main(main: Callable[[LibraryJob], None]) -> None:
    """Run the job that the command line names; end with 1 and one line where the library is not fit for it."""
    try:
        main(LibraryJob.load(Path(sys.argv[1])))
    except UnfitError as error:
        sys.exit(str(error))
