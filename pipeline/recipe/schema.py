"""The schema of recipes: every section and field, with limits and defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_serializer, model_validator

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.observers import ExpertTokens, Observation, ObserverName
from quantmint.calibration.sets import load_set
from quantmint.pipeline.base import schemes
from quantmint.pipeline.base.schemes import Engine, Format
from quantmint.pipeline.recipe.endpoints import LongContextGate, ReasoningGate, ToolCallsGate
from quantmint.pipeline.recipe.section import PRINTABLE, Section, row_of, wrong
from quantmint.pipeline.recipe.sections import Evaluation, Gate, Publish, Refresh, Tracking
from quantmint.pipeline.recipe.serving import Serve, Target

if TYPE_CHECKING:
    from quantmint.eval.suites import Suite, SuiteTask

COMMIT = re.compile(r"[0-9a-f]{40}")


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


class Source(Section):
    """The 16-bit model to start from: a folder, or a repository of the Hub at a revision."""

    folder: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """Folder with config.json, safetensors and tokenizer; relative to this file."""
    repo: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Repository of the Hugging Face Hub, as organisation/name."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or 40-digit commit of the repository (default: main). It is resolved to a commit when the recipe
    runs, and that commit is what is recorded."""

    @model_validator(mode="before")
    @classmethod
    def _revision_of_a_repo(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("repo") is not None and data.get("revision") is None:
            return {**data, "revision": "main"}
        return data

    @model_validator(mode="after")
    def _one_of_two(self) -> Source:
        if self.folder is None and self.repo is None:
            raise wrong("a folder or a repo", actual="neither")
        if self.folder is not None and self.repo is not None:
            raise wrong(
                "one of them; write `repo: null` or `folder: null` to drop an inherited one",
                actual="a folder with a repo",
            )
        if self.folder is not None and self.revision is not None:
            raise wrong("a repo for it; a folder has no revision", at="revision")
        return self

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which no one can move."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None


class Override(Section):
    """Another scheme for some modules."""

    modules: tuple[ModuleName, ...] = Field(strict=False, min_length=1)
    """Exact module names, or re: before a regular expression that matches from the start of a name."""
    scheme: SchemeName
    """Scheme of these modules."""


_COMPENSATION = 0.5
_OWN = ("scaling", "compensation")  # parameters of GPTQ that other engines have not


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
        return {name: value for name, value in dumped.items() if value or name not in _OWN}


class TuningParameters(Section):
    """Parameters of tuning, and of GPTQ, which precedes it."""

    steps: int = Field(default=100, ge=1, le=10_000)
    """Steps of gradient descent, a batch of calibration samples each."""
    held_out: float = Field(default=0.125, gt=0, le=0.5)
    """Share of the calibration samples, in eighths of them, that tuning is judged on and nothing is fitted to."""
    dampening: float = Field(default=0.01, gt=0, lt=1)
    """As of `gptq`."""
    activation_order: bool = True
    """As of `gptq`."""
    compensation: float | None = Field(default=None, ge=0, le=1)
    """As of `gptq` (null: 0.5)."""
    scaling: bool | None = None
    """As of `gptq` (null: for schemes with 4-bit activations)."""


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
        stream_only = [name for name in _OWN if self.parameters.get(name)]
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


class Calibration(Section):
    """The texts that activation ranges are measured on: static activation scales and KV scales come from here."""

    set: str
    """Name of a set in calibration/sets, or path of such a YAML file."""
    samples: int = Field(default=512, ge=1)
    """Number of sequences (default: the set's, else 512)."""
    sequence_length: int = Field(default=2048, ge=1)
    """Tokens of a sequence; nothing is ever padded (default: the set's, else 2048)."""
    packing: bool = True
    """true: texts are joined and cut into sequences of equal length. false: one text a sequence, cut where it is longer
    and left shorter where it is not (default: the set's, else true)."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences of equal length that are run together."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of samples (default: the set's, else 0)."""
    observer: ObserverName = "amax"
    """Statistic of a linear layer's inputs that its scale is computed from. amax: the largest magnitude. percentile:
    the magnitude that `percentile` percent do not exceed. mse: the one with the least error in FP8."""
    kv_observer: ObserverName | None = None
    """Statistic of K and V, per head, that their scales are computed from (null: like `observer`)."""
    percentile: float = Field(default=99.99, gt=0, le=100)
    """Percent of the magnitudes that `percentile` observers keep below the scale's range."""
    kv_floor: float | None = Field(default=None, gt=0)
    """Least magnitude of K and V that a scale is made from: no scale is smaller than a 448th of it."""
    experts: ExpertTokens = "all"
    """Tokens that count for an expert's inputs. all: every token of the layer, as if the router had sent it there.
    routed: only those that the router sends there. The layer's output follows the router in both cases."""
    min_expert_tokens: int = Field(default=128, ge=1)
    """Experts that are sent fewer tokens are named in a warning; with `experts: routed` all tokens count for them."""
    mode: Literal["auto", "resident", "layer"] = "auto"
    """resident: the whole model on each device. layer: one layer at a time. auto: the one that takes less memory. The
    measured ranges are the same."""
    activation_memory: float | None = Field(default=None, ge=0)
    """Gigabytes of host memory for hidden states in layer mode; the rest is spilled to the store (null: a quarter of
    what is free)."""

    @property
    def activation_bytes(self) -> int | None:
        """Return `activation_memory` in bytes; None where it is not set."""
        return None if self.activation_memory is None else int(self.activation_memory * 1e9)

    @property
    def observation(self) -> Observation:
        """Return the measurements to make. `percentile` keeps its default where no percentile observer uses it."""
        cache = self.kv_observer or self.observer
        optional = {} if "percentile" not in (self.observer, cache) else {"percentile": self.percentile}
        return Observation(
            inputs=self.observer,
            cache=cache,
            kv_floor=self.kv_floor,
            experts=self.experts,
            min_expert_tokens=self.min_expert_tokens,
            **optional,
        )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_set(cls, data: Any) -> Any:
        """Fill absent fields from the calibration set; a set that cannot be read is reported by later checks."""
        if not isinstance(data, dict) or not isinstance(data.get("set"), str):
            return data
        try:
            return {**load_set(data["set"]).defaults, **data}
        except CalibrationError:
            return data


class Search(Section):
    """Further tries of a run with `scheme: auto`: more bits after a FAIL, fewer after a PASS that follows one."""

    until: Literal["pass"] = "pass"
    """pass: publish the checkpoint with the fewest bits that passes, known to a quarter bit where tries are left."""
    tries: int = Field(default=4, ge=2, le=10)
    """Checkpoints at most, from the budget up to all in the largest scheme and back down. Each try is judged with a
    share of the error that gate.accuracy.confidence leaves, so that all tries together have no more."""


class Draft(Section):
    """A model that proposes tokens, quantized beside its target, published with it and served with it."""

    folder: str = Field(min_length=1, pattern=PRINTABLE)
    """Folder of the draft in 16 bit, EAGLE-3's, DFlash's or a whole model; relative to this file."""
    scheme: SchemeName
    """Scheme of its linear layers; one without static scales, since a draft is not calibrated."""
    exclude: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Modules left in 16 bit besides embeddings and lm_head, as in `quantization.exclude`."""

    @model_validator(mode="after")
    def _without_calibration(self) -> Draft:
        if schemes.scheme(self.scheme).needs_ranges:
            raise wrong("a scheme without static scales, such as ptpc_fp8", actual=self.scheme, at="scheme")
        return self


class Recipe(Section):
    """One checkpoint: what to make, from what, for which machine, and what it must prove."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name of the recipe: that of its file, without .yaml."""
    description: str = ""
    """One sentence for lists of recipes."""
    source: Source
    """The 16-bit model to start from."""
    trust_remote_code: bool = False
    """Run Python code from the repository; only with a revision that is a 40-digit commit."""
    quantization: Quantization
    """Scheme, KV cache, format and algorithm of the quantization."""
    calibration: Calibration | None = None
    """Data that ranges are measured on; needed for static activation scales or an fp8 KV cache."""
    draft: Draft | None = None
    """Model that proposes tokens for speculative decoding (null: none)."""
    search: Search | None = None
    """Further tries with more bits where the gate says FAIL (null: none)."""
    target: Target = Field(default_factory=Target)
    """Machine and load that the checkpoint is made for."""
    serve: Serve = Field(default_factory=Serve)
    """Settings that replace those of the launch plan."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Tasks that measure its accuracy."""
    gate: Gate = Field(default_factory=Gate)
    """Limits of accuracy and throughput that decide PASS or FAIL."""
    publish: Publish = Field(default_factory=Publish)
    """Destinations of the release after a PASS."""
    tracking: Tracking = Field(default_factory=Tracking)
    """Tracking server that the figures of a run are logged to."""
    refresh: Refresh = Field(default_factory=Refresh)
    """Schedule of checks whether the checkpoint must be made again."""

    @model_validator(mode="after")
    def _search_of_a_choice(self) -> Recipe:
        if self.search is not None and self.quantization.scheme != AUTO:
            raise wrong("it only with `quantization.scheme: auto`", actual="a search", at="search")
        return self

    @model_validator(mode="after")
    def _draft_of_a_server(self) -> Recipe:
        if self.draft is None:
            return self
        if self.serve.speculative is None:
            raise wrong("it with `serve.speculative`, which says the method", actual="a draft", at="draft")
        if self.serve.speculative.model is not None:
            raise wrong("none in `speculative`: `draft` is the model", actual="a model", at="serve")
        return self

    @model_validator(mode="after")
    def _acceptance_of_a_server(self) -> Recipe:
        if self.gate.acceptance is None:
            return self
        if self.serve.speculative is None:
            raise wrong("it with `serve.speculative`", actual="a promise on acceptance", at="gate")
        if self.evaluation.runtime == "reference":
            raise wrong("`runtime: vllm` for it", actual="a promise on acceptance", at="gate")
        return self

    @model_serializer(mode="wrap")
    def _omit_unset(self, dump: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = dump(self)
        return {name: value for name, value in dumped.items() if name not in ("search", "draft") or value is not None}

    @property
    def answered_by(self) -> Literal["vllm", "sglang", "reference"]:
        """Return the runtime that answers for both sides: the server's, or the reference runtime in its place."""
        return "reference" if self.evaluation.runtime == "reference" else self.serve.runtime

    @property
    def endpoints(self) -> Mapping[str, tuple[SuiteTask, ...]]:
        """Return the tasks that are measured beside the suite, by the family of the stage that measures them."""
        evaluation, gate = self.evaluation, self.gate
        tasks: dict[str, tuple[SuiteTask, ...]] = {}
        if evaluation.tools is not None:
            tasks["tools"] = evaluation.tools.tasks(gate.tools or ToolCallsGate(), gate.accuracy.expected_flip_rate)
        if evaluation.long is not None:
            tasks["long"] = evaluation.long.tasks(gate.long or LongContextGate(), self.target.max_model_len)
        if evaluation.reasoning is not None:
            limits = gate.reasoning or ReasoningGate()
            tasks["reasoning"] = evaluation.reasoning.tasks(limits, gate.accuracy.expected_flip_rate)
        return tasks

    @property
    def judged_at_once(self) -> tuple[str, ...]:
        """Return the tasks that are judged in one look, however many the recipe asks for."""
        return tuple(task.task for task in self.endpoints.get("long", ()))

    def judged(self, suite: Suite) -> Suite:
        """Return the suite with the tasks of the endpoints behind its own."""
        return replace(suite, tasks=(*suite.tasks, *(task for tasks in self.endpoints.values() for task in tasks)))

    @property
    def mx_scales(self) -> schemes.MxScales:
        """Return the rounding of the scales of MX inputs on the target."""
        return self.target.rounding or "even"

    @property
    def mx_settings(self) -> dict[str, str]:
        """Return the rounding of MX scales as part of a fingerprint's settings; empty where none is known or needed."""
        named, is_rounded = self.target.rounding, schemes.has_mx_activations(self.quantization.schemes)
        return {} if named is None or not is_rounded else {"mx_scales": named}

    @property
    def confidence(self) -> float:
        """Return the confidence that each checkpoint's accuracy is judged with.

        A checkpoint at the margin passes with the remaining error probability. Where a search tries several until one
        passes, each has an equal share of it (Bonferroni), so that all tries together have no more.
        """
        confidence = self.gate.accuracy.confidence
        return confidence if self.search is None else 1 - (1 - confidence) / self.search.tries
