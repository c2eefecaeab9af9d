"""The section on calibration: the texts, the statistics of activations, and the memory for them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.observers import ExpertTokens, Observation, ObserverName
from quantmint.calibration.sets import load_set
from quantmint.pipeline.recipe.section import Section


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
