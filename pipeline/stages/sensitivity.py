"""sensitivity: measure what each group of linear modules costs in each scheme, once for all budgets and layouts.

A group is what a server loads with one scheme: q, k, v; gate, up; all experts of a layer; else a module of its own. Its
cost is the KL in nats of rounding it and its inputs as they are served, with everything else in 16 bit.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

from quantmint.calibration.inputs import InputRounder, Rounding, rounding_inputs
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica, replica, sources
from quantmint.calibration.room import measuring
from quantmint.calibration.sensitivity import ModuleChange, Tensors, measure
from quantmint.pipeline.base.errors import StageError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.schemes import MxScales, activations_on, scheme
from quantmint.pipeline.quantize.budget import Group, Option, Roofline
from quantmint.pipeline.quantize.device import resolve_devices
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.quantize.gptq.solver import SUPPORTED, factorize, round_weight
from quantmint.pipeline.quantize.model.experts import expert_slice, part_of
from quantmint.pipeline.quantize.rounding import activation_rounding
from quantmint.pipeline.quantize.schemes.registry import KERNELS, SCHEMES
from quantmint.pipeline.quantize.schemes.scales import FP8_MAX
from quantmint.pipeline.recipe.modules import fused_with, is_excluded, override_of, text_config
from quantmint.pipeline.recipe.quantization import AUTO, Quantization
from quantmint.pipeline.serving.reference.model import round_inputs
from quantmint.pipeline.stages.calibrate import data_identity, read_tokens, require_pinned_set
from quantmint.pipeline.stages.cost import routed_share, sensitivity_samples
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import read_source
from quantmint.pipeline.stages.stage import MODEL_MODULES, Check, Job, Output, Stage, write_json
from quantmint.pipeline.store.entries import Entry

KEY = "sensitivity"
SENSITIVITY = "sensitivity.json"
_WORK = "layers"


class SensitivityStage(Stage):
    """Measure what each group of modules costs in each scheme, for `scheme: auto`.

    An interrupted run resumes at a layer.
    """

    family = KEY
    version = 1
    needs = ("source",)
    packages = ("torch", "transformers", "tokenizers")
    by_content = True

    def is_planned(self, setting: Setting) -> bool:
        """Return whether the recipe was written with `scheme: auto`, chosen or not."""
        return setting.chosen is not None or setting.recipe.quantization.scheme == AUTO

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return torch and transformers, with the extra "quantize"."""
        return MODEL_MODULES

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_pinned_set`."""
        return (require_pinned_set,)

    def seconds(self, estimate: Estimate) -> float | None:
        """Return the forecast seconds of both passes through the layers, None where nothing is known."""
        return estimate.weights.get(self.key)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return what determines the costs: schemes, GPTQ's parameters, calibration data, whether code is trusted."""
        recipe = setting.written
        assert recipe.calibration is not None  # noqa: S101 - the recipe's checks
        gptq, names = _gptq(recipe.quantization), sorted(recipe.quantization.from_ or ())
        return {
            "schemes": names,
            **gptq,
            **data_identity(recipe.calibration, setting.commits),
            "trust_remote_code": recipe.trust_remote_code,
            **recipe.mx_settings,
            # Inputs in NVFP4 were once rounded by the scale of an FP8 tensor.
            **({"inputs": "by the global scale"} if "nvfp4" in names else {}),
            # GPTQ once left MXFP6 to the nearest.
            **({"mxfp6": "gptq"} if gptq and any(name.startswith("mxfp6") for name in names) else {}),
        }

    def run(self, job: Job) -> Output:
        """Measure the cost of every group in every scheme, layer by layer, and write `SENSITIVITY`.

        Raises `StageError` where no scheme can hold a weight.
        """
        recipe, trust = job.setting.written, job.setting.recipe.trust_remote_code
        (source, structure), names = read_source(job), sorted(recipe.quantization.from_ or ())
        folder = source.folder
        assert recipe.calibration is not None  # noqa: S101 - the recipe's checks
        job.progress.say("reading the calibration texts")
        samples = read_tokens(recipe.calibration, folder, trust_remote_code=trust)
        samples = samples[: sensitivity_samples(len(samples))]
        with measuring(folder):
            model = replica(folder, resolve_devices(job.setting.device)[0], trust_remote_code=trust)
            groups = _groups(structure.linear)
            gptq = _gptq(recipe.quantization)
            changes = _Changes(model, groups, structure.linear, names, gptq, recipe.mx_scales)
            with job.progress.bar(2 * len(model.walkable.layers) * len(samples), "layer samples") as advance:
                key = [names, gptq, *recipe.mx_settings.values()]
                costs = measure(model, samples, changes, job.path / _WORK, key, advance=advance)
        priced_groups = [
            _group_entry(name, modules, structure.linear, names, costs) for name, modules in groups.items()
        ]
        tokens = sum(len(sample) for sample in samples)
        write_json(job.path / SENSITIVITY, {"tokens": tokens, "groups": priced_groups})
        shutil.rmtree(job.path / _WORK)
        return Output(
            result={"groups": len(priced_groups), "schemes": names, "tokens": tokens},
            summary=f"{len(priced_groups)} groups in {', '.join(names)} over {tokens:,} tokens",
        )


def _gptq(quantization: Quantization) -> dict[str, float | int | bool]:
    """Return GPTQ's parameters that change how a single weight is rounded.

    Empty where weights are rounded to nearest.
    """
    parameters = quantization.parameters if quantization.is_by_gptq else {}
    return {name: parameters[name] for name in ("dampening", "activation_order") if name in parameters}


def read_groups(entry: Entry) -> tuple[Group, ...]:
    """Return the groups of modules with their measured costs, from a sensitivity entry."""
    return tuple(
        Group(
            group["name"],
            tuple(group["modules"]),
            group["weights"],
            tuple(Option(name, option["cost"], option["bits"]) for name, option in group["schemes"].items()),
        )
        for group in read_json(entry.file(SENSITIVITY))["groups"]
    )


def priced(quantization: Quantization, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the measured groups with the options that the recipe allows.

    Excluded groups are left out; an overridden group has the override's scheme as its only option, at cost 0 if it was
    not measured.
    """
    chosen: list[Group] = []
    for group in groups:
        pinned = override_of(quantization, group.modules[0])
        if is_excluded(quantization, group.modules[0]):
            continue
        if pinned is None:
            options = tuple(option for option in group.options if option.scheme in (quantization.from_ or ()))
        else:
            options = tuple(option for option in group.options if option.scheme == pinned)
            options = options or (Option(pinned, 0.0, scheme(pinned).bits_per_weight * group.weights),)
        chosen.append(replace(group, options=options))
    return tuple(chosen)


def spendable(setting: Setting, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups as the recipe allows them (`priced`), with times where its objective is throughput."""
    recipe = setting.written
    affordable = priced(recipe.quantization, groups)
    if recipe.quantization.objective is None:
        return affordable
    machine, cells = hardware(recipe.target.hardware), setting.workload.cells
    loaded = tuple(cell for cell in cells if math.isinf(cell.rate or math.inf))
    return Roofline(machine, loaded, routed_share(text_config(setting.config))).timed(affordable)


def _groups(linear: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    modules_by_group: defaultdict[str, list[str]] = defaultdict(list)
    for name in linear:
        modules_by_group[fused_with(name) or name].append(name)
    return dict(modules_by_group)


def _group_entry(
    name: str,
    modules: Sequence[str],
    linear: Mapping[str, tuple[int, int]],
    schemes: Sequence[str],
    costs: Mapping[str, float],
) -> dict[str, Any]:
    """Return a group as JSON: its modules, number of weights, and cost (nats) and bits by scheme.

    A group that no layer runs has no costs; it gets the largest scheme at cost 0.
    """
    shapes = [linear[module] for module in modules]
    fitting = _fitting(shapes, schemes)
    if _change(name, fitting[0]) not in costs:
        fitting = [max(fitting, key=lambda option: scheme(option).bits_per_weight)]
    return {
        "name": name,
        "modules": list(modules),
        "weights": sum(rows * columns for rows, columns in shapes),
        "schemes": {
            option: {
                "cost": costs.get(_change(name, option), 0.0),
                "bits": sum(scheme(option).stored_bits(*shape) for shape in shapes),
            }
            for option in fitting
        },
    }


def _fitting(shapes: Sequence[tuple[int, int]], schemes: Sequence[str]) -> list[str]:
    fitting = [name for name in schemes if all(shape[1] % scheme(name).input_divisor == 0 for shape in shapes)]
    if not fitting:
        raise StageError(f"quantization.from: no scheme of {', '.join(schemes)} holds a weight of {list(shapes[0])}.")
    return fitting


def _change(group: str, scheme_name: str) -> str:
    return f"{group} in {scheme_name}"


class _Changes:
    """A callable that yields, for one layer, the change of every group into every scheme that fits its shapes."""

    def __init__(
        self,
        model: Replica,
        groups: Mapping[str, Sequence[str]],
        linear: Mapping[str, tuple[int, int]],
        schemes: Sequence[str],
        parameters: Mapping[str, float | int | bool],
        mx_scales: MxScales = "even",
    ) -> None:
        self._mx_scales = mx_scales
        self._gptq_parameters, self._hessians = parameters, dict[str, "torch.Tensor"]()
        self._model, self._linear, self._groups, self._schemes = model.model, linear, groups, schemes
        self._own, self._dtype = sources(model.model, model.owned), model.model.dtype
        self._made = cache(self._of)  # of the layer at hand: each sample needs them again

    def __call__(self, layer: str, largest: Tensors, hessians: Callable[[], Tensors]) -> list[ModuleChange]:
        self._made.cache_clear()
        self._hessians = dict(hessians()) if self._gptq_parameters else {}
        changes: list[ModuleChange] = []
        for group, modules in self._groups.items():
            sites = tuple(dict.fromkeys(self._site(module) for module in modules))
            if all(name.startswith(f"{layer}.") for name in sites):
                for name in _fitting([self._linear[module] for module in modules], self._schemes):
                    changed = partial(self._changed, modules, name, largest)
                    changes.append(ModuleChange(_change(group, name), sites, changed))
        return changes

    def _site(self, module: str) -> str:
        """Return the module whose output is compared: the linear module itself, or the stack of its experts."""
        site_weight = self._own.get(module, "")
        return site_weight.rsplit(".", 2)[0] if site_weight.rpartition(".")[2].isdigit() else site_weight

    @contextmanager
    def _changed(self, modules: Sequence[str], name: str, largest: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Round, within the block, the modules' weights and inputs as scheme ``name`` stores and serves them.

        ``largest`` are the ranges of inputs by module, for static scales.
        """
        with ExitStack() as stack:
            linear: dict[str, Rounding] = {}
            experts: defaultdict[str, dict[tuple[str, int], Rounding]] = defaultdict(dict)
            rounder = InputRounder()
            for module in modules:
                weight_name, site, limit = self._own[module], self._site(module), None
                if scheme(name).needs_ranges:
                    # An expert that no token was sent to has no range, and no part in any cost.
                    limit = float(largest[module]) if module in largest else FP8_MAX
                rounding = activation_rounding(activations_on(name, self._mx_scales), limit)
                owner = self._model.get_submodule(site)
                if weight_name == site:
                    stack.callback(setattr, owner, "weight", owner.weight)
                    owner.weight = torch.nn.Parameter(self._made(weight_name, _kernel(name)), requires_grad=False)
                    linear[site] = rounding
                    continue
                part_of_stack = part_of(module)
                assert part_of_stack is not None  # noqa: S101 - it is one of a stack
                place = expert_slice(owner, site, int(weight_name.rpartition(".")[2]), part_of_stack[1])
                if site not in experts:
                    for key, parameter in list(owner.named_parameters(recurse=False)):
                        stack.callback(setattr, owner, key, parameter)
                        setattr(owner, key, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
                part = place.of(getattr(owner, place.parameter))
                part.copy_(self._rounded(part.contiguous(), _kernel(name)))
                experts[site][place.parameter, place.expert] = partial(rounder, rounding=rounding)
            stack.enter_context(rounding_inputs(self._model, linear))
            for site, roundings in experts.items():
                for handle in round_inputs(self._model.get_submodule(site), roundings):
                    stack.callback(handle.remove)
            yield

    def _of(self, module: str, kernel: str) -> torch.Tensor:
        weight: torch.Tensor = self._model.get_submodule(module).weight
        hessian = self._hessians.get(module)
        if hessian is None or kernel not in SUPPORTED:
            return self._rounded(weight, kernel)
        dampening, ordered = float(self._gptq_parameters["dampening"]), bool(self._gptq_parameters["activation_order"])
        factor = factorize(hessian, KERNELS[kernel], dampening=dampening, ordered=ordered)
        return (
            KERNELS[kernel].decode(round_weight(weight.detach().to(self._dtype), factor, KERNELS[kernel]).parts).float()
        )

    def _rounded(self, weight: torch.Tensor, kernel: str) -> torch.Tensor:
        return KERNELS[kernel].decode(KERNELS[kernel].compute(weight.detach().to(self._dtype), None)).float()


def _kernel(name: str) -> str:
    """Return the name of the kernel that rounds weights as the scheme stores them."""
    return SCHEMES[name].kernel.name
