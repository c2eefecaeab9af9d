"""Weights that calibration decides on: linear modules by GPTQ, layer by layer, each made with what came before.

    plans = round_layers(plans, choice, folder, batches, ranges, device="cuda:0", work=scratch, ...).plans

What is made of a layer lies in one file of the working folder, which is there when the layer is done; the steps of the
plans that it answers name it, and the rest of the engine takes rows from it in the place of a kernel's. Modules that no
Hessian is measured for, stacked experts and what lies outside the layers, are left to their kernels, and named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.calls import layer_names
from calibration.replica import Replica, replica, sources
from calibration.room import activations_for, measuring, need_of
from calibration.sequential import Inputs, Rounding, run_sequential
from pipeline.base.errors import StageError
from pipeline.base.schemes import scheme
from pipeline.quantize.engines.stream.gptq import Made, factored, gptq
from pipeline.quantize.engines.stream.kernels import amax, fp8_scale, mxfp4
from pipeline.quantize.engines.stream.plan import ShardPlan, Step
from pipeline.quantize.formats.layout import Choice
from pipeline.quantize.inspection.numbers import dequantize
from pipeline.store.disk import fsync

if TYPE_CHECKING:
    import torch

_MADE = "made"  # a file a layer
_STATES = "layers"  # what an interrupted run is gone on with


@dataclass(frozen=True, slots=True)
class Gain:
    """What GPTQ made of one module: tr((W-Q) H (W-Q)^T) rounded to the nearest and as it is stored, and of how many
    tokens H is; ``fault`` says why it was rounded to the nearest."""

    before: float
    after: float
    tokens: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class Rounded:
    """Plans whose steps name what was made, what was gained by module, and modules that are left to their kernels."""

    plans: tuple[ShardPlan, ...]
    gains: Mapping[str, Gain]
    left: tuple[str, ...]


def round_layers(
    plans: tuple[ShardPlan, ...],
    choice: Choice,
    folder: Path,
    batches: Sequence[torch.Tensor],
    ranges: Mapping[str, torch.Tensor],
    *,
    device: str,
    work: Path,
    parameters: Mapping[str, float | int | bool],
    activation_bytes: int | None = None,
    trust_remote_code: bool = False,
    advance: Callable[[int], None] = lambda _: None,
    commit_seconds: float = 60.0,
) -> Rounded:
    """Make the weights of a model's linear modules, going on at the last layer that an earlier attempt committed.

    ``ranges`` are those behind static scales of inputs, by their tensors' names. ``parameters`` are the recipe's.
    ``advance`` is told samples, once a layer; after ``commit_seconds`` of work the run is made resumable.

    Raises `CalibrationError` where the model cannot be run layer by layer, `StageError` for weights that are not
    finite.
    """
    with measuring(folder):
        one = replica(folder, device, trust_remote_code=trust_remote_code)
        steps = {step.name: step for plan in plans for step in plan.steps if step.kernel is not None}
        own = _own_modules(one, steps)
        roundings = {own[name]: _rounding(choice.schemes[name], ranges.get(f"{name}.input_scale")) for name in own}
        need, _ = need_of(one, batches)
        made = work / _MADE
        made.mkdir(parents=True, exist_ok=True)
        layers = _Layers(one, {own[name]: steps[name] for name in own}, choice, made, parameters)
        run_sequential(
            one,
            batches,
            roundings,
            layers.solve,
            activations_for([one], need, activation_bytes, work / _STATES),
            [[name, choice.schemes[name], steps[name].kernel] for name in sorted(own)] + [dict(parameters)],
            advance=advance,
            commit_seconds=commit_seconds,
        )
    files = {name: path for path in sorted(made.glob("*.safetensors")) for name in _gains(path)}
    return Rounded(
        tuple(
            replace(plan, steps=tuple(replace(step, made=files.get(step.name)) for step in plan.steps))
            for plan in plans
        ),
        {name: gain for path in set(files.values()) for name, gain in _gains(path).items()},
        tuple(sorted(steps.keys() - files.keys())),
    )


def _own_modules(one: Replica, steps: Mapping[str, Step]) -> dict[str, str]:
    """The model's own linear module behind each quantized one that is all of it, within a layer."""
    import torch

    inside = tuple(f"{name}." for name in layer_names(one.model, one.attention.values()))
    named = sources(one.model, one.owned)
    modules = dict(one.model.named_modules())
    whole = list(named.values())
    return {
        name: own
        for name in steps
        if (own := named.get(name, "")).startswith(inside)
        and isinstance(modules.get(own), torch.nn.Linear)
        and whole.count(own) == 1
        and tuple(modules[own].weight.shape) == steps[name].origin.shape
    }


class _Layers:
    """What is made of each layer."""

    def __init__(
        self, one: Replica, steps: Mapping[str, Step], choice: Choice, folder: Path, parameters: Mapping[str, Any]
    ) -> None:
        self._model, self._steps, self._choice, self._folder = one.model, steps, choice, folder
        self._dampening, self._ordered = float(parameters["dampening"]), bool(parameters["activation_order"])

    def solve(self, number: int, found: Sequence[Inputs]) -> None:
        from safetensors.torch import save_file

        largest = self._largest([name for inputs in found for name in inputs.modules])
        tensors: dict[str, torch.Tensor] = {}
        gains: dict[str, Any] = {}
        for inputs in found:
            factor = cache(lambda kernel, hessian=inputs.hessian: self._factored(hessian, kernel))
            for name in inputs.modules:
                step = self._steps[name]
                made = self._made(name, step, factor(step.kernel), largest.get(name))
                tensors |= {f"{step.name}.{role}": part.cpu() for role, part in made.parts.items()}
                gains[step.name] = [made.before, made.after, inputs.tokens, made.fault]
        path = self._folder / f"{number:05}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"gains": json.dumps(gains)})
        fsync(partial)
        partial.replace(path)
        fsync(self._folder)

    def _factored(self, hessian: torch.Tensor, kernel: str) -> Any:
        return factored(hessian, kernel, dampening=self._dampening, ordered=self._ordered)

    def _made(self, name: str, step: Step, factor: Any, largest: torch.Tensor | None) -> Made:
        import torch

        module = self._model.get_submodule(name)
        weight = module.weight.detach()
        if not bool(amax(weight).isfinite()):
            raise StageError(f"{step.name}: its weight holds numbers that are not finite.")
        made = gptq(weight, factor, str(step.kernel), largest)
        restored = dequantize(self._choice.schemes[step.name], made.parts).to(weight.dtype)
        module.weight = torch.nn.Parameter(restored, requires_grad=False)
        return made

    def _largest(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The largest magnitude behind each scale that several weights share."""
        import torch

        own = {name: amax(self._model.get_submodule(name).weight.detach()) for name in names if self._steps[name].group}
        origins = {self._steps[name].origin: each for name, each in own.items()}
        return {name: torch.stack([origins[each] for each in self._steps[name].group]).amax() for name in own}


def _gains(path: Path) -> dict[str, Gain]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        return {name: Gain(*facts) for name, facts in json.loads(stored.metadata()["gains"]).items()}


@cache
def _dynamic(name: str) -> Rounding:
    return {"none": _unchanged, "group": _to_mxfp4, "per_token": _to_fp8}[name]


def _rounding(name: str, largest: torch.Tensor | None) -> Rounding:
    """What a server does to the inputs of a scheme."""
    activations = scheme(name).activations
    if largest is not None:
        return _static(float(largest))
    return _dynamic(activations.granularity or "none")


def _unchanged(entering: torch.Tensor) -> torch.Tensor:
    return entering


def _to_mxfp4(entering: torch.Tensor) -> torch.Tensor:
    rows = entering.reshape(-1, entering.shape[-1]).contiguous()
    return dequantize("mxfp4", mxfp4(rows)).to(entering.dtype).view_as(entering)


def _to_fp8(entering: torch.Tensor) -> torch.Tensor:
    return _through_fp8(entering, fp8_scale(entering.float().abs().amax(dim=-1, keepdim=True)))


@cache
def _static(largest: float) -> Rounding:
    """With the scale that is stored; the same function for the same range, which is that of the same input."""
    import torch

    scale = fp8_scale(torch.tensor(largest))
    return lambda entering: _through_fp8(entering, scale.to(entering.device))


def _through_fp8(entering: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    import torch

    limit = torch.finfo(torch.float8_e4m3fn).max
    stored = (entering.float() / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn)
    return (stored.float() * scale).to(entering.dtype)
