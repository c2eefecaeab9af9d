"""The parts of a model: quantizable weights, weights kept in 16 bit, carried tensors, and its contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantmint.calibration.encodings import Encoded
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.model.experts import WeightSource

OUTPUT_HEAD = "output head"
UNQUANTIZED = "vLLM builds it without a quantization"
"""Reasons why a module stays in 16 bit."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's parts under their names on disk; single experts under the names that they are written with.

    ``linear`` are the modules that schemes apply to, with [out_features, in_features]; ``kept`` the modules with a
    matrix that stay in 16 bit, with the reason (an output head is among them also where it shares the embedding's
    tensor); ``copied`` counts the other tensors, which are carried over as they are, by reason. ``unclaimed`` are
    tensors or modules inside the decoder that no rule knows, with the reason: a recipe must exclude them by name.
    ``attention`` are the attention modules in the order of their layers; ``parameters`` counts all elements of the
    model. ``predictor`` are the prefixes of a multi-token predictor's modules, on disk and in vLLM, and
    ``predictor_linear`` its linear modules that vLLM builds with a quantization, with [out_features, in_features]: they
    are among ``kept`` too, a stack of experts by the module that holds it, and stay in 16 bit unless the recipe's
    ``mtp`` says otherwise. ``head`` is the output head with [vocabulary, hidden], where it has a tensor of its own; it
    stays in 16 bit unless the recipe overrides it by its name.

    ``weights`` says for each linear module where its weight lies: the tensors that it names as stacks are not in the
    quantized checkpoint. ``biases`` are the biases of single experts that are stacked, by module. ``encoded`` maps each
    tensor of the source that is not in 16 bit to its encoding, and ``dropped`` are tensors of its quantization that no
    decoded weight needs. ``modules`` maps linear and attention modules to their names in transformers' model, with
    ``{experts}.{number}.{projection}`` for one of the experts that it stacks; ``stacks`` are the parameters that stack
    them there. ``aliases`` are the names by which vLLM asks for a module, where they are not its own; none where no
    name reaches it. ``joined`` are kinds of modules (names with * for numbers) behind whose rows vLLM puts those of
    other modules in one matrix, with the last names of all modules in it. ``walk_obstacle`` is why the layers cannot be
    run one at a time, ``text_obstacle`` why the model cannot be run on text alone, each as part of a sentence;
    ``unreached`` are the linear and attention modules that text alone does not run, so that nothing of them can be
    measured. ``latent`` is whether attention caches one latent for all heads; ``absorbed`` are linear modules that vLLM
    folds into their neighbours when it loads them; ``scales`` are tensors of the model itself that are called like
    those of a quantization; ``unquantizable`` counts the elements of the decoder's matrices that vLLM builds without a
    quantization. ``quantized_by`` is the quantization that the folder declares, but for FP8 in blocks; ``undecodable``
    is why the folder is no source, as part of a sentence; ``rounds_inputs`` is whether the configuration rounds the
    inputs of linear layers.

    ``faults`` are contradictions between the configuration and the tensors on disk, each a rule, a tensor and words:
    what the configuration implies and nobody stored, what has another shape, and what is stored for no module.
    """

    linear: Mapping[str, tuple[int, int]]
    kept: Mapping[str, str]
    attention: tuple[str, ...]
    parameters: int
    weights: Mapping[str, WeightSource] = field(default_factory=dict, compare=False)
    encoded: Mapping[str, Encoded] = field(default_factory=dict, compare=False)
    dropped: tuple[str, ...] = field(default=(), compare=False)
    modules: Mapping[str, str] = field(default_factory=dict, compare=False)
    stacks: tuple[str, ...] = field(default=(), compare=False)
    copied: Mapping[str, int] = field(default_factory=dict, compare=False)
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    predictor: tuple[str, ...] = ()
    predictor_linear: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    head: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    walk_obstacle: str | None = field(default=None, compare=False)
    text_obstacle: str | None = field(default=None, compare=False)
    unreached: tuple[str, ...] = field(default=(), compare=False)
    latent: bool = False
    absorbed: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    unquantizable: int = 0
    quantized_by: str | None = field(default=None, compare=False)
    undecodable: str | None = field(default=None, compare=False)
    faults: tuple[tuple[str, str, str], ...] = field(default=(), compare=False)
    biases: Mapping[str, WeightSource] = field(default_factory=dict, compare=False)
    rounds_inputs: bool = field(default=False, compare=False)

    @property
    def decoded_away(self) -> frozenset[str]:
        """Return the tensors of the source that decoding or quantizing drops: scales, and what belongs to them."""
        return frozenset(self.dropped).union(*(encoded.scales for encoded in self.encoded.values()))

    @property
    def quantizable(self) -> Mapping[str, tuple[int, int]]:
        """Return [out_features, in_features] of all modules that can have a scheme: predictor and head included."""
        return {**self.linear, **self.predictor_linear, **self.head}

    @property
    def predictor_stacks(self) -> frozenset[str]:
        """Return the modules of a predictor that hold a stack of experts, which are single modules once quantized."""
        stacks = (self.weights[module] for module in self.predictor_linear)
        return frozenset(source.tensor.rpartition(".")[0] for source in stacks if source.expert is not None)

    @property
    def encoded_predictor(self) -> str | None:
        """Return a tensor of the predictor that the source has quantized; None without one."""
        prefixes = tuple(f".{prefix}" for prefix in self.predictor)
        return next((name for name in self.encoded if any(prefix in f".{name}" for prefix in prefixes)), None)

    def require_whole(self, where: object) -> None:
        """Raise `UserError`, naming ``where``, if the tensors are not those that the configuration implies."""
        if self.faults:
            (_, name, message), more = self.faults[0], len(self.faults) - 1
            others = f"; {more} more tensor{'s contradict' if more > 1 else ' contradicts'} it" if more else ""
            raise UserError(f"{where}: found weights that are not those of config.json: {name}: {message}{others}.")
