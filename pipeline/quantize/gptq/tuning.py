"""Tune the norms of a quantized model end to end, by the KL divergence from the 16-bit model's predictions.

A norm's few numbers decide how much of each channel a layer reads; they do not fit a few texts by heart as weights do
(docs/notes/measurements.md has the attempts). Where asked, the rounding of weights is learned too, see `latents`. A
step takes a batch through the layers and its gradient back through them, see `tuned_model`. Samples that are held out,
from GPTQ as well, say which step's numbers are stored, or that the model stays as GPTQ left it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path

from quantmint.calibration.activations import digest_of, save_whole
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import head_name
from quantmint.calibration.weights import held
from quantmint.pipeline.quantize.engines.stream.shard import ERRORS
from quantmint.pipeline.quantize.formats.checkpoint import torch_dtype
from quantmint.pipeline.quantize.gptq.descent import descend
from quantmint.pipeline.quantize.gptq.latents import FILES
from quantmint.pipeline.quantize.gptq.request import Tuning, TuningSettings
from quantmint.pipeline.quantize.gptq.tuned_model import VECTORS, Numbers, TunedModel, TuningTask, layer_files

RATE = 0.003
"""First step of a norm's number, as a share of that number; steps fall to zero linearly."""
EVALUATIONS = 10
"""Times that the held-out divergence is measured, beside that of the norms that GPTQ left."""
_WARM_UP = 10
_PROGRESS = "tuning.safetensors"


def tune(task: TuningTask, settings: TuningSettings, advance: Callable[[int], None]) -> None:
    """Tune a model's norms and biases, and write those that are better, with the `Tuning`, beside the layers' files.

    An interrupted run resumes at its last step. ``advance`` is called after each step.
    """
    with torch.inference_mode(False), torch.enable_grad(), _deterministic(task.replica.device):
        model = TunedModel(task, learns=settings.weights)
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
    save_whole(task.folder / VECTORS, tensors, metadata)


def _descend(
    task: TuningTask,
    settings: TuningSettings,
    model: TunedModel,
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
    def resumed(cls, task: TuningTask, settings: TuningSettings, model: TunedModel) -> _State:
        """Return the state that an earlier attempt saved for the same layers and settings, or a new one."""
        from safetensors import safe_open

        facts = [astuple(settings), [path.name for path in layer_files(task.folder)], list(model.members)]
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
