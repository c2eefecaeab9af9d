"""One copy of a model on one device: what every mode of calibration runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantmint.calibration.calls import Loop, loop_of
from quantmint.calibration.errors import NotReplayableError
from quantmint.calibration.lazy import torch
from quantmint.calibration.parts import attention_modules, run_trunk, shared_attention, trunk_of
from quantmint.calibration.weights import Shards, Weights, build, held, nbytes, settle_buffers


@dataclass(frozen=True, slots=True)
class Replica:
    """A model with its weights on disk, none or some of which are loaded on ``device``.

    ``owned`` maps tensor names on disk to the model's parameter names. ``attention`` names the attention modules;
    ``shared`` maps those that use another module's keys and values to that module. ``loop`` says how the layers are run
    one at a time, or is the error that says why they cannot be.
    """

    model: Any
    weights: Weights
    owned: Mapping[str, str]
    device: str
    attention: tuple[str, ...] = field(repr=False)
    shared: Mapping[str, str] = field(repr=False)
    loop: Loop | NotReplayableError = field(repr=False)

    @property
    def obstacle(self) -> str | None:
        """Return why the layers cannot be run one at a time, as part of a sentence; None if they can."""
        return str(self.loop) if isinstance(self.loop, NotReplayableError) else None

    @property
    def walkable(self) -> Loop:
        """Return the layers that can be run one at a time. Raises `NotReplayableError` where they cannot."""
        if isinstance(self.loop, NotReplayableError):
            raise self.loop
        return self.loop

    def run(self, batch: torch.Tensor, cache: Any) -> None:
        """Run the model without its output head on token ids, int64 [batch, sequence], with ``cache``.

        Raises `CalibrationError` where transformers cannot run it.
        """
        run_trunk(self.model, batch.to(self.device), cache)

    @property
    def tied(self) -> dict[str, list[str]]:
        """Map each module to the other modules that share its weight, such as the blocks that Zamba runs repeatedly."""
        sharers: dict[str, list[str]] = {}
        for target, source in dict(getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            if target.endswith(".weight") and source.endswith(".weight"):
                sharers.setdefault(source.removesuffix(".weight"), []).append(target.removesuffix(".weight"))
        return sharers

    @property
    def body(self) -> list[str]:
        """Return the names of the parameters and persistent buffers of the model without its output head."""
        trunk = trunk_of(self.model)
        return held(self.model, next(name for name, module in self.model.named_modules() if module is trunk))

    @property
    def nbytes(self) -> int:
        """Return the bytes that `body` takes on a device."""
        return nbytes(self.model, self.body)

    def fuse_attention(self) -> None:
        """Switch to fused attention (SDPA), which stores no scores, if the model supports it and caps no logits."""
        capped = getattr(self.model.config.get_text_config(), "attn_logit_softcapping", None)
        if self.model._supports_sdpa and capped is None:
            with suppress(ValueError):  # a tower that cannot be, which no text runs through
                self.model.set_attn_implementation("sdpa")

    @contextmanager
    def around(self, layers: Iterable[str], *more: str) -> Iterator[None]:
        """Within the block, have the weights of `body` and ``more`` loaded that lie outside the ``layers``."""
        inside = tuple(f"{name}." for name in layers)
        outside = [name for name in (*self.body, *more) if not name.startswith(inside)]
        self.weights.load(outside)
        try:
            yield
        finally:
            self.weights.free(outside)


def replica(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """Build a model on the meta device and find its tensors on disk; no weight is read yet.

    Raises `CalibrationError` for a folder without safetensors, or whose model transformers does not know.
    """
    shards = Shards(folder)
    model = build(folder, stored=shards.dtype, trust_remote_code=trust_remote_code)
    loop: Loop | NotReplayableError
    try:
        loop = loop_of(model)
    except NotReplayableError as error:
        loop = error
    settle_buffers(model, device)
    _narrow_norms(model)
    owned = owners(model, shards.names)
    weights = Weights(model, shards, owned, device)
    return Replica(model, weights, owned, device, attention_modules(model), shared_attention(model), loop)


def _narrow_norms(model: Any) -> None:
    """Have norms whose weights stay in float32 return the dtype of their input, as a server does.

    In transformers such a norm (of DeepSeek V4) returns float32, which 16-bit weights cannot be multiplied with.
    """

    def narrowed(norm: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.to(args[0].dtype) if norm.weight.dtype == torch.float32 else output

    for module in model.modules() if model._get_dtype_plan(model.dtype) else ():
        weights = dict(module.named_parameters(recurse=False))
        if list(weights) == ["weight"] and weights["weight"].ndim == 1:
            module.register_forward_hook(narrowed)


def load_resident(folder: Path, device: str, *, trust_remote_code: bool = False) -> Replica:
    """Return a model with all weights but those of its output head loaded on one device.

    Raises `CalibrationError` where it cannot be built or loaded.
    """
    resident = replica(folder, device, trust_remote_code=trust_remote_code)
    resident.weights.load(resident.body)
    return resident


STACKS = {"gate_up_proj": ("{}.gate_proj", "{}.up_proj")}
"""Names that servers know the parts of a stack of experts by, by the last part of the stack's name on disk; {} is the
expert's number. The parts of other stacks have the stack's name behind the number.

Granite's `input_linear` and `output_linear` are none of them: vLLM 0.32 passes over single experts called w1, w2 and w3
without a word, and older versions know no others.
"""


def is_interleaved(experts: Any) -> bool:
    """Return whether a module that stacks experts has the outputs of gate and up in turns, as gpt-oss has.

    Servers know both as one projection, ``gate_up_proj``.
    """
    return not getattr(experts, "is_concatenated", True)


class Renaming:
    """The rules by which transformers loads this model's checkpoints: they map names on disk to parameter names."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self._own = model.state_dict()

    def __call__(self, name: str) -> tuple[str, tuple[Any, ...]]:
        """Return the parameter that a tensor on disk becomes (a part of), and transformers' operations that make it."""
        from transformers.core_model_loading import rename_source_key

        parameter, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._own)
        return parameter, () if pattern is None else tuple(self._by_pattern[pattern].operations)

    def targets(self, name: str) -> tuple[str, ...]:
        """Return all parameters that a tensor on disk contributes to: several where transformers splits it."""
        from transformers.core_model_loading import rename_source_key

        parameter, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._own)
        patterns = [] if pattern is None else self._by_pattern[pattern].target_patterns
        return tuple(dict.fromkeys((parameter, *(parameter.replace(patterns[0], target) for target in patterns[1:]))))


def owners(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Map each tensor on disk to the parameter or buffer that it becomes (a part of); leave out tensors without one."""
    rename, state = Renaming(model), model.state_dict()
    owned: dict[str, str] = {}
    for name in names:
        renamed = rename(name)[0]
        if renamed not in state and name in state:
            renamed = name  # a rule for another layout of the same model
        if renamed in state:
            owned[name] = renamed
    return owned


def sources(model: Any, owned: Mapping[str, str]) -> dict[str, str]:
    """Map each linear module on disk to the name under which its input is measured.

    That is the model's module, or ``{parameter}.{expert number}`` for stacked experts. A stack on disk counts as the
    single experts that servers know: ``experts.3.gate_proj`` for a part of ``experts.gate_up_proj``.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_module: dict[str, str] = {}
    for name, parameter_name in owned.items():
        module, parameter = name.removesuffix(".weight"), parameters.get(parameter_name)
        if parameter is None or parameter.ndim not in (2, 3):
            continue
        if parameter.ndim == 2:
            if name.endswith(".weight"):
                by_module[module] = parameter_name.removesuffix(".weight")
            continue
        prefix, _, last = module.rpartition(".")
        number = prefix.rpartition(".")[2]
        if number.isdigit() and ".experts." in f".{prefix}.":
            if (
                int(number) < parameter.shape[0]
            ):  # numbers behind are those of another stack: experts of images in Ernie
                by_module[module] = f"{parameter_name}.{number}"
            continue
        experts = model.get_submodule(parameter_name.rpartition(".")[0])
        if isinstance(experts, torch.nn.Conv1d):
            continue  # of a hybrid: thousands of channels, no experts
        single = (f"{{}}.{last}",)
        parts = single if is_interleaved(experts) else STACKS.get(last, single)
        for expert in range(parameter.shape[0]):
            by_module |= {f"{prefix}.{part.format(expert)}": f"{parameter_name}.{expert}" for part in parts}
    return by_module


def on_disk(modules: Collection[str], owned: Mapping[str, str]) -> dict[str, str]:
    """Map modules of the model to their names on disk, or to their own names where no tensor in ``owned`` tells.

    A module's name on disk is that of its first tensor in ``owned``, without the ending that the parameter's name has
    too.
    """
    names = dict.fromkeys(modules, "")
    for name, parameter in owned.items():
        module = parameter
        while (module := module.rpartition(".")[0]) and name.endswith(inner := parameter[len(module) :]):
            if names.get(module) == "":
                names[module] = name.removesuffix(inner)
    return {module: name or module for module, name in names.items()}
