"""What is made and served: the pairs of a scheme and a layout that the tables say vLLM loads, none by hand."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from quantmint.pipeline.base.hardware import local_cpu_flags, refusal
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.recipe.load import recipe_of
from quantmint.pipeline.runs.oneshot import make_checkpoint, open_job

MODEL = Path(__file__).parents[3] / "recipes" / "tiny" / "model"
ATTENTION = r"re:.*\.self_attn\.[qkvo]_proj"
SOME_LAYERS = r"re:.*\.layers\.(0\..*|2\.self_attn\.[qkvo]_proj)"
"""What `scheme: auto` leaves: one scheme for a layer, another for the next."""
_CALIBRATION = {"set": "tiny", "samples": 16, "sequence_length": 256, "batch_size": 8}


@dataclass(frozen=True)
class Case:
    """A checkpoint of the embedded model; ``other`` is the scheme of the modules that ``where`` names, if any."""

    scheme: str
    checkpoint_format: str
    kv_cache: str = "auto"
    other: str | None = None
    where: str = ATTENTION

    @property
    def name(self) -> str:
        """The pair in words."""
        place = "attention" if self.where == ATTENTION else "layers"
        parts = [self.scheme, *([f"{self.other} {place}"] if self.other else [])]
        return f"{' + '.join(parts)}{', FP8 KV cache' if self.kv_cache == 'fp8' else ''}, {self.checkpoint_format}"

    @property
    def schemes(self) -> tuple[str, ...]:
        """Every scheme in it."""
        return (self.scheme, *((self.other,) if self.other else ()))

    def scheme_of(self, module: str) -> str:
        """The scheme of a module."""
        return self.other if self.other and re.match(self.where.removeprefix("re:"), module) else self.scheme

    @property
    def engine(self) -> str:
        """Ours where it makes the schemes, else the library that writes the layout."""
        makers = [table()[scheme].makers(self.checkpoint_format) for scheme in self.schemes]
        return next(maker for maker in makers[0] if all(maker in others for others in makers))


_REFUSED = refusal("cpu", "ptpc_fp8", "fp8", "compressed-tensors", cpu_flags=local_cpu_flags())
PUBLISHED = Case("ptpc_fp8", "compressed-tensors", "auto" if _REFUSED else "fp8")
"""What is proven of this one is proven of what a reader fetches, by `tests/e2e/test_published.py`."""


def loaded(hardware: str, *, cpu_flags: Collection[str] | None = None) -> tuple[Case, ...]:
    """Every scheme in every layout that is not refused there, its cache in 16 bit, in the order of the table."""
    return tuple(
        Case(scheme.name, checkpoint_format)
        for scheme in table().values()
        for checkpoint_format in scheme.formats
        if refusal(hardware, scheme.name, "auto", checkpoint_format, cpu_flags=cpu_flags) is None
    )


def with_fp8_cache(
    hardware: str, schemes: Collection[str], *, cpu_flags: Collection[str] | None = None
) -> tuple[Case, ...]:
    """The same with a calibrated FP8 cache, for some schemes: the cache is no concern of the linear layers."""
    return tuple(
        Case(case.scheme, case.checkpoint_format, "fp8")
        for case in loaded(hardware, cpu_flags=cpu_flags)
        if case.scheme in schemes
        and refusal(hardware, case.scheme, "fp8", case.checkpoint_format, cpu_flags=cpu_flags) is None
    )


def mixed(hardware: str, schemes: Collection[str], *, cpu_flags: Collection[str] | None = None) -> tuple[Case, ...]:
    """Some schemes with attention in FP8, in each layout that both are loaded in."""
    known = loaded(hardware, cpu_flags=cpu_flags)
    return tuple(
        replace(case, other="ptpc_fp8")
        for case in known
        if case.scheme in schemes and Case("ptpc_fp8", case.checkpoint_format) in known
    )


def make_case(case: Case, folder: Path, *, device: str = "auto") -> Path:
    """Quantize the embedded model as `quantmint quantize` does, inspection included; returns the checkpoint."""
    static = case.kv_cache == "fp8" or any(table()[scheme].needs_ranges for scheme in case.schemes)
    overrides = [{"modules": [case.where], "scheme": case.other}] if case.other else []
    sections = {
        "source": {"folder": str(MODEL)},
        "quantization": {
            "scheme": case.scheme,
            "format": case.checkpoint_format,
            "kv_cache": case.kv_cache,
            "engine": case.engine,
            "overrides": overrides,
        },
        "calibration": _CALIBRATION if static else None,
    }
    make_checkpoint(open_job(recipe_of(sections), folder, device=device), PlainReporter())
    return folder
