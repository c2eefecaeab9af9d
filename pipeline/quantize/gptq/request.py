"""The request and the result of GPTQ over a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantmint.pipeline.base.schemes import MxScales
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.structure import Structure

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """The parameters of tuning in a recipe: ``steps`` of a batch each, and the share of the batches ``held_out``.

    ``weights`` learns the rounding of weights too, beside the norms.
    """

    steps: int
    held_out: float
    weights: bool = False


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """The parameters of GPTQ in a recipe.

    ``dampening`` is the share of a Hessian's mean diagonal that is added to it. ``activation_order`` rounds columns
    with large inputs first. ``compensation`` is the largest share of the error against the 16-bit reference model
    that weights compensate; at 0 no reference model runs, except for ``tuning``, which follows GPTQ. ``scaling``
    scales channels before rounding.
    """

    dampening: float = 0.01
    activation_order: bool = True
    compensation: float = 0.0
    scaling: bool = False
    tuning: TuningSettings | None = None

    @property
    def has_reference(self) -> bool:
        """Return whether the 16-bit reference model runs along."""
        return self.compensation > 0 or self.tuning is not None

    @classmethod
    def of(cls, parameters: Mapping[str, float | int | bool]) -> GptqSettings:
        """Return the settings in a recipe's parameters; parameters that only libraries read are ignored.

        Raises `KeyError` where dampening, activation_order or compensation is missing.
        """
        tuning = None
        if "steps" in parameters:
            learns = bool(parameters.get("weights"))
            tuning = TuningSettings(int(parameters["steps"]), float(parameters["held_out"]), learns)
        return cls(
            float(parameters["dampening"]),
            bool(parameters["activation_order"]),
            float(parameters["compensation"]),
            bool(parameters.get("scaling")),
            tuning,
        )


@dataclass(frozen=True, slots=True)
class GptqRequest:
    """A model to quantize by GPTQ, with the texts and devices to do it with.

    ``plans`` lay out the checkpoint's files, ``folder`` is the source model. ``batches`` are int64 token ids of [batch,
    sequence], which the ``devices`` share. ``ranges`` are largest magnitudes behind static scales of inputs, by the
    scales' tensor names. ``work`` holds what an interrupted run resumes from. Hidden states take at most
    ``activation_bytes`` of host memory (None: a quarter of the free memory). ``mx_scales`` is how the target rounds the
    scales of microscaling inputs.
    """

    plans: tuple[ShardPlan, ...]
    structure: Structure
    choice: Choice
    folder: Path
    batches: Sequence[torch.Tensor]
    ranges: Mapping[str, torch.Tensor]
    devices: Sequence[str]
    work: Path
    settings: GptqSettings
    activation_bytes: int | None = None
    trust_remote_code: bool = False
    mx_scales: MxScales = "even"


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of GPTQ on one module: tr((W-Q) H (W-Q)^T) ``before``, by round-to-nearest, and ``after``, as stored.

    ``tokens`` entered the module. ``fault`` says why it was rounded to the nearest, None where it was not. ``pooled``:
    H is that of all experts of its layer, because its own tokens were fewer than its inputs. ``compensation`` is the
    share of the error against the reference model that the target compensates: 0 where held-out tokens gain nothing by
    it, None without a reference model. ``output_db`` is, for a compensated module, the signal-to-noise ratio in dB of
    the stored weight's products against the target's, on held-out tokens.
    """

    before: float
    after: float
    tokens: int
    fault: str | None
    pooled: bool = False
    compensation: float | None = None
    output_db: float | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The mean KL divergence on held-out batches, in nats per token, ``before`` tuning and ``after``.

    ``step`` is the step whose numbers the model has; 0 where none was better, and the model is as GPTQ left it.
    ``moved`` is the share of the weights in groups that are rounded otherwise than GPTQ did.
    """

    before: float
    after: float
    step: int
    moved: float = 0.0


@dataclass(frozen=True, slots=True)
class GptqResult:
    """The plans, whose steps name the files that hold their tensors, and the gain of each module.

    ``untouched`` are modules that are left to round-to-nearest. ``ranges`` are the ranges of inputs that scaling
    changed, by the names of their scales. ``unscaled`` names modules whose channels cannot be scaled. ``tuning`` is
    None where the model was not tuned.
    """

    plans: tuple[ShardPlan, ...]
    gains: Mapping[str, Gain]
    untouched: tuple[str, ...]
    ranges: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()
    tuning: Tuning | None = None
