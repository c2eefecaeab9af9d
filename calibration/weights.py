"""A model without weights, and its weights, read from the shards when they are wanted.

The model is built on the meta device, where it takes no memory. Tensors are mapped from their files, or brought to a
GPU, and become parameters by transformers' own rules (renamed, stacked, concatenated), one part of the model at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from quantmint.calibration.classes import build_model, read_config
from quantmint.calibration.encodings import Encoded, Stored, obstacle, plain_name, recognise, with_old_modelopt
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.index import weight_files
from quantmint.calibration.lazy import torch
from quantmint.calibration.stacks import StackPlaces, read_stack, stack_places

_PART = 1 << 30  # bytes that are made parameters of at a time
_PIECE = 16 << 20  # bytes: what a thread reads for a GPU at a time


def build(folder: Path, *, stored: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """Build the model of a folder on the meta device, in the dtype that its configuration names.

    ``stored`` is the dtype where the configuration names none (None: bfloat16). Attention and experts are computed step
    by step ("eager"), which is what llm-compressor calibrates with; fused attention differs in the last bit of bfloat16
    from the second layer on. Raises `CalibrationError` for a model that transformers cannot build.
    """
    try:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):  # decoded when it is read
                del part.quantization_config
        with torch.device("meta"):
            model = build_model(
                config,
                dtype=config.dtype or config.get_text_config().dtype or stored or torch.bfloat16,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(f"{folder}: the model cannot be built: {reason}") from error
    return model.eval()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor on disk that is read when it is indexed, as transformers does when it needs the tensor."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, _everything: Any) -> torch.Tensor:
        return self.read()


class Shards:
    """The tensors of a model folder, safetensors only.

    ``only`` limits them to these names, as they are stored: those of a quantized checkpoint that stay in 16 bit.

    Otherwise weights that are not in 16 bit are decoded (see `encodings`), and have the names of 16-bit weights. Raises
    `CalibrationError` for a folder without safetensors, and, without ``only``, for weights that cannot be decoded.
    """

    def __init__(self, folder: Path, *, only: Collection[str] | None = None) -> None:
        from safetensors import SafetensorError

        self.folder = folder
        try:
            config = with_old_modelopt(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder)
            declared = _readable_quantization(config, folder) if only is None else None
            self._open: dict[str, Any] = {}
            place = {name: file for file in weight_files(folder)[0] for name in self._mapped(file).keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise CalibrationError(f"{folder}: the weights cannot be read: {error}") from error
        self._place = {name: file for name, file in place.items() if only is None or name in only}
        self._starts: dict[str, dict[str, int]] = {}
        self._encoded = {} if declared is None else self._recognise(declared)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights, without the scales that some are decoded with."""
        scales = self._scales
        decoded = {elements: name for name, (elements, _) in self._encoded.items()}
        return tuple(decoded.get(name, name) for name in self._place if name not in scales)

    def _recognise(self, declared: Mapping[str, Any]) -> dict[str, tuple[str, Encoded]]:
        """Map the plain name of each encoded weight to the name of its stored tensor and its encoding."""
        stored: dict[str, Stored] = {}
        for name, file in self._place.items():
            part = self._mapped(file).get_slice(name)
            stored[name] = part.get_dtype(), tuple(part.get_shape())
        encodings = {name: recognise(stored, name, declared) for name in stored}
        return {plain_name(name): (name, encoded) for name, encoded in encodings.items() if encoded is not None}

    @property
    def _scales(self) -> set[str]:
        """Return the names of the tensors of scales that encoded weights are decoded with."""
        return {scale for _, encoded in self._encoded.values() for scale in encoded.scales}

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the first tensor stored as BF16, F16 or F32 that is no scale; None if there is none."""
        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        scales = self._scales
        places = ((name, file) for name, file in self._place.items() if name not in scales)
        kinds = (self._mapped(file).get_slice(name).get_dtype() for name, file in places)
        return next((dtypes[kind] for kind in kinds if kind in dtypes), None)

    def unmap(self) -> None:
        """Close the mapped files; a file stays mapped while a tensor that was read from it exists."""
        self._open = {}

    def read(self, name: str, device: str) -> torch.Tensor:
        """Return a tensor on ``device``, decoded if it is encoded.

        On a CPU a tensor that is not encoded is a view of the mapped file, of which nothing is in memory until it is
        used. Raises `OSError` or `SafetensorError` where it cannot be read.
        """
        read = self._view if device.startswith("cpu") else partial(self._uploaded, device=device)
        if name not in self._encoded:
            return read(name)
        elements, encoded = self._encoded[name]
        return encoded.rule.decode(read(elements), [read(scale) for scale in encoded.scales])

    def _mapped(self, file: str) -> Any:
        from safetensors import safe_open

        if (opened := self._open.get(file)) is None:
            opened = self._open[file] = safe_open(self.folder / file, framework="pt")
        return opened

    def _view(self, name: str) -> Any:
        return self._mapped(self._place[name]).get_tensor(name)

    def _uploaded(self, name: str, device: str) -> torch.Tensor:
        """Read a tensor in pieces into pinned memory, and copy each to the GPU on a stream of its own.

        Through a map a page fault would be taken every few pages, and unpinned memory is copied twice.
        """
        stream = _upload_stream(device)
        with (self.folder / self._place[name]).open("rb", buffering=0) as file, torch.cuda.stream(stream):
            tensor = torch.empty_like(self._view(name), device=device)
            raw = tensor.flatten().view(torch.uint8)
            pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
            file.seek(self._start(name))
            for first in range(0, len(raw), _PIECE):
                piece = raw[first : first + _PIECE]
                host = pinned[: len(piece)]
                _fill(file, host.numpy().data)
                piece.copy_(host, non_blocking=True)
                stream.synchronize()
        # Its memory is not taken for the next tensor before what was computed with it is done.
        tensor.record_stream(torch.cuda.default_stream(device))
        return tensor

    def _start(self, name: str) -> int:
        """Return the offset of a tensor's first byte in its file."""
        file = self._place[name]
        if file not in self._starts:
            with (self.folder / file).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            self._starts[file] = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        return self._starts[file][name]


@cache
def _upload_stream(device: str) -> Any:
    """Return the CUDA stream on which all weights are uploaded to a device.

    It is one for all: the allocator keeps freed memory for the stream that it was allocated on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _fill(file: Any, into: memoryview) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise OSError(f"{file.name}: ends {len(into)} bytes too early")
        into = into[count:]


def _readable_quantization(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """Return the declared quantization of the weights, None for 16 bit.

    Raises `CalibrationError` for weights that cannot be decoded.
    """
    text = config.get("text_config")
    declared = config.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
    if declared is None or (reason := obstacle(declared)) is None:
        return declared
    raise CalibrationError(
        f"{folder}: its weights are quantized already ({reason}), expected 16 bit or another encoding"
    )


class Weights:
    """Loads and frees the weights of one model that was built on the meta device, part by part, on one device.

    ``owned`` maps tensor names on disk to parameter names.
    """

    def __init__(self, model: Any, shards: Shards, owned: Mapping[str, str], device: str) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.utils import logging

        logging.disable_progress_bar()  # there would be one for every part that is loaded
        self._model, self._shards, self._device = model, shards, device
        self._rules = get_model_conversion_mapping(model)
        self._by_owner: dict[str, list[str]] = {}
        for name, parameter in owned.items():
            self._by_owner.setdefault(parameter, []).append(name)
        ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._ties = {**{source: target for target, source in ties.items()}, **ties}
        in_fp32 = list(model._get_dtype_plan(model.dtype))
        self._stacks = {
            parameter: places
            for parameter, owners in self._by_owner.items()
            if len(owners) > 1 and not any(re.search(pattern, parameter) for pattern in in_fp32)
            if (places := stack_places(owners, self._rules)) is not None
        }

    def is_mapped(self, parameter: str) -> bool:
        """Return whether a parameter may lie in a mapped file, which must not be written to."""
        return self._device.startswith("cpu") and parameter not in self._stacks

    def load(self, parameters: Iterable[str]) -> None:
        """Load parameters and persistent buffers, given by the model's names, onto the device.

        On a CPU a weight that is used as it is stored is mapped from the file, and read when it is used. Raises
        `CalibrationError` for a parameter that is not in the checkpoint, cannot be read, or has another shape there.
        """
        parameters = list(parameters)
        present = {parameter for parameter in parameters if parameter in self._by_owner}
        tied = {
            parameter: self._ties[parameter]
            for parameter in parameters
            if parameter not in present and parameter in self._ties
        }
        needed = present | {partner for partner in tied.values() if partner in self._by_owner}
        for parameter in sorted(needed & self._stacks.keys()):
            self._read_stack(parameter, self._stacks[parameter])
        for part in self._parts(needed - self._stacks.keys()):
            self._convert(part)
        self._shards.unmap()
        for parameter, partner in tied.items():
            _assign(self._model, parameter, _get(self._model, partner))
        absent = [parameter for parameter in parameters if _get(self._model, parameter).is_meta]
        if absent:
            raise CalibrationError(f"{self._shards.folder}: {absent[0]} is not in the checkpoint")

    def _parts(self, parameters: Iterable[str]) -> Iterator[list[str]]:
        """Yield the parameter names in parts of about a gigabyte: transformers reads ahead of what it stacks."""
        state = self._model.state_dict()
        part: list[str] = []
        size = 0
        for parameter in sorted(parameters):
            part.append(parameter)
            size += state[parameter].numel() * state[parameter].element_size()
            if size > _PART:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _read_stack(self, parameter: str, places: StackPlaces) -> None:
        from safetensors import SafetensorError

        shape = _get(self._model, parameter).shape
        read = partial(self._shards.read, device=self._device)
        try:
            _assign(self._model, parameter, read_stack(places, read, shape, self._model.dtype, self._device))
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{self._shards.folder}: the weights cannot be read: {error}") from error
        except ValueError as error:
            raise CalibrationError(f"{self._shards.folder}: {error}") from error

    def _convert(self, parameters: Iterable[str]) -> None:
        from safetensors import SafetensorError
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        names = [name for parameter in parameters for name in self._by_owner[parameter]]
        state = {name: _Tensor(partial(self._shards.read, name, self._device)) for name in names}
        dtype = self._model.dtype
        setting = LoadStateDictConfig(
            device_map={"": self._device},
            dtype=dtype,
            dtype_plan=self._model._get_dtype_plan(dtype),
            weight_mapping=self._rules,
        )
        try:
            report, _ = convert_and_load_state_dict_in_model(self._model, state, setting)
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{self._shards.folder}: the weights cannot be read: {error}") from error
        for name, stored, expected in report.mismatched_keys:
            raise CalibrationError(
                f"{self._shards.folder}: {name} is {list(stored)}, expected {list(expected)} from config.json"
            )
        for name, reason in report.conversion_errors.items():
            raise CalibrationError(f"{self._shards.folder}: {name} cannot be loaded: {reason}")

    def free(self, names: Iterable[str]) -> None:
        """Free parameters and persistent buffers: they move to the meta device, where they keep their shapes."""
        for name in names:
            _assign(self._model, name, _get(self._model, name).to("meta"))


def settle_buffers(model: Any, device: str) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, scales of embeddings) on a device.

    As transformers does after loading: a module initialises the buffers that nothing was loaded into.
    """
    for name, buffer in model.named_non_persistent_buffers():
        _assign(model, name, torch.empty_like(buffer, device=device))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # will be loaded: none is drawn at random, not even on the meta device
    model.initialize_weights()


def held(model: Any, prefix: str = "") -> list[str]:
    """Return the names of the parameters and persistent buffers below module ``prefix`` ("" for the whole model)."""
    return [name for name in model.state_dict() if not prefix or name.startswith(f"{prefix}.")]


def nbytes(model: Any, names: Iterable[str]) -> int:
    """Return the bytes that the named parameters and buffers take, by their shapes and dtypes."""
    state = model.state_dict()
    return sum(state[name].numel() * state[name].element_size() for name in names)


def _get(model: Any, name: str) -> Any:
    return model.get_parameter_or_buffer(name)


def _assign(model: Any, name: str, value: Any) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in module._buffers:
        module._buffers[last] = value.data if isinstance(value, torch.nn.Parameter) else value
    else:
        module._parameters[last] = (
            value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value, requires_grad=False)
        )
