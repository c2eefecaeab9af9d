"""The section on quantization: schemes by module, a budget, the KV cache, and the algorithms' parameters."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_serializer, model_validator

from quantmint.pipeline.base import schemes
from quantmint.pipeline.base.schemes import Engine, Format
from quantmint.pipeline.recipe.section import Section, row_of, wrong


def _module_name(name: str) -> str:
    if name.startswith("re:"):
        try:
            re.compile(name[3:])
        except re.error as error:
            raise wrong(f"a regular expression after re: ({error})") from error
    elif set(name) & set("*?[]$^|()\\"):
        raise wrong("an exact module name, or re: before a regular expression")
    return name


SchemeName = Annotated[str, row_of(schemes.table()), Field(json_schema_extra={"enum": list(schemes.table())})]
AUTO = "auto"
"""In the place of a scheme: each group of modules gets its own, chosen by what was measured."""
BUDGET = ("bits", "objective", "speedup")
"""Fields of `quantization` that say what a choice may spend."""
_CHOICES = (*schemes.table(), AUTO)
SchemeChoice = Annotated[str, row_of(_CHOICES), Field(json_schema_extra={"enum": list(_CHOICES)})]
ModuleName = Annotated[str, Field(min_length=1), AfterValidator(_module_name)]


class Override(Section):
    """Another scheme for some modules."""

    modules: tuple[ModuleName, ...] = Field(strict=False, min_length=1)
    """Exact module names, or re: before a regular expression that matches from the start of a name."""
    scheme: SchemeName
    """Scheme of these modules."""


_COMPENSATION = 0.5
_STREAM_PARAMETERS = ("scaling", "compensation")  # parameters of GPTQ that other engines have not


class Gptq(Section):
    """Parameters of GPTQ."""

    dampening: float = Field(default=0.01, gt=0, lt=1)
    """Value added to the Hessian's diagonal, as a fraction of the diagonal's mean."""
    block_size: int = Field(default=128, ge=1)
    """Columns whose errors are propagated together (libraries; the result of engine stream does not depend on it)."""
    activation_order: bool = True
    """Round the columns with the largest activations first; costs nothing when served."""
    compensation: float | None = Field(default=None, ge=0, le=1)
    """Largest share of the error of rounded inputs and earlier layers, measured against the 16-bit model, that the
    weights compensate; held-out tokens may support less (engine stream; null: 0.5)."""
    scaling: bool | None = None
    """Move scales of activation channels into the weights where that reduces the error, as AWQ does (engine stream;
    null: for schemes with 4-bit activations)."""

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit unset parameters that only our engine has: recipes without them keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if value or name not in _STREAM_PARAMETERS}


class TuningParameters(Section):
    """Parameters of tuning, and of GPTQ, which precedes it."""

    steps: int = Field(default=100, ge=1, le=10_000)
    """Steps of gradient descent, a batch of calibration samples each."""
    held_out: float = Field(default=0.125, gt=0, le=0.5)
    """Share of the calibration samples, in eighths of them, that tuning is judged on and nothing is fitted to."""
    weights: bool = False
    """Learn the rounding of 4-bit weights too. It takes 9 bytes of memory for each of them, and some hundred samples
    and steps: take 1,024 samples and 600 steps."""
    dampening: float = Field(default=0.01, gt=0, lt=1)
    """As of `gptq`."""
    activation_order: bool = True
    """As of `gptq`."""
    compensation: float | None = Field(default=None, ge=0, le=1)
    """As of `gptq` (null: 0.5)."""
    scaling: bool | None = None
    """As of `gptq` (null: for schemes with 4-bit activations)."""

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit `weights` where unset: recipes without it keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if value or name != "weights"}


class SmoothQuant(Section):
    """Parameters of SmoothQuant."""

    strength: float = Field(default=0.5, ge=0, le=1)
    """0 leaves the outliers in the activations, 1 moves all into the weights."""


class AutoRound(Section):
    """Parameters of AutoRound."""

    iterations: int = Field(default=200, ge=1)
    """Steps of signed gradient descent for each layer."""


class Quantization(Section):
    """The formats of weights, activations and KV cache, and the layout of the checkpoint."""

    scheme: SchemeChoice
    """Scheme of every linear layer that is neither excluded nor overridden. auto: each group of layers gets the scheme
    of `from` that costs it least within the budget, by measurement."""
    from_: tuple[SchemeName, ...] | None = Field(default=None, alias="from", strict=False)
    """Schemes that `scheme: auto` chooses from, two or more."""
    bits: float | None = Field(default=None, gt=0)
    """Budget of `scheme: auto`: mean bits per weight over the decoder's quantized linear layers, scales included."""
    objective: Literal["throughput"] | None = None
    """throughput: the budget is a speed, not `bits`. The choice has the least loss among those with the estimated
    `speedup`, by the data sheet of target.hardware, for the cells of target.workload."""
    speedup: float | None = Field(default=None, gt=1)
    """Least speed of the quantized linear layers relative to 16 bit, by the estimate of `objective: throughput`."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """fp8: calibrated static scales for K (after RoPE) and V. auto: 16 bit, like the model."""
    kv_cache_granularity: Literal["tensor", "head"] = "tensor"
    """Scales of an fp8 cache: one for K and one for V of a layer, or one a KV head (compressed-tensors only; vLLM reads
    them with attention backends that scale by head)."""
    format: Format = "compressed-tensors"
    """Layout of the checkpoint; vLLM reads both."""
    engine: Engine = "stream"
    """Software that quantizes. stream: quantmint's own engine, which reads the source once. The others are
    libraries."""
    algorithm: Literal["none", "gptq", "tuned", "awq", "smoothquant", "rotation", "autoround"] = "none"
    """Algorithm used instead of plain round-to-nearest. Engine stream supports gptq and tuned: GPTQ, and then
    norms and biases tuned by gradient descent on the KL divergence, kept where held-out samples lose less by it."""
    gptq: Gptq | None = None
    """Parameters of `algorithm: gptq`."""
    tuned: TuningParameters | None = None
    """Parameters of `algorithm: tuned`."""
    smoothquant: SmoothQuant | None = None
    """Parameters of `algorithm: smoothquant`."""
    autoround: AutoRound | None = None
    """Parameters of `algorithm: autoround`."""
    shared_scales: bool = True
    """Give q, k, v and gate, up one weight scale each where scales are per tensor (engine stream): vLLM runs a fusion
    group with its largest scale and would round the other modules twice. false: separate scales, as the libraries
    write."""
    exclude: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Modules left in 16 bit besides embeddings, lm_head, routers, norms, vision towers and MTP heads. Exact names, or
    re: before a regular expression that matches from the start of a name."""
    keep: Literal["bf16", "source"] = "bf16"
    """What excluded modules are whose weights the source has quantized. bf16: decoded. source: as they are, bytes and
    declaration (engine stream)."""
    overrides: tuple[Override, ...] = Field(default=(), strict=False)
    """Modules with another scheme. Modules that vLLM fuses must agree."""
    mtp: Literal["source", "bf16", "ptpc_fp8", "mxfp4"] | None = None
    """Layers of a multi-token predictor (engine stream). source: the bytes of the source, declared as what they are.
    bf16: decoded to 16 bit. A scheme: the linear modules that vLLM's predictor loads quantized are rounded to it, its
    experts included; embeddings, head, routers and eh_proj stay in 16 bit (null: bf16)."""

    @model_validator(mode="after")
    def _budget(self) -> Quantization:
        if self.scheme != AUTO:
            budget_fields = {"from": self.from_, **{name: getattr(self, name) for name in BUDGET}}
            for name in (name for name, value in budget_fields.items() if value is not None):
                raise wrong(f"it only with `scheme: auto`, not with {self.scheme}", at=name)
            return self
        budget, unused = ("bits", "speedup") if self.objective is None else ("speedup", "bits")
        if getattr(self, unused) is not None:
            way = "only with `objective: throughput`" if unused == "speedup" else "without `objective: throughput`"
            raise wrong(f"it {way}", at=unused)
        if self.from_ is None or getattr(self, budget) is None:
            missing = "from" if self.from_ is None else budget
            raise wrong(f"it with `from` (schemes) and `{budget}` (a budget); {missing} is missing", at="scheme")
        if len(set(self.from_)) < max(len(self.from_), 2):
            raise wrong("two schemes or more, each once", actual=", ".join(self.from_) or "none", at="from")
        if self.bits is None:
            return self
        sizes = {name: schemes.scheme(name).bits_per_weight for name in self.from_}
        least, most = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
        if self.bits < sizes[least]:
            raise wrong(f"at least {sizes[least]:g}, which everything in {least} needs", at="bits")
        if self.bits > sizes[most] + 0.25:  # of scales per channel, which are counted in no scheme's own bits
            raise wrong(f"at most {sizes[most]:g}, with which everything is in {most}", at="bits")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        """Omit a budget's fields, `keep` and `tuned` where unset: recipes without them keep their fingerprints."""
        dumped: dict[str, Any] = dump(self)
        if dumped.get("keep") == "bf16":
            del dumped["keep"]
        if dumped.get("mtp") is None:  # a dump may leave fields out
            dumped.pop("mtp", None)
        if dumped.get("tuned") is None:
            dumped.pop("tuned", None)
        chosen, budget = dumped.pop("from_", None), {name: dumped.pop(name, None) for name in BUDGET}
        budget = {name: value for name, value in budget.items() if value is not None}
        return dumped if chosen is None else {"scheme": dumped.pop("scheme"), "from": chosen, **budget, **dumped}

    @model_validator(mode="after")
    def _parameters_of_the_algorithm(self) -> Quantization:
        for name in ("gptq", "tuned", "smoothquant", "autoround"):
            if getattr(self, name) is not None and self.algorithm != name:
                raise wrong(f"them only with `algorithm: {name}`", actual=f"parameters of {name}", at=name)
        return self

    @model_validator(mode="after")
    def _own_by_the_stream(self) -> Quantization:
        stream_only = [name for name in _STREAM_PARAMETERS if self.parameters.get(name)]
        if stream_only and self.engine != "stream":
            raise wrong("engine stream for it", actual=f"{stream_only[0]} with engine {self.engine}", at=self.algorithm)
        if self.keep == "source" and self.engine != "stream":
            raise wrong("engine stream for it", actual=f"source with engine {self.engine}", at="keep")
        if self.mtp not in (None, "bf16") and self.engine != "stream":
            raise wrong("engine stream for it", actual=f"{self.mtp} with engine {self.engine}", at="mtp")
        return self

    @property
    def schemes(self) -> set[str]:
        """Return all schemes that modules have, or may be given by `scheme: auto`."""
        return {self.scheme, *(self.from_ or ()), *(override.scheme for override in self.overrides)} - {AUTO}

    @property
    def predictor_scheme(self) -> str | None:
        """Return the scheme that a predictor's modules are rounded to; None where they are not rounded."""
        return None if self.mtp in (None, "bf16", "source") else self.mtp

    @property
    def parameters(self) -> dict[str, float | int | bool]:
        """Return the algorithm's parameters by name, defaults included; empty for an algorithm without parameters."""
        sections: dict[str, Section] = {"gptq": self.gptq or Gptq(), "tuned": self.tuned or TuningParameters()}
        sections |= {"smoothquant": self.smoothquant or SmoothQuant(), "autoround": self.autoround or AutoRound()}
        parameters = sections[self.algorithm].model_dump() if self.algorithm in sections else {}
        if self.by_layers:
            four = any(schemes.scheme(name).activations.dtype == "e2m1" for name in self.schemes)
            section = (self.tuned if self.algorithm == "tuned" else self.gptq) or Gptq()
            compensation, scaling = section.compensation, section.scaling
            parameters["compensation"] = _COMPENSATION if compensation is None else compensation
            parameters["scaling"] = four if scaling is None else scaling
        return parameters

    @property
    def by_layers(self) -> bool:
        """Return whether engine stream rounds by GPTQ, tuned or not: layer by layer, on the calibration texts."""
        return self.engine == "stream" and self.is_by_gptq

    @property
    def is_by_gptq(self) -> bool:
        """Return whether weights are rounded by GPTQ, tuned or not, in whichever engine."""
        return self.algorithm in ("gptq", "tuned")
