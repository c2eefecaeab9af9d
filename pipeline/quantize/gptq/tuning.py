"""Tune the norms of a quantized model end to end, by the KL divergence from the 16-bit model's predictions.

A norm's few numbers decide how much of each channel a layer reads; they do not fit a few texts by heart as weights do
(docs/notes/measurements.md has the attempts). Where asked, the rounding of weights is learned too, see `latents`. A
step takes a batch through the layers, one loaded at a time, and its
gradient back through them, which runs each layer again; inputs are rounded as they
are served, with the gradient of what is not rounded (arXiv 1308.3432). Samples that are held out, from GPTQ as well,
say which step's norms are stored, or that the model keeps its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from quantmint.calibration.activations import States, digest_of, save_whole
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.calls import Call, record
from quantmint.calibration.experts import rounding_experts, stacks
from quantmint.calibration.inputs import Rounding, rounding_inputs
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import head_name
from quantmint.calibration.replica import Replica
from quantmint.calibration.room import free_bytes
from quantmint.calibration.sensitivity import HIDDEN, input_leaves, layer_slopes, model_logits
from quantmint.calibration.weights import held, nbytes
from quantmint.pipeline.quantize.engines.stream.shard import ERRORS
from quantmint.pipeline.quantize.formats.checkpoint import torch_dtype
from quantmint.pipeline.quantize.gptq.descent import descend
from quantmint.pipeline.quantize.gptq.latents import FILES, LatentWeights, latent_bytes
from quantmint.pipeline.quantize.gptq.request import Tuning, TuningSettings
from quantmint.pipeline.quantize.gptq.runner import InputRoundings
from quantmint.pipeline.quantize.gptq.weights import Member, ModelWeights
from quantmint.pipeline.quantize.schemes.scheme import Parts

RATE = 0.003
"""First step of a norm's number, as a share of that number; steps fall to zero linearly."""
EVALUATIONS = 10
"""Times that the held-out divergence is measured, beside that of the norms that GPTQ left."""
WEIGHTS = "weights"
"""Folder beside the layers' files with their weights before rounding, where rounding is learned."""
_WARM_UP = 10
_PROGRESS, _RESULT = "tuning.safetensors", "vectors.safetensors"

Numbers = dict[str, "torch.Tensor"]
"""Shares that are added to each number of a vector, float32, by the name of its parameter."""


@dataclass(frozen=True, slots=True)
class TuningTask:
    """A model that GPTQ went through: its ``replica``, with nothing loaded, and what says how it is served.

    ``folder`` holds the layers' files. ``batches`` are int64 token ids of [batch, sequence]; those whose numbers are in
    ``held_out`` are not trained on. ``reference`` are the 16-bit model's states behind the last layer, by batch.
    """

    replica: Replica
    weights: ModelWeights
    roundings: InputRoundings
    folder: Path
    batches: Sequence[torch.Tensor]
    held_out: Collection[int]
    reference: Sequence[States]


def tune(task: TuningTask, settings: TuningSettings, advance: Callable[[int], None]) -> None:
    """Tune a model's norms and biases, and write those that are better, with the `Tuning`, beside the layers' files.

    An interrupted run resumes at its last step. ``advance`` is called after each step.
    """
    with torch.inference_mode(False), torch.enable_grad(), _deterministic(task.replica.device):
        model = _TunedModel(task, learns=settings.weights)
        with task.replica.around(model.layers, *held(task.replica.model, head_name(task.replica.model))):
            state = _State.resumed(task, settings, model)
            _descend(task, settings, model, state, advance)
    tuning = Tuning(state.before, state.least, state.best_step, state.moved)
    tensors = {}
    if not state.best_step:  # an attempt that was interrupted may have written them
        for path in task.folder.glob(FILES):
            path.unlink()
    else:
        tensors = {
            f"{member.step.name}.{out.role}": model.vector(name, state.best).to(torch_dtype(out.dtype)).cpu()
            for name, member in model.members.items()
            for out in member.step.outputs
        }
    empty = json.dumps({})
    metadata = {"gains": empty, "ranges": empty, ERRORS: empty, "tuning": json.dumps(astuple(tuning))}
    save_whole(task.folder / _RESULT, tensors, metadata)


def tuning_bytes(forward: int, length: int, vocabulary: int) -> int:
    """Return an upper bound on the bytes of a step beside a layer's weights, given those of a ``forward`` of a batch.

    A backward reads about three times what a forward holds at a time; the logits of one sample of ``length`` tokens
    are there six times in float32, with their exponentials and gradients.
    """
    return max(3 * forward, forward + 6 * 4 * length * vocabulary)


def _descend(
    task: TuningTask,
    settings: TuningSettings,
    model: _TunedModel,
    state: _State,
    advance: Callable[[int], None],
) -> None:
    """Go the steps that are left, and save the state after each evaluation."""
    every = max(1, settings.steps // EVALUATIONS)
    training = [number for number in range(len(task.batches)) if number not in task.held_out]

    def held_out(numbers: Numbers) -> float:
        divergences = [model.divergence(numbers, number) for number in task.held_out]
        return sum(divergences) / len(divergences)

    advance(state.step)
    if math.isnan(state.before):
        state.before = state.least = held_out(state.numbers)
    for step in range(state.step + 1, settings.steps + 1):
        number = _turn(training, step)
        share = min(1.0, step / _WARM_UP) * (1 - (step - 1) / settings.steps)
        gradients = model.gradients(state.numbers, number, partial(model.learn, share=share, step=step))
        state.descend(gradients, share)
        advance(1)
        if step % every == 0 or step == settings.steps:
            divergence = held_out(state.numbers)
            if divergence < state.least:
                state.least, state.best_step = divergence, step
                state.best = {name: tensor.clone() for name, tensor in state.numbers.items()}
                state.moved = model.write_weights()
            state.save()


def _turn(training: Sequence[int], step: int) -> int:
    """Return the batch of a step: all are taken, in an order that is another each time, before one comes again."""
    turn, place = divmod(step - 1, len(training))
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(turn))
    return training[int(order[place])]


class _State:
    """Numbers, moments of their gradients and the best numbers so far; a file holds them between evaluations."""

    def __init__(self, path: Path, identity: str, numbers: Numbers, latents: Numbers) -> None:
        self._path, self._identity, self._latents = path, identity, latents
        self.step, self.before, self.least, self.best_step, self.moved = 0, math.nan, math.nan, 0, 0.0
        self.numbers = numbers
        self._means, self._squares, self.best = (
            {name: torch.zeros_like(tensor) for name, tensor in numbers.items()} for _ in range(3)
        )

    @classmethod
    def resumed(cls, task: TuningTask, settings: TuningSettings, model: _TunedModel) -> _State:
        """Return the state that an earlier attempt saved for the same layers and settings, or a new one."""
        from safetensors import safe_open

        facts = [astuple(settings), [path.name for path in _layer_files(task.folder)], list(model.members)]
        path, identity = task.folder.parent / _PROGRESS, digest_of(facts, list(task.batches))
        state = cls(path, identity, model.zeros(), model.latent_tensors())
        if not path.is_file():
            return state
        with safe_open(path, framework="pt") as stored:
            saved = json.loads(stored.metadata()["state"])
            if saved["identity"] == identity:
                state.step, state.best_step = saved["step"], saved["best_step"]
                state.before, state.least, state.moved = saved["before"], saved["least"], saved["moved"]
                for kind, tensors in state._kinds().items():
                    for name, tensor in tensors.items():
                        tensor.copy_(stored.get_tensor(f"{kind}.{name}"))
        return state

    def save(self) -> None:
        """Write the state to its file."""
        numbers = {name: getattr(self, name) for name in ("step", "best_step", "before", "least", "moved")}
        kinds = self._kinds().items()
        tensors = {f"{kind}.{name}": tensor.cpu() for kind, of_kind in kinds for name, tensor in of_kind.items()}
        save_whole(self._path, tensors, {"state": json.dumps({"identity": self._identity, **numbers})})

    def descend(self, gradients: Numbers, share: float) -> None:
        """Go a step of a ``share`` of the first steps' size."""
        self.step += 1
        for name, gradient in gradients.items():
            moments = self._means[name], self._squares[name]
            descend(self.numbers[name], gradient, *moments, RATE * share, self.step)

    def _kinds(self) -> dict[str, Numbers]:
        vectors = {"numbers": self.numbers, "means": self._means, "squares": self._squares, "best": self.best}
        return {**vectors, "latents": self._latents}


class _TunedModel:
    """The model as it will be served, one layer of weights at a time, or all where the device has room for them."""

    def __init__(self, task: TuningTask, *, learns: bool) -> None:
        self._task, self._replica, model = task, task.replica, task.replica.model
        self.layers = task.replica.walkable.layers
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.members: dict[str, Member] = {
            member.parameter: member
            for member in task.weights.members
            if member.view is None and member.step.kernel is None and not member.step.untouched
            if member.parameter.startswith(tuple(f"{layer}." for layer in self.layers))
            and len(shapes.get(member.parameter, ())) == 1  # and no buffer
        }
        self._sizes = {name: shapes[name] for name in self.members}
        self._files = _stored_tensors(task.folder)
        self._calls: dict[int, tuple[States, list[Call]]] = {}
        size = sum(nbytes(model, held(model, layer)) for layer in self.layers)
        room, device = free_bytes(task.replica.device) // 2, task.replica.device
        self._is_resident = size < room
        self._latents: LatentWeights | None = None
        if learns:
            place = device if size + latent_bytes(task.weights.members) < room else "cpu"
            folder = task.folder.parent / WEIGHTS
            self._latents = LatentWeights(self.layers, task.weights.members, self._parts, folder, device, place)
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def zeros(self) -> Numbers:
        """Return the numbers of the model as GPTQ left it."""
        return {name: torch.zeros(size, device=self._replica.device) for name, size in self._sizes.items()}

    def vector(self, name: str, numbers: Numbers) -> torch.Tensor:
        """Return a norm's weight or a bias with its ``numbers``, in the model's dtype."""
        layer = next(number for number, layer in enumerate(self.layers) if name.startswith(f"{layer}."))
        return _tuned(self._parameters(layer)[name.removeprefix(f"{self.layers[layer]}.")], numbers[name])

    def divergence(self, numbers: Numbers, batch: int) -> float:
        """Return the mean KL divergence over a batch's tokens, in nats."""
        with torch.no_grad():
            leaving = self._through(numbers, batch)[-1]
            return sum(float(row) for row, _ in self._divergences(batch, leaving, slope=False))

    def gradients(self, numbers: Numbers, batch: int, learn: Callable[[int, Numbers], None]) -> Numbers:
        """Return the gradient of the divergence of a batch by each of the numbers.

        ``learn`` is called with each layer's number and the gradients by its latent weights.
        """
        with torch.no_grad():
            states = self._through(numbers, batch)
        rows = [slope for _, slope in self._divergences(batch, states.pop(), slope=True)]
        gradient, gradients = States(torch.cat([row for row in rows if row is not None])), Numbers()
        for layer in reversed(range(len(self.layers))):
            stored = states.pop().to(self._replica.device)
            entering_states = States(stored.hidden.detach(), stored.carried)
            leaves = input_leaves(entering_states)
            inside = {
                name: tensor.clone().requires_grad_()
                for name, tensor in numbers.items()
                if name.startswith(f"{self.layers[layer]}.")
            }
            learned = {} if self._latents is None else self._latents.leaves(layer)
            leaving = self._run(layer, inside, batch, entering_states, learned)
            before, within = layer_slopes(leaving, gradient, leaves, inside | learned)
            learn(layer, {name: within.pop(name) for name in learned})
            gradients |= within
            gradient = States(before.pop(HIDDEN), before)
        return gradients

    def learn(self, layer: int, gradients: Numbers, *, share: float, step: int) -> None:
        """Go a step of a layer's latent weights."""
        if self._latents is not None:
            self._latents.descend(layer, gradients, share, step)

    def write_weights(self) -> float:
        """Write the weights as they round now beside the layers' files; return the share that differs from GPTQ's."""
        return 0.0 if self._latents is None else self._latents.write(self._task.folder)

    def latent_tensors(self) -> Numbers:
        """Return the tensors of the latent weights, which may be written to, by name."""
        return {} if self._latents is None else dict(self._latents.tensors())

    def _through(self, numbers: Numbers, batch: int) -> list[States]:
        """Return a batch's states that enter each layer, and at last those that leave the model."""
        states = [self._call(batch)[0]]
        for layer in range(len(self.layers)):
            leaving = self._run(layer, numbers, batch, states[-1].to(self._replica.device))
            states.append(leaving if self._is_resident else leaving.to("cpu"))
        return states

    def _divergences(
        self, batch: int, leaving: States, *, slope: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield each sample's share in the mean divergence of a batch, and with ``slope`` the gradient at ``leaving``.

        One sample at a time, since logits of a vocabulary take more than a layer; all at once where the hidden states
        are those of several streams, which come before the samples.
        """
        replica, call, tokens = self._replica, self._call(batch)[1][-1], self._task.batches[batch]

        def log_likelihoods(rows: slice, hidden: torch.Tensor) -> torch.Tensor:
            ids = tokens[rows].to(replica.device)
            return model_logits(replica, self.layers, ids, call.returned(hidden)).float().log_softmax(-1)

        samples = [slice(row, row + 1) for row in range(len(tokens))]
        for rows in samples if len(leaving.hidden) == len(tokens) else [slice(None)]:
            hidden = leaving.hidden[rows].to(replica.device).detach().requires_grad_(slope)
            reference = _plain(self._task.reference[batch].hidden[rows].to(replica.device))
            with torch.no_grad():
                aim = log_likelihoods(rows, reference)
            lost = aim - log_likelihoods(rows, hidden)
            divergence = (aim.exp() * lost).sum(-1).sum() / tokens.numel()
            yield divergence.detach(), torch.autograd.grad(divergence, hidden)[0] if slope else None

    def _run(self, layer: int, numbers: Numbers, batch: int, states: States, learned: Numbers | None = None) -> States:
        """Return the states behind a layer with its ``numbers``, with inputs rounded as served.

        ``learned`` are latent weights to take in the place of the model's.
        """
        name, model = self.layers[layer], self._replica.model
        module, inside = model.get_submodule(name), f"{name}."
        parameters = dict(self._parameters(layer))
        for parameter in self.members:
            if parameter in numbers and parameter.startswith(inside):
                inner = parameter.removeprefix(inside)
                parameters[inner] = _tuned(parameters[inner], numbers[parameter])
        if self._latents is not None:
            self._latents.replace_weights(layer, learned or {}, parameters, len(inside))
        linear, experts = (
            {of: _straight(rounding) for of, rounding in roundings.items() if of.startswith(inside)}
            for roundings in (self._task.roundings.linear, self._task.roundings.experts)
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, parameters, args, kwargs)

        with rounding_inputs(model, linear), rounding_experts(model, stacks(model, name, experts), experts):
            return self._call(batch)[1][layer].run(forward, states, empty_cache(model))

    def _parameters(self, layer: int) -> dict[str, torch.Tensor]:
        """Return a layer's parameters and buffers as served, on the device, by their names in the layer."""
        if layer in self._layers:
            return self._layers[layer]
        if not self._is_resident:
            self._layers.clear()
        name, model, device = self.layers[layer], self._replica.model, self._replica.device
        inside, names, module = f"{name}.", held(model, name), model.get_submodule(name)
        self._replica.weights.load(names)
        tensors = {of: tensor.detach() for of, tensor in (*module.named_parameters(), *module.named_buffers())}
        copied = set[str]()
        for member in self._task.weights.members:
            if member.parameter.startswith(inside) and member.step.name in self._files:
                parameter = member.parameter.removeprefix(inside)
                tensor = self._served(member).to(device, tensors[parameter].dtype)
                if member.view is None:
                    tensors[parameter] = tensor
                    continue
                if parameter not in copied:  # what is mapped from a file must not be written to
                    tensors[parameter] = tensors[parameter].clone()
                    copied.add(parameter)
                member.view(tensors[parameter]).copy_(tensor)
        self._replica.weights.free(names)
        self._layers[layer] = tensors
        return tensors

    def _served(self, member: Member) -> torch.Tensor:
        """Return the tensor of a member from the layers' files, decoded, on the CPU."""
        parts = self._parts(member)
        return next(iter(parts.values())) if member.step.kernel is None else member.kernel.decode(parts)

    def _parts(self, member: Member) -> Parts:
        """Return what is stored of a member in the layers' files, by role, on the CPU."""
        from safetensors import safe_open

        path, roles = self._files[member.step.name]
        with safe_open(path, framework="pt") as stored:
            return {role: stored.get_tensor(f"{member.step.name}.{role}") for role in roles}

    def _call(self, batch: int) -> tuple[States, list[Call]]:
        """Return a batch's states that enter the first layer, and the calls of all layers."""
        if batch not in self._calls:
            [(states, calls)] = record(self._replica, [self._task.batches[batch]])
            states = States(_plain(states.hidden)).to("cpu")
            self._calls[batch] = states, [call.mapped(self._normal) for call in calls]
        return self._calls[batch]

    def _normal(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that autograd can save, the same one for the same."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, _plain(tensor)  # the first too, so that no other gets its id
        return self._copies[id(tensor)][1]


@cache
def _straight(rounding: Rounding) -> Rounding:
    """Return ``rounding`` with the gradient of the tensor itself: the same function object for the same rounding."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _straight_through().apply(tensor, rounding)
        return result

    return rounded


@cache
def _straight_through() -> Any:
    class StraightThrough(torch.autograd.Function):
        """Round in the forward, and hand the gradient on in the backward."""

        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, rounding: Rounding) -> torch.Tensor:
            rounded = rounding(tensor)
            return tensor.view_as(tensor) if rounded is tensor else rounded

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> Any:
            return gradient, None

    return StraightThrough


def _tuned(vector: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    tuned: torch.Tensor = (vector.float() * (1 + shares)).to(vector.dtype)
    return tuned


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can save: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _stored_tensors(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Return the file and the roles of the tensors of each step in the layers' files."""
    from safetensors import safe_open

    files: dict[str, tuple[Path, list[str]]] = {}
    for path in _layer_files(folder):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                step, _, role = name.rpartition(".")
                files.setdefault(step, (path, []))[1].append(role)
    return files


def _layer_files(folder: Path) -> list[Path]:
    tuned = {folder / _RESULT, *folder.glob(FILES)}
    return sorted(path for path in folder.glob("*.safetensors") if path not in tuned)


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Within the block, have a GPU take deterministic kernels where PyTorch has them; the switch is the process's.

    Those of a CPU are, and the switch imports a compiler, which takes seconds.
    """
    if torch.device(device).type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
