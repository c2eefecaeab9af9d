"""What is made and served: the pairs of a scheme and a layout that the tables say vLLM loads, none by hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.hardware import local_cpu_flags, refusal
from pipeline.base.progress import PlainReporter
from pipeline.base.schemes import table
from pipeline.recipe.load import recipe_of
from pipeline.stages.quantization import make, open_job

MODEL = Path(__file__).parents[3] / "recipes" / "tiny" / "model"
ATTENTION = r"re:.*\.self_attn\.[qkvo]_proj"
_CALIBRATION = {"set": "tiny", "samples": 64, "sequence_length": 256, "batch_size": 8}


@dataclass(frozen=True)
class Case:
    """A checkpoint of the embedded model; ``attention`` is the scheme of its attention where that is another."""

    scheme: str
    checkpoint_format: str
    kv_cache: str = "auto"
    attention: str | None = None

    @property
    def name(self) -> str:
        """The pair in words."""
        parts = [self.scheme, *([f"{self.attention} attention"] if self.attention else [])]
        return f"{' + '.join(parts)}{', FP8 KV cache' if self.kv_cache == 'fp8' else ''}, {self.checkpoint_format}"

    @property
    def schemes(self) -> tuple[str, ...]:
        """Every scheme in it."""
        return (self.scheme, *((self.attention,) if self.attention else ()))

    @property
    def engine(self) -> str:
        """Ours where it makes the scheme, else the library that writes the layout."""
        return table()[self.scheme].makers(self.checkpoint_format)[0]


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


def make_case(case: Case, folder: Path, *, device: str = "auto") -> Path:
    """Quantize the embedded model as `quantmint quantize` does, inspection included; returns the checkpoint."""
    static = case.kv_cache == "fp8" or any(table()[scheme].needs_ranges for scheme in case.schemes)
    overrides = [{"modules": [ATTENTION], "scheme": case.attention}] if case.attention else []
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
    make(open_job(recipe_of(sections), folder, device=device), PlainReporter())
    return folder
