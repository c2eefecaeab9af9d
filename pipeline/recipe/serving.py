"""Sections of a recipe that say on which machine and how a checkpoint is served: `target` and `serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_serializer, model_validator

from quantmint.pipeline.base import hardware, schemes
from quantmint.pipeline.recipe.section import PRINTABLE, Section, row_of, wrong


def _knob_value(value: object) -> str | bool | int | float:
    if not isinstance(value, str | bool | int | float):
        raise wrong("text, a number, true or false")
    return value


HardwareName = Annotated[str, row_of(hardware.table()), Field(json_schema_extra={"enum": list(hardware.table())})]
KnobValue = Annotated[
    Any, AfterValidator(_knob_value), Field(json_schema_extra={"type": ["string", "number", "boolean"]})
]


class Target(Section):
    """The machine and the load that the checkpoint is made for."""

    hardware: HardwareName = "mi300x"
    """Accelerator that serves the checkpoint."""
    gpus: int = Field(default=1, ge=1)
    """Accelerators of the server; the launch plan splits or replicates over them."""
    workload: str = "throughput"
    """Name of a workload in eval/workloads, or the path of a YAML file like those."""
    max_model_len: int = Field(default=8192, ge=16)
    """Longest prompt with its answer, in tokens."""
    mx_scales: Literal["even", "up"] | None = None
    """Rounding of the scales of MX inputs by the kernels that will serve (null: as `aiter` does, else even, and nothing
    is promised of it). GPTQ, sensitivities and the reference runtime round in this way, and a proof that was made by
    another one does not pass."""
    aiter: str | None = Field(default=None, pattern=r"^v?\d+\.\d+\.\d+[0-9a-z.+-]*$")
    """Version of AITER on the target, such as 0.1.16, from which on its default is to round MX scales up; older ones
    round to even (null: not known)."""

    @property
    def rounding(self) -> schemes.MxScales | None:
        """Return the rounding that is named, or that the version of AITER has; None where neither is known."""
        return self.mx_scales or (None if self.aiter is None else hardware.mx_scales_by_aiter(self.aiter))

    @model_validator(mode="after")
    def _rounded_by_its_kernels(self) -> Target:
        roundings = hardware.hardware(self.hardware).mx_scales
        if self.mx_scales is not None and self.mx_scales not in roundings:
            raise wrong(f"{' or '.join(roundings)}, by the kernels of {self.hardware}", at="mx_scales")
        if self.aiter is not None and len(roundings) == 1:
            raise wrong(f"none: {self.hardware} has no kernels of AITER that round MX scales", at="aiter")
        if self.mx_scales == "up" and self.aiter and hardware.mx_scales_by_aiter(self.aiter) == "even":
            newer = f"{hardware.AITER_ROUNDS_UP} or newer with `mx_scales: up`"
            raise wrong(f"{newer}, because older kernels round to even", at="aiter")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit a rounding that is not named: recipes without one keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        later = ("mx_scales", "aiter")
        return {name: value for name, value in dumped.items() if name not in later or value is not None}


class Speculative(Section):
    """Tokens that a small model proposes and the served one checks, several in one step."""

    method: str = Field(min_length=1, pattern=PRINTABLE)
    """vLLM's name of the method: eagle3, draft_model, mtp, ngram, ..."""
    model: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """Folder of the model that proposes; null where the served one does it by itself (mtp, ngram)."""
    tokens: int = Field(default=2, ge=1)
    """Tokens proposed at a time. In measurements, more than 2 were accepted less often and served slower."""


class Serve(Section):
    """Settings of the launch besides `target`; `quantmint tune` prints such a section."""

    runtime: Literal["vllm", "sglang"] = "vllm"
    """Engine that serves and is measured. sglang: servers of SGLang that you start; `quantmint run --launcher endpoint`
    asks them for the canary and the suite, and measures no throughput."""
    profile: Literal["latency", "throughput", "offline", "streaming"] | None = None
    """Purpose of the server (null: the one of the target's workload)."""
    knobs: dict[str, KnobValue] = Field(default_factory=dict)
    """Values that replace those of the launch plan, by the name of the knob: --max-num-seqs: 256 or a variable of the
    environment. true is a flag without a value, false leaves the knob out."""
    speculative: Speculative | None = None
    """Speculative decoding (null: none)."""
    tunableop: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """CSV file with the matrix kernels that TunableOp found; relative to this file. It is read, and nothing is tuned
    while serving."""
    pack: int = Field(default=1, ge=1, le=8)
    """Servers that share one accelerator; for small models."""
    arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further arguments of `vllm serve`, word by word: [--reasoning-parser, qwen3]. Knobs belong under `knobs`."""

    @property
    def overrides(self) -> dict[str, str | bool]:
        """Return the knobs as a launch plan takes them: text as on a command line, or true and false for switches."""
        return {name: value if isinstance(value, bool) else str(value) for name, value in self.knobs.items()}

    @model_serializer(mode="wrap")
    def _omit_default(self, dump: Any) -> dict[str, Any]:
        """Omit vLLM as the runtime: recipes without the key keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if name != "runtime" or value != "vllm"}
