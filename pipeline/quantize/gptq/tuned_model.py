"""A model whose norms and weights are tuned, run as it will be served, one layer at a time, forward and backward.

A backward runs a layer again, except the last layers, of which a GPU with room for them keeps what the forward left.
Inputs are rounded as they are served, with the gradient of what is not rounded (arXiv 1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from quantmint.calibration.activations import States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.calls import Call, record
from quantmint.calibration.experts import rounding_experts, stacks
from quantmint.calibration.inputs import Rounding, rounding_inputs
from quantmint.calibration.lazy import torch
from quantmint.calibration.replica import Replica
from quantmint.calibration.room import SHARE, free_bytes, layers_bytes, learning_place
from quantmint.calibration.sensitivity import HIDDEN, input_leaves, layer_slopes, model_logits
from quantmint.calibration.weights import held
from quantmint.pipeline.quantize.gptq.latents import FILES, LatentWeights, latent_bytes
from quantmint.pipeline.quantize.gptq.runner import InputRoundings
from quantmint.pipeline.quantize.gptq.weights import Member, ModelWeights
from quantmint.pipeline.quantize.schemes.scheme import Parts

WEIGHTS = "weights"
"""Folder beside the layers' files with their weights before rounding, where rounding is learned."""
VECTORS = "vectors.safetensors"
"""The file of tuned vectors beside the layers' files."""

_TIMES = 16
"""How many times the hidden states a GPU's free memory must be to hold them."""
Numbers = dict[str, "torch.Tensor"]
"""Shares that are added to each number of a vector, float32, by the name of its parameter."""


@dataclass(frozen=True, slots=True)
class TuningTask:
    """A model that GPTQ went through: its ``replica``, with nothing loaded, and what says how it is served.

    ``folder`` holds the layers' files. ``batches`` are int64 token ids of [batch, sequence]; those whose numbers are in
    ``held_out`` are not trained on. ``reference`` are the 16-bit model's states behind the last layer, by batch.
    ``narrow`` are the steps whose inputs have four bits.
    """

    replica: Replica
    weights: ModelWeights
    roundings: InputRoundings
    folder: Path
    batches: Sequence[torch.Tensor]
    held_out: Collection[int]
    reference: Sequence[States]
    narrow: Collection[str]


@dataclass(frozen=True, slots=True)
class _LayerGraph:
    """A layer that was run: the states ``leaving`` it, and what they came from, by name and requiring gradients."""

    entering: dict[str, torch.Tensor]
    numbers: Numbers
    latents: Numbers
    leaving: States


class TunedModel:
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
        device, size = task.replica.device, layers_bytes(task.replica)
        free = free_bytes(device)
        self._is_resident = size < free // 2
        self._kept: int | None = None  # number of the last layers whose graphs a backward finds
        is_small = _TIMES * sum(states.nbytes for states in task.reference) < free
        self._place = device if is_small else "cpu"
        self._reference = [states.to(self._place) for states in task.reference]
        self._latents: LatentWeights | None = None
        if learns:
            place = learning_place(latent_bytes(task.weights.members), size, device, free)
            folder = task.folder.parent / WEIGHTS
            read = partial(LatentWeights, self.layers, task.weights.members, self._parts, folder)
            self._latents = read(device, place, task.narrow)
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
            leaving = self._call(batch)[0]
            for layer in range(len(self.layers)):
                leaving = self._run(layer, numbers, batch, leaving.to(self._replica.device))
            return sum(float(row) for row, _ in self._divergences(batch, leaving, slope=False))

    def gradients(self, numbers: Numbers, batch: int, learn: Callable[[int, Numbers], None]) -> Numbers:
        """Return the gradient of the divergence of a batch by each of the numbers.

        ``learn`` is called with each layer's number and the gradients by its latent weights.
        """
        forwards = None
        try:
            forwards = self._forwards(numbers, batch)
        except torch.OutOfMemoryError:
            if not self._kept:
                raise
            self._kept = 0  # memory in fragments holds less than is free
        # Not within the block: the error holds the graphs that there was no room for.
        states, graphs, gradient = forwards or self._forwards(numbers, batch)
        gradients = Numbers()
        for layer in reversed(range(len(self.layers))):
            entering = states.pop()
            graph = graphs.pop(layer) if layer in graphs else self._forward(layer, numbers, batch, entering)
            before, within = layer_slopes(graph.leaving, gradient, graph.entering, graph.numbers | graph.latents)
            learn(layer, {name: within.pop(name) for name in graph.latents})
            gradients |= within
            gradient = States(before.pop(HIDDEN), before)
        return gradients

    def _forwards(self, numbers: Numbers, batch: int) -> tuple[list[States], dict[int, _LayerGraph], States]:
        """Return a batch's states that enter each layer, graphs by layer, and the gradient at what leaves the model.

        The first batch shows what a graph takes; from then on those of the last layers are kept.
        """
        states, graphs, largest = [self._call(batch)[0]], dict[int, _LayerGraph](), 0
        for layer in range(len(self.layers)):
            before = self._allocated()
            graph = self._forward(layer, numbers, batch, states[-1])
            largest = max(largest, self._allocated() - before)
            leaving = graph.leaving.detached()
            states.append(leaving if self._is_resident else leaving.to("cpu"))
            if self._kept and layer >= len(self.layers) - self._kept:
                graphs[layer] = graph
            del graph
        if self._kept is None:
            config, length = self._replica.model.config.get_text_config(), self._task.batches[batch].shape[1]
            room = free_bytes(self._replica.device) - tuning_bytes(largest, length, int(config.vocab_size))
            self._kept = max(0, int(SHARE * room)) // largest if largest else 0
        rows = [slope for _, slope in self._divergences(batch, states.pop(), slope=True)]
        return states, graphs, States(torch.cat([row for row in rows if row is not None]))

    def _allocated(self) -> int:
        """Return the bytes that are taken on a GPU; 0 for a CPU, whose memory is not counted."""
        device = self._replica.device
        return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0

    def _forward(self, layer: int, numbers: Numbers, batch: int, entering: States) -> _LayerGraph:
        """Run a layer so that its gradients can be asked for, by copies of its numbers and of its latent weights."""
        there = entering.to(self._replica.device).detached()
        leaves = input_leaves(there)
        inside = {
            name: tensor.clone().requires_grad_()
            for name, tensor in numbers.items()
            if name.startswith(f"{self.layers[layer]}.")
        }
        learned = {} if self._latents is None else self._latents.leaves(layer)
        return _LayerGraph(leaves, inside, learned, self._run(layer, inside, batch, there, learned))

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
            reference = _plain(self._reference[batch].hidden[rows].to(replica.device))
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
            states = States(_plain(states.hidden)).to(self._place)
            self._calls[batch] = states, [call.mapped(self._normal) for call in calls]
        return self._calls[batch]

    def _normal(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that autograd can save, the same one for the same."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, _plain(tensor)  # the first too, so that no other gets its id
        return self._copies[id(tensor)][1]


def tuning_bytes(forward: int, length: int, vocabulary: int) -> int:
    """Return an upper bound on the bytes of a step beside a layer's weights, given those of a ``forward`` of a batch.

    A backward reads about three times what a forward holds at a time; the logits of one sample of ``length`` tokens
    are there six times in float32, with their exponentials and gradients.
    """
    return max(3 * forward, forward + 6 * 4 * length * vocabulary)


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
    for path in layer_files(folder):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                step, _, role = name.rpartition(".")
                files.setdefault(step, (path, []))[1].append(role)
    return files


def layer_files(folder: Path) -> list[Path]:
    """Return the layers' files of GPTQ in ``folder``, in the order of layers."""
    tuned = {folder / VECTORS, *folder.glob(FILES)}
    return sorted(path for path in folder.glob("*.safetensors") if path not in tuned)
