"""Quantize a model's linear modules by GPTQ, layer by layer, each layer with the inputs that the layers before make.

    result = quantize_layers(GptqRequest(plans, structure, choice, folder, batches, ranges, ["cuda:0"], work, settings))

Modules that no Hessian is measured for, experts that no token reached and what lies outside the layers, are left to
their kernels, and named. Experts are not compensated: in the reference model the router may send them other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from quantmint.calibration.activations import States
from quantmint.calibration.layers import PARTS
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica, replica
from quantmint.calibration.room import (
    Need,
    activations_for,
    free_bytes,
    host_bytes,
    layers_bytes,
    learning_place,
    measuring,
    need_of,
    require_learning_room,
    require_rounding_room,
)
from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.engines.stream.switches import LAYERS_BYTES, keeping_freed_memory
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq.compensation import compensate
from quantmint.pipeline.quantize.gptq.latents import latent_bytes, save_weights, step_bytes
from quantmint.pipeline.quantize.gptq.request import GptqRequest, GptqResult
from quantmint.pipeline.quantize.gptq.results import LayerResult, layers_folder, read_result
from quantmint.pipeline.quantize.gptq.runner import GptqRunner
from quantmint.pipeline.quantize.gptq.scaling import ChannelScaling
from quantmint.pipeline.quantize.gptq.solve import gptq_bytes, solve
from quantmint.pipeline.quantize.gptq.tuned_model import WEIGHTS, TuningTask, tuning_bytes
from quantmint.pipeline.quantize.gptq.tuning import tune
from quantmint.pipeline.quantize.gptq.weights import Member, ModelWeights, ServedInputs
from quantmint.pipeline.quantize.inspection.numbers import altered_floor_db

_STATES = "layers"  # hidden states that an interrupted run is gone on with

Bar = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar over a total of units, which it names: "layer samples", or "steps of tuning".

Its value is called with each advance."""


def quantize_layers(request: GptqRequest, bar: Bar = lambda *_: nullcontext(lambda _: None)) -> GptqResult:
    """Quantize a model's linear modules by GPTQ, resuming at the last layer that an earlier attempt committed.

    Return the plans with the files of the new weights. Raises `CalibrationError` where the model cannot be run layer by
    layer or memory does not suffice, and `StageError` for weights that are not finite.
    """
    settings, devices = request.settings, request.devices[: min(len(request.batches), PARTS)]
    on_cpu = torch.device(devices[0]).type == "cpu"
    with measuring(request.folder), keeping_freed_memory(LAYERS_BYTES) if on_cpu else nullcontext():
        replicas = _replicas(request, devices)
        folder = layers_folder(request.work)
        steps = [step for plan in request.plans for step in plan.steps]
        weights = ModelWeights(replicas[0], request.structure, steps)
        if settings.tuning is not None and settings.tuning.weights:
            _require_learning_room(replicas[0], weights)
        inputs = ServedInputs(request.choice, request.ranges, request.mx_scales)
        scaling = None
        if settings.scaling:
            scaling = ChannelScaling(replicas[0], weights, inputs, request.choice, request.batches[0])
        unscaled = [] if scaling is None else scaling.unscaled
        held_out, reference = _quantize_by_layers(request, replicas, weights, inputs, scaling, folder, bar)
        if settings.tuning is not None and held_out:
            ranges = {**request.ranges, **read_result(request, folder, unscaled).ranges}
            roundings = ServedInputs(request.choice, ranges, request.mx_scales).roundings(weights)
            schemes = request.choice.schemes
            narrow = {name for name in weights.names if scheme(schemes[name]).activations.dtype == "e2m1"}
            task = TuningTask(replicas[0], weights, roundings, folder, request.batches, held_out, reference, narrow)
            with bar(settings.tuning.steps, "steps of tuning") as advance:
                tune(task, settings.tuning, advance)
    return read_result(request, folder, unscaled)


def _quantize_by_layers(
    request: GptqRequest,
    replicas: Sequence[Replica],
    weights: ModelWeights,
    inputs: ServedInputs,
    scaling: ChannelScaling | None,
    folder: Path,
    bar: Bar,
) -> tuple[list[int], list[States]]:
    """Write the files of the layers that are left into ``folder``.

    Return, for tuning, the numbers of the batches that were held out, and the reference model's states behind the last
    layer by batch; both empty without tuning.
    """
    settings, devices = request.settings, [replica.device for replica in replicas]
    need, reads_ahead = _need(request, replicas[0], devices)
    states = activations_for(devices, need, host_bytes(request.activation_bytes), request.work / _STATES)
    reach = partial(_reach, request.choice)
    samples = sum(batch.shape[0] for batch in request.batches)
    with (
        torch.inference_mode(),
        bar(len(replicas[0].walkable.layers) * samples, "layer samples") as advance,
        ThreadPoolExecutor(1) as saver,
        GptqRunner(
            replicas,
            request.batches,
            states,
            _facts(request, weights),
            advance,
            inputs.roundings(weights),
            reference=settings.has_reference,
        ) as runner,
    ):
        runner.reads_ahead = reads_ahead
        runner.record()
        held_out = [] if settings.tuning is None else runner.hold_out(settings.tuning.held_out)
        saved = saver.submit(lambda: None)
        for layer in runner:
            if scaling is not None:
                _scale(runner, layer, scaling, inputs, weights)
            result = LayerResult(learns=settings.tuning is not None and settings.tuning.weights)
            for step in runner.steps(layer):
                statistics = runner.collect(step)
                groups = [compensate(group, settings.compensation, reach) for group in weights.groups(statistics)]
                solutions = solve(groups, settings, list(dict.fromkeys(devices)))
                runner.apply(step, (solution.served() for solution in solutions))
                result.add(solutions)
                del statistics, groups, solutions  # gigabytes, which the next step needs for its own
            if scaling is not None:
                result.add_scaled(weights, runner.layers[layer], scaling.touched)
            if result.learns:
                save_weights(request.work / WEIGHTS, layer, result.weights)
            saved.result()
            saved = saver.submit(result.save, folder, layer, dict(inputs.changed))
            inputs.changed.clear()
            runner.finish(layer, saved.result)  # which commits no layer whose file is not on the disk
        saved.result()
        return held_out, runner.reference_states() if held_out else []


def _require_learning_room(replica: Replica, weights: ModelWeights) -> None:
    """Raise `CalibrationError` where the weights to learn, or those of a layer while it runs, have no room."""
    device, takes = replica.device, latent_bytes(weights.members)
    place = learning_place(takes, layers_bytes(replica), device, free_bytes(device))
    require_learning_room(takes, place, free_bytes(place))
    of_layer = step_bytes(weights.members, replica.walkable.layers)
    require_learning_room(of_layer + (takes if place == device else 0), device, free_bytes(device))


def _scale(
    runner: GptqRunner, layer: int, scaling: ChannelScaling, inputs: ServedInputs, weights: ModelWeights
) -> None:
    """Scale the channels of a layer's weights in place, before its statistics are collected.

    The runner gets new roundings of what enters the layer's modules, whose ranges are others then.
    """
    name = runner.layers[layer]
    samples = runner.sample(layer, *scaling.places(name), every_batch=inputs.is_ranged)
    scaling.scale(name, samples)
    module = runner.replica.model.get_submodule(name)
    runner.share(f"{name}.{parameter}" for parameter, _ in module.named_parameters())
    roundings = inputs.roundings(weights, name)
    runner.roundings.linear.update(roundings.linear)
    runner.roundings.experts.update(roundings.experts)  # of the same widths as before


def _reach(choice: Choice, member: Member) -> float:
    """Return how far compensation may move a row of a member, as a share of its norm: half of what inspection accepts.

    The other half is for rounding.
    """
    return 0.5 * 10 ** (-altered_floor_db(choice.schemes[member.step.name]) / 20)


def _replicas(request: GptqRequest, devices: Sequence[str]) -> list[Replica]:
    """Return a replica of the model on each device, with nothing loaded and attention fused."""
    replicas = [replica(request.folder, device, trust_remote_code=request.trust_remote_code) for device in devices]
    for copy in replicas:
        copy.fuse_attention()
    return replicas


def _need(request: GptqRequest, model: Replica, devices: Sequence[str]) -> tuple[Need, bool]:
    """Return the memory need, with the rounding of weights added to a forward, and whether layers are read ahead.

    Layers are read ahead where all devices have room for the next layer while one is rounded. Raises `CalibrationError`
    where a device has no room to round weights.
    """
    need = need_of(model, request.batches)
    if request.settings.has_reference:
        need = replace(need, states=2 * need.states)
    if request.settings.tuning is not None:
        length = max(batch.shape[1] for batch in request.batches)
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        need = replace(need, forward=tuning_bytes(need.forward, length, vocabulary))
    if request.settings.has_reference:  # a layer's original weights lie beside the new ones
        need = replace(need, forward=need.forward + need.layer)
    on_gpu = torch.device(devices[0]).type != "cpu"
    rounding = gptq_bytes(request.structure, request.choice.schemes, on_gpu=on_gpu)
    ahead = [
        require_rounding_room(need, rounding, free_bytes(device) // devices.count(device), device)
        for device in dict.fromkeys(devices)
    ]
    return replace(need, forward=need.forward + rounding), all(ahead)  # neither leaves room for hidden states


def _facts(request: GptqRequest, weights: ModelWeights) -> list[object]:
    """Return plain values that must be equal for an interrupted run to be resumed: kernels by module, and settings."""
    kernels = {step.name: step.kernel for plan in request.plans for step in plan.steps}
    modules = [[name, request.choice.schemes[name], kernels[name]] for name in weights.names]
    return [*modules, asdict(request.settings)]
