"""The output files of a quantized checkpoint, laid out from headers alone, and their work cut into pieces.

Output names, dtypes, shapes and offsets follow from the input's header and the scheme, so a file's header is known
before its first byte is computed, its size can be promised beforehand, and any part of it can be written when it is
ready.

Pieces are what any worker can take: rows of a weight, or bytes of what is carried over, numbered in the order of the
file. A scale of a whole weight needs its largest magnitude first: scans come before the pieces that wait for them, so
that workers who take what is next can never wait for each other in a ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import lcm, prod
from pathlib import Path

from quantmint.calibration.encodings import Encoded, plain_name
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import ITEM_BITS, Checkpoint, TensorInfo, encode_header
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.formats.layout import StoredTensor, layout, weight_tensors
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.outcomes import stores_as
from quantmint.pipeline.quantize.model.source import divided, is_bias_stack, whole_tensor
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.registry import KERNELS, kernel_name
from quantmint.pipeline.recipe.modules import scale_group, text_config


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in the source: the file and the tensor's entry in its header."""

    shard: str
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a step's weight or tensor in the source.

    ``expert``, ``rows``, ``transposed`` and ``encoded`` are as in `WeightSource`; ``scales`` are the places of the
    tensors of scales.
    """

    place: TensorPlace
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    encoded: Encoded | None = None
    scales: tuple[TensorPlace, ...] = ()

    @property
    def dtype(self) -> str:
        """Return the safetensors dtype of the numbers after decoding: BF16 for encoded weights, else as stored."""
        return "BF16" if self.encoded is not None else self.place.info.dtype

    @property
    def is_turned(self) -> bool:
        """Return whether the encoding stores the matrix as [I, O], so that it is read and decoded whole."""
        return self.encoded is not None and self.encoded.rule.turned

    @property
    def matrix(self) -> tuple[int, int]:
        """Return [rows, columns] of the stored matrix that contains the weight, as it lies on the disk."""
        shape = self.place.info.shape
        if self.expert is None:
            return shape[-2], shape[-1]
        return (shape[1], prod(shape[2:])) if len(shape) > 2 else (1, shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape after decoding and transposing; [O, I] for a weight."""
        if self.encoded is not None:
            return self.encoded.rule.shape(self.matrix)
        if self.expert is None and self.rows is None and not self.transposed:
            return self.place.info.shape
        outer, inner = self.matrix
        if len(self.place.info.shape) == 2:
            return (inner,)
        outputs, inputs = (inner, outer) if self.transposed else (outer, inner)
        first, last = self.rows or (0, outputs)
        return last - first, inputs

    @property
    def nbytes(self) -> int:
        """Return the stored bytes of the weight or tensor, without its scales."""
        if self.encoded is not None:
            return self.place.info.nbytes if self.expert is None else prod(self.matrix)
        return prod(self.shape) * ITEM_BITS[self.place.info.dtype] // 8

    @property
    def granularity(self) -> int:
        """Return the number of rows that a read must be a multiple of; all rows where the matrix is transposed."""
        if self.transposed or self.is_turned:
            return self.shape[0]
        return 1 if self.encoded is None else self.encoded.rule.rows

    @property
    def start(self) -> int:
        """Return the offset of the first byte in the file; for a transposed weight, of the matrix that contains it."""
        if self.expert is None and self.rows is None:
            return self.place.info.start
        outer, inner = self.matrix
        first = 0 if self.transposed or self.rows is None else self.rows[0]
        width = ITEM_BITS[self.place.info.dtype] // 8
        return self.place.info.start + ((self.expert or 0) * outer + first) * inner * width

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Return the offset and the number of bytes in the file of the output rows [first, last).

        For a transposed or turned matrix that is always the whole matrix.
        """
        width = ITEM_BITS[self.place.info.dtype] // 8
        if self.transposed or self.is_turned:
            return self.start, prod(self.matrix) * width
        row = (prod(self.shape[1:]) if self.encoded is None else self.matrix[1]) * width
        return self.start + first * row, (last - first) * row


def origin_of(source: Checkpoint, weight: WeightSource) -> Origin:
    """Return the place of a weight in the source's files. Raises `KeyError` for a tensor that is not there."""
    return Origin(
        TensorPlace(*source.tensors[weight.tensor]),
        weight.expert,
        weight.rows,
        weight.transposed,
        weight.encoded,
        () if weight.encoded is None else tuple(TensorPlace(*source.tensors[name]) for name in weight.encoded.scales),
    )


STATIC_ROLES = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale", "weight_shape"})
"""Roles of tensors that no kernel makes: measured ranges decide them, or a weight's shape."""
NUMBERS = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that can be quantized."""
_BYTES = {"I8": "U8", "F8_E8M0": "U8"}  # dtypes of packed elements and exponents, whose bytes are those of U8
_KEYS = ("k_proj", "qkv_proj")  # what computes K; Phi-3 has the latter
_ALIGNMENT = 8  # bytes; the widest element that PyTorch views in place


@dataclass(frozen=True, slots=True)
class Step:
    """The work on one weight, or on one tensor that is carried over.

    ``name`` is the module's or the tensor's name. ``kernel`` is None where the numbers are not quantized. ``group``
    holds the origins of all weights that share one scale, this one included; it is empty where the scale is the
    weight's own. ``made`` is a file that already holds the step's outputs, see `gptq.results`. An ``untouched`` step's
    outputs are the bytes of the source, which has the scheme's format already.
    """

    name: str
    origin: Origin
    kernel: str | None
    outputs: tuple[StoredTensor, ...]
    group: tuple[Origin, ...] = ()
    made: Path | None = None
    untouched: bool = False


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The layout of one output file: steps in the order of the input, deferred tensors, header and offsets.

    ``deferred`` are written last: static scales and shapes, and small tensors whose size is no multiple of the
    alignment, which would misalign the others. ``offsets`` gives each tensor's first byte in the file, and ``nbytes``
    is the size of the file, header included.
    """

    name: str
    steps: tuple[Step, ...]
    deferred: tuple[StoredTensor, ...]
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int

    @property
    def read_bytes(self) -> int:
        """Return the bytes of the source that the file is made of, without scales."""
        return sum(step.origin.nbytes for step in self.steps)

    @property
    def stored(self) -> Iterator[StoredTensor]:
        """Yield every tensor of the file, in the order of the file."""
        for step in self.steps:
            yield from (out for out in step.outputs if not is_deferred(out))
        yield from self.deferred


def is_deferred(tensor: StoredTensor) -> bool:
    """Return whether a tensor is written at its file's end: no kernel makes it, or its size would misalign others."""
    return tensor.role in STATIC_ROLES or tensor.nbytes % _ALIGNMENT != 0


def plan_shards(
    source: Checkpoint,
    structure: Structure,
    choice: Choice,
    checkpoint_format: str,
    *,
    shared_scales: bool = False,
    untouched: bool = True,
) -> tuple[ShardPlan, ...]:
    """Lay out every output file of a quantized model; files of which nothing is left are omitted.

    ``shared_scales`` gives weights that vLLM loads as one (q, k, v; gate, up) one scale where a scale is per tensor,
    from the largest magnitude of all. With ``untouched`` weights whose source has the scheme's format keep their bytes;
    an algorithm that changes weights needs them decoded. Raises `UserError` for a scheme that the format cannot store,
    for a quantized module whose weight is not stored as a matrix of numbers, and for static KV scales of attention
    without a K projection.
    """
    layouter = _Layouter(source, structure, choice, checkpoint_format, shared_scales, untouched)
    return tuple(plan for shard in source.shards if (plan := layouter.shard(shard)) is not None)


class _Layouter:
    def __init__(
        self,
        source: Checkpoint,
        structure: Structure,
        choice: Choice,
        checkpoint_format: str,
        shared_scales: bool,
        untouched: bool,
    ) -> None:
        self._source, self._structure, self._choice = source, structure, choice
        self._format = checkpoint_format
        self._kv_scales = _kv_scales(source, structure, choice, checkpoint_format)
        self._decoded_away = structure.decoded_away
        self._divided = divided(structure, choice.schemes)
        self._groups = self._shared(shared_scales)
        self._may_pass = untouched
        self._files: defaultdict[str, list[TensorInfo]] = defaultdict(list)  # by file, in no order
        for file, info in source.tensors.values():
            self._files[file].append(info)

    def shard(self, name: str) -> ShardPlan | None:
        """Lay out one file; return None where all its tensors are dropped by decoding."""
        steps: list[Step] = []
        extra: list[StoredTensor] = []
        for info in sorted(self._files[name], key=lambda info: info.start):
            if info.name in self._decoded_away:
                continue
            if info.name in self._divided and is_bias_stack(self._structure, info.name):
                biases = {module: self._structure.biases[module] for module in self._divided[info.name]}
                steps += (
                    self._carried(f"{module}.bias", origin_of(self._source, bias)) for module, bias in biases.items()
                )
            elif info.name in self._divided:
                steps += map(self._divided_step, self._divided[info.name])
            else:
                origin = origin_of(self._source, whole_tensor(self._structure, info.name))
                steps.append(self._carried(info.name if origin.encoded is None else plain_name(info.name), origin))
            extra += self._kv_scales.get(info.name, ())
        if not steps:
            return None
        everything = [out for step in steps for out in step.outputs] + extra
        late = {out.name for out in everything if is_deferred(out)}
        last = (out for out in everything if out.name in late)
        deferred = tuple(sorted(last, key=lambda out: (-ITEM_BITS[out.dtype], out.name)))
        ordered = [out for out in everything if out.name not in late] + list(deferred)
        header = encode_header((out.name, out.dtype, out.shape) for out in ordered)
        *starts, end = accumulate((out.nbytes for out in ordered), initial=len(header))
        offsets = {out.name: start for out, start in zip(ordered, starts, strict=True)}
        return ShardPlan(name, tuple(steps), deferred, header, offsets, end)

    def _divided_step(self, module: str) -> Step:
        """Return the step of one weight in a tensor that is not carried over whole, such as a stack of experts.

        The weight is quantized, or carried over in 16 bit where the choice leaves it so.
        """
        if module in self._choice.schemes:
            return self._quantized(module)
        return self._carried(f"{module}.weight", origin_of(self._source, self._structure.weights[module]))

    def _carried(self, name: str, origin: Origin) -> Step:
        return Step(name, origin, None, (StoredTensor(name, "copy", origin.dtype, origin.shape),))

    def _quantized(self, module: str) -> Step:
        scheme = self._choice.schemes[module]
        origin = origin_of(self._source, self._structure.weights[module])
        if origin.dtype not in NUMBERS or len(origin.shape) != 2:
            info = origin.place.info
            raise UserError(
                f"{self._source.folder / origin.place.shard}: {info.name} is {info.dtype} {list(info.shape)}, "
                f"expected a matrix of {', '.join(sorted(NUMBERS))} to quantize to {scheme}.",
                hint="Quantize from the 16-bit release of the model.",
            )
        if (outputs := self._same_tensors(module, origin)) is not None:
            return Step(module, origin, kernel_name(scheme, self._format), outputs, untouched=True)
        if module in self._choice.stored:
            info = origin.place.info
            raise UserError(
                f"{self._source.folder / origin.place.shard}: {info.name} is {info.dtype} {list(info.shape)} with "
                f"scales of {[place.info.dtype for place in origin.scales]}, expected what {scheme} stores, to keep "
                f"{module} as the source has it.",
                hint="Decode it to 16 bit, or round it to a scheme.",
            )
        outputs = weight_tensors(self._format, scheme, module, (origin.shape[0], origin.shape[1]), origin.dtype)
        kernel = kernel_name(scheme, self._format, None if origin.encoded is None else origin.encoded.encoding)
        group = self._groups.get(module, (origin,)) if KERNELS[kernel].whole else ()
        return Step(module, origin, kernel, outputs, group)

    def _same_tensors(self, module: str, origin: Origin) -> tuple[StoredTensor, ...] | None:
        """Return the tensors to store of a module whose source has the scheme's format; None where it has another.

        Weights that share a scale have it together or not at all.
        """
        scheme, encoded = self._choice.schemes[module], origin.encoded
        fused = [member.encoded for member in self._groups.get(module, ())]
        may_pass = self._may_pass or module in self._choice.stored
        if not may_pass or encoded is None or not stores_as(encoded.encoding, scheme):
            return None
        if any(member is None or member.encoding != encoded.encoding for member in fused):
            return None
        scale_dtype = origin.scales[0].info.dtype if origin.scales[0].info.dtype in NUMBERS else origin.dtype
        if encoded.encoding == "fp8_block_e8m0":  # float32 holds the powers of two
            scale_dtype = "F32"
        outputs = weight_tensors(self._format, scheme, module, (origin.shape[0], origin.shape[1]), scale_dtype)
        first = 0 if origin.expert is None else 1
        stored: list[tuple[str, tuple[int, ...]]] = [(origin.place.info.dtype, origin.matrix)]
        stored += [(place.info.dtype, place.info.shape[first:]) for place in origin.scales]
        if encoded.encoding == "fp8_tensor":  # a scale that every channel gets
            stored[1:] = [(dtype, (origin.shape[0],)) for dtype, _ in stored[1:]]
        if encoded.encoding == "fp8_block_e8m0":
            stored[1:] = [(scale_dtype, shape) for _, shape in stored[1:]]
        # A scale of channels is [O] or [O, 1].
        same = [(out.dtype, _without_ones(out.shape)) for out in outputs if out.role not in STATIC_ROLES]
        as_bytes = [(_BYTES.get(dtype, dtype), _without_ones(shape)) for dtype, shape in stored]
        return outputs if same in ([(dtype, _without_ones(shape)) for dtype, shape in stored], as_bytes) else None

    def _shared(self, shared_scales: bool) -> dict[str, tuple[Origin, ...]]:
        """Return, for each module that shares a scale with others, the origins of all weights of that scale."""
        members: defaultdict[str, dict[str, Origin]] = defaultdict(dict)
        for module, scheme in self._choice.schemes.items():
            if module in self._choice.stored:
                continue
            kernel = KERNELS[kernel_name(scheme, self._format)]
            if kernel.fused or (kernel.whole and shared_scales):
                members[scale_group(module)][module] = origin_of(self._source, self._structure.weights[module])
        return {module: tuple(group.values()) for group in members.values() for module in group}


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _kv_scales(
    source: Checkpoint, structure: Structure, choice: Choice, checkpoint_format: str
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the KV scales of each attention module, keyed by its K projection's tensor, in whose file they belong.

    Empty without a static FP8 cache. Raises `UserError` for an attention module without a K projection.
    """
    if not choice.kv_cache:
        return {}
    form = layout(checkpoint_format)
    heads = None
    if choice.kv_per_head:
        text = text_config(source.config)
        heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
    shape = form.kv_scale_shape(heads)
    stored_as = {plain_name(name): name for name in source.tensors}
    result: dict[str, tuple[StoredTensor, ...]] = {}
    for module in structure.attention:
        candidates = (f"{module}.{part}.weight" for part in _KEYS)
        anchor = next((stored_as[name] for name in candidates if name in stored_as), None)
        if anchor is None:
            raise UserError(
                f"{source.folder}: {module} has no {' or '.join(_KEYS)} there, so static FP8 KV scales have no place.",
                hint="Set `kv_cache: auto` for a model whose attention has no K projection of its own.",
            )
        dtype = origin_of(source, whole_tensor(structure, anchor)).dtype
        result[anchor] = tuple(
            StoredTensor(name, role, dtype, shape)
            for name, role in zip(form.kv_scale_names(module), ("k_scale", "v_scale"), strict=True)
        )
    return result


_WORD = 8  # bytes; no number is cut in two


@dataclass(frozen=True, slots=True)
class Scan:
    """A task: find the largest magnitude of rows [first, last) of ``origin``, for the scale that ``group`` shares."""

    origin: Origin
    group: tuple[Origin, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A task: make rows [first, last) of a step, or copy its bytes [first, last) where ``raw``.

    ``number`` is the piece's place in the file; ``final`` marks the last piece of a step.
    """

    step: Step
    number: int
    first: int
    last: int
    raw: bool
    final: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of the source that the piece takes."""
        if self.raw:
            return self.last - self.first
        origin = self.step.origin
        return origin.nbytes * (self.last - self.first) // max(origin.shape[0], 1)


def cut(plan: ShardPlan, size: int) -> list[Scan | Piece]:
    """Cut a file into tasks of about ``size`` bytes of the source; larger where fewer rows cannot be computed alone.

    The scans of a shared scale come before the first piece that needs it.
    """
    pieces: list[Scan | Piece] = []
    scanned: set[tuple[Origin, ...]] = set()
    number = 0
    for step in plan.steps:
        if step.group and step.group not in scanned:
            scanned.add(step.group)
            pieces += (
                Scan(origin, step.group, first, last)
                for origin in step.group
                for first, last in _ranges(origin.shape[0], _rows(origin, 1, size))
            )
        origin = step.origin
        raw = step.kernel is None and origin.encoded is None and not origin.transposed and step.made is None
        if raw:
            ranges = list(_ranges(origin.nbytes, max(size // _WORD, 1) * _WORD))
        else:
            apart = 1 if step.kernel is None else KERNELS[step.kernel].rows
            ranges = list(_ranges(origin.shape[0], _rows(origin, apart, size)))
        for first, last in ranges:
            pieces.append(Piece(step, number, first, last, raw, final=last == ranges[-1][1]))
            number += 1
    return pieces


def _rows(origin: Origin, kernel: int, size: int) -> int:
    count = origin.shape[0]
    apart = origin.granularity if origin.transposed or origin.is_turned else lcm(kernel, origin.granularity)
    return max(size // max(origin.nbytes // max(count, 1), 1) // max(apart, 1), 1) * max(apart, 1)


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) ranges of at most ``step`` that cover [0, ``count``); (0, 0) where ``count`` is 0."""
    yield from ((first, min(first + step, count)) for first in range(0, count, step)) if count else ((0, 0),)
