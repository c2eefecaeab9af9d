"""What a layer is made of, as folds need to know it: asked of the model, and proven.

    anatomies, left = study(one, layers, tokens)

A layer is run, and what enters a module in the memory that a norm has written to makes it a reader of that norm. Values
and their output, and the matrices of an MLP, are found by their place. Each fold is then made with random numbers, in
float32, and the layer must compute the same: what does not is left out, and named. One layer of every kind is studied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calibration.calls import Call, record
from calibration.measurement import Measurement, recording_cache
from calibration.observers import Observation
from calibration.replica import Replica
from calibration.weights import held
from pipeline.base.errors import StageError
from pipeline.quantize.engines.stream.folds import (
    Anatomy,
    Change,
    Matrix,
    Norm,
    Outside,
    Pair,
    Turned,
    hadamard,
    signs,
)
from pipeline.quantize.engines.stream.kernels import MX_GROUP
from pipeline.quantize.model.weights import place_of, stacks_experts

if TYPE_CHECKING:
    import torch

_TOLERANCE = 1e-4
_TOKENS = 32
_SHARE = 0.9  # of the tokens
_DERIVED = ".inv_freq"  # is computed when a model is built, and was saved by some


def require_turnable(
    one: Replica, layers: Sequence[str], anatomies: Mapping[str, Anatomy], tokens: torch.Tensor, unknown: Iterable[str]
) -> Outside:
    """What of a model lies outside its layers, where all can be turned; it does not know ``unknown`` tensors on disk.

    Raises `StageError` with what it is that cannot.
    """
    import torch

    model, text = one.model, one.model.config.get_text_config()
    width = int(text.hidden_size)
    if width % MX_GROUP:
        raise _unturnable(f"its hidden size is {width}, no multiple of {MX_GROUP}")
    if text is not model.config:
        raise _unturnable("it is more than a language model, and what the rest of it writes would not be turned")
    stranger = next((each for each in unknown if not each.endswith(_DERIVED)), None)
    if stranger is not None:
        raise _unturnable(f"{stranger} is on the disk, and transformers has no place for it")
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside = tuple(f"{name}." for name in layers)
    norms = [
        name
        for name, module in model.named_modules()
        if not name.startswith(inside)
        and [(part.ndim, len(part)) for part in module.parameters(recurse=False)] == [(1, width)]
    ]
    if len(norms) != 1 or not isinstance(head, torch.nn.Linear):
        raise _unturnable(f"a norm of width {width} and a head are expected behind its layers, found {norms}")
    reader = Matrix(f"{names[id(head)]}.weight")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(one.device)

    one.weights.load([f"{norms[0]}.weight"])
    norm = norm_of(model, norms[0], (reader,), drawn)
    one.weights.free([f"{norms[0]}.weight"])
    outside = None if norm is None else Outside(f"{names[id(embedding)]}.weight", norm)
    if outside is None:
        raise _unturnable(f"{norms[0]} is no norm that multiplies by its weight")
    turn = hadamard(signs(width))
    for name, anatomy in anatomies.items():
        if anatomy.unturnable is not None:
            raise _unturnable(f"{name}.{anatomy.unturnable}")
    turned = replace(one, weights=Turned(one, {}, outside))
    states = [_play(each, layers, tokens)[0].float() for each in (one, turned)]
    if not _equal(turn(states[0]), states[1], 2.0**-6 if model.dtype != torch.float32 else _TOLERANCE):
        raise _unturnable("more than its embedding enters its first layer")
    return outside


def _unturnable(why: str) -> StageError:
    return StageError(
        f"rotation: this model's residual stream cannot be turned: {why}.", hint="Take `rotation: false` for it."
    )


def study(
    one: Replica, layers: Sequence[str], tokens: torch.Tensor, *, values: bool = True
) -> tuple[dict[str, Anatomy], list[str]]:
    """Find out what each layer is made of, from one of every kind: by name, and what does not hold of which.

    ``tokens`` is int64 [batch, sequence]. Without ``values`` nobody may touch the values of the attention, whose
    ranges are known. A fold that changes what the layer computes is left out, and named.
    """
    _, calls = _play(one, layers, tokens)
    known: dict[str, tuple[Anatomy, list[str]]] = {}
    found: dict[str, Anatomy] = {}
    notes: list[str] = []
    for number, name in enumerate(layers):
        module = one.model.get_submodule(name)
        kind = repr([(each, tuple(part.shape)) for each, part in module.named_parameters()] + [str(module)])
        if kind not in known:
            weights = held(one.model, name)
            one.weights.load(weights)
            attention = next((each for each in one.attention.values() if each.startswith(f"{name}.")), "")
            trial = _Trial(one, module, calls[number])
            known[kind] = trial.anatomy(attention.removeprefix(f"{name}."), values=values)
            one.weights.free(weights)
        found[name], faults = known[kind]
        notes += [f"{name}.{fault}" for fault in faults]
    return found, notes


def _play(one: Replica, layers: Sequence[str], tokens: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
    """What enters the first layer for a few tokens, and how all are called; the weights for that are let go of."""
    inside = tuple(f"{name}." for name in layers)
    outside = [name for name in one.body if not name.startswith(inside)]
    one.weights.load(outside)
    found = next(record(one, list(layers), [tokens[:1, :_TOKENS]]))
    one.weights.free(outside)
    return found


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether states [..., D] are equal for most tokens: some may be sent to another expert by a last bit."""
    error = (one - other).norm(dim=-1) / other.norm(dim=-1)
    return bool(error.flatten().quantile(_SHARE) < tolerance)


class _Trial:
    """One layer in float32 and what it makes of random hidden states; other weights than its own, so that all count."""

    def __init__(self, one: Replica, layer: Any, call: Call) -> None:
        import torch

        self._one, self._call = one, call
        self.width = int(one.model.config.get_text_config().hidden_size)
        self._random = torch.Generator().manual_seed(0)
        self.layer = copy.deepcopy(layer).float()
        for parameter in self.layer.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * self._drawn(*parameter.shape)
        self.hidden = self._drawn(1, _TOKENS, self.width)
        with torch.inference_mode():
            self.sound = self.run(self.layer, self.hidden)

    def _drawn(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, generator=self._random).to(self._one.device)

    def run(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        cache = recording_cache(Measurement(Observation()), self._one.attention)
        return self._call.run(layer, hidden, cache)

    def keeps(self, change: Callable[[Any], None], turn: Change = lambda x: x) -> bool:
        """Whether a changed layer computes the same of turned states, turned."""
        import torch

        changed = copy.deepcopy(self.layer)
        with torch.inference_mode():
            try:
                change(changed)
                return _equal(self.run(changed, turn(self.hidden)), turn(self.sound))
            except RuntimeError:  # shapes that do not fit
                return False

    def anatomy(self, attention: str, *, values: bool) -> tuple[Anatomy, list[str]]:
        observed, writers = self._observed()
        norms = tuple(norm for norm in observed if norm.readers)
        faults: list[str] = []

        def proven(what: str, holds: bool) -> bool:
            if not holds:
                faults.append(what)
            return holds

        scaled = tuple(norm for norm in norms if proven(norm.weight, self._keeps_norm(norm)))
        value = self._value(attention) if values else None
        if value is None or not self._keeps_pair(value):
            value = None
            faults.append(f"{attention}.v_proj")
        inner = tuple(pair for pair in self._inner() if proven(pair.first.weight, self._keeps_pair(pair)))
        found = Anatomy(self.width, norms, writers, value, inner)
        return replace(found, unturnable=self._unturnable(found, observed), norms=scaled), faults

    def _unturnable(self, found: Anatomy, norms: Iterable[Norm]) -> str | None:
        """Why the layer's residual stream cannot be turned."""
        if self.width % MX_GROUP:
            return None
        after = next((norm.weight for norm in norms if norm.width == self.width and not norm.readers), None)
        if after is not None:
            return f"{after} is of a norm that no linear module reads"
        turn, heads = hadamard(signs(self.width)), hadamard()
        if self.keeps(lambda root: found.turn(root, turn, heads), turn):
            return None
        return "forward: turned, it does not compute the same"

    def _factors(self, count: int) -> torch.Tensor:
        return self._drawn(count).exp()

    def _keeps_norm(self, norm: Norm) -> bool:
        return self.keeps(lambda root: norm.scale(root, self._factors(norm.width)))

    def _keeps_pair(self, pair: Pair) -> bool:
        return self.keeps(lambda root: pair.scale(root, self._factors(pair.count(root))))

    def _observed(self) -> tuple[tuple[Norm, ...], tuple[Matrix, ...]]:
        import torch

        made: dict[int, tuple[str, torch.Tensor]] = {}
        readers: dict[str, list[Matrix]] = {}
        others: list[Matrix] = []
        handles = []

        def after(name: str) -> Any:
            def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
                made[output.data_ptr()] = name, output
                readers[name] = []

            return hook

        def before(reading: Sequence[Matrix], writing: Sequence[Matrix]) -> Any:
            def hook(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                entering = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
                norm, _ = made.get(entering.data_ptr(), ("", None))
                if norm:
                    readers[norm] += [each for each in reading if each not in readers[norm]]
                    others.extend(each for each in writing if each not in reading)
                else:
                    others.extend(writing)

            return hook

        for name, module in self.layer.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if stacks_experts(module):
                stacks = _stacks(name, module)
                reading = list(dict.fromkeys(each for part, each in stacks.items() if part != "down_proj"))
                handles.append(
                    module.register_forward_pre_hook(before(reading, [stacks["down_proj"]]), with_kwargs=True)
                )
            elif list(own) == ["weight"] and own["weight"].ndim == 1:
                handles.append(module.register_forward_hook(after(name)))
            elif "weight" in own and own["weight"].ndim == 2:
                matrix = [Matrix(f"{name}.weight", f"{name}.bias" if own.get("bias") is not None else None)]
                handles.append(module.register_forward_pre_hook(before(matrix, matrix), with_kwargs=True))
        with torch.inference_mode():
            self.run(self.layer, self.hidden)
            for handle in handles:
                handle.remove()
            norms = [norm_of(self.layer, name, tuple(found), self._drawn) for name, found in readers.items()]
        writers = [each for each in dict.fromkeys(others) if self._outputs(each) == self.width]
        return tuple(each for each in norms if each is not None), tuple(writers)

    def _outputs(self, matrix: Matrix) -> int:
        return int(self.layer.get_parameter(matrix.weight).shape[-1 if matrix.transposed else -2])

    def _value(self, attention: str) -> Pair | None:
        import torch

        module = self.layer.get_submodule(attention)
        first, second, width = (getattr(module, name, None) for name in ("v_proj", "o_proj", "head_dim"))
        if not isinstance(first, torch.nn.Linear) or not isinstance(second, torch.nn.Linear) or not width:
            return None
        if first.out_features % width or second.in_features % first.out_features:
            return None
        repeats = second.in_features // first.out_features
        return Pair(_linear(attention, "v_proj", first), _linear(attention, "o_proj", second), None, width, repeats)

    def _inner(self) -> Iterator[Pair]:
        import torch

        for name, module in self.layer.named_modules():
            parts: list[Any] = [getattr(module, each, None) for each in ("up_proj", "down_proj", "gate_proj")]
            if all(isinstance(part, torch.nn.Linear) for part in parts):
                up, down, gate = parts
                first, second = _linear(name, "up_proj", up), _linear(name, "down_proj", down)
                yield Pair(first, second, _linear(name, "gate_proj", gate), up.out_features, 1)


def norm_of(root: Any, name: str, readers: tuple[Matrix, ...], drawn: Callable[..., torch.Tensor]) -> Norm | None:
    """A module as a norm, where its output is its weight, or that plus one, times what the weight has no part in."""
    module = copy.deepcopy(root.get_submodule(name)).float()
    width = len(module.weight)
    entering = drawn(3, width)

    def of(weight: float) -> torch.Tensor:
        module.weight.data.fill_(weight)
        found: torch.Tensor = module(entering)
        return found

    offset = next((each for each in (0.0, 1.0) if not bool(of(-each).any())), None)
    return None if offset is None else Norm(f"{name}.weight", offset, width, readers)


def _linear(path: str, name: str, module: Any) -> Matrix:
    full = f"{path}.{name}" if path else name
    return Matrix(f"{full}.weight", None if module.bias is None else f"{full}.bias")


def _stacks(name: str, experts: Any) -> dict[str, Matrix]:
    """The parameters of stacked experts, by the projection that they are or end with."""
    found: dict[str, Matrix] = {}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        place = place_of(experts, name, 0, projection)
        found[projection] = Matrix(f"{name}.{place.parameter}", None, place.transposed)
    return found
