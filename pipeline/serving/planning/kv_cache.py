"""Pages and blocks of vLLM's KV cache: bytes of a token, groups of layers, and the blocks that a request needs.

A page is one layer's share of a block: the keys and values of ``block_size`` tokens, or one recurrent state. vLLM wants
all pages equally large, puts layers of one kind into groups of equally many layers, and gives a request blocks of each
group (vLLM 0.32 v1/core/kv_cache_utils.py and v1/kv_cache_interface.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quantmint.pipeline.serving.model.architecture import OVERLAPPING
from quantmint.pipeline.serving.model.facts import ModelFacts

CacheKind = Literal["full", "sliding", "state"]
"""A cache of every token, of the tokens in a sliding window, or of one recurrent state."""

_ENTRY_BYTES = 584
"""Bytes of an entry of DeepSeek V4 in vLLM's layout fp8_ds_mla, which it takes for "auto" too: 448 in 8 bit, 64 rotary
elements in 16, 8 scales (models/deepseek_v4/attention.py). Rows in 16 bit, which FlashInfer can keep on NVIDIA's
Blackwell, have 1,024."""
_PAGE_STEP = 576  # pages of this layout are padded to a multiple
_ENTRY_BLOCK, _WINDOW_BLOCK = 256, 64
_STATE_BLOCKS: Mapping[bool, int] = {True: 4, False: 8}
"""Tokens in a block of a compressor's inputs, with overlapping entries and without (deepseek_v4/compressor.py)."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    ``nbytes`` is the size of a token's keys and values, or of a whole state; ``extra`` the bytes of a token in a
    second cache (the indexer's keys). ``window`` is in tokens, 0 without one.
    """

    layer: int
    kind: CacheKind
    nbytes: int
    window: int = 0
    extra: int = 0


class CacheGroup(NamedTuple):
    """Layers that share a block table; ``block`` is in tokens, 0 for states.

    ``pages`` has the bytes of a page by layer where pages differ; a layer with several caches is listed several times.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    block: int
    window: int
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model's layers; ``page`` is the bytes of one layer's page in all groups without ``pages``."""

    groups: tuple[CacheGroup, ...]
    page: int

    def block_bytes(self, layers: range) -> int:
        """Return the bytes of one block on a pipeline stage with these layers: a page for each layer of one group.

        Groups share the block, so that the group with the largest pages on the stage gives the bytes.
        """
        return max((sum(self._pages(group, layers)) for group in self.groups), default=0)

    def _pages(self, group: CacheGroup, layers: range) -> Iterator[int]:
        pages = group.pages or (self.page,) * len(group.layers)
        return (page for number, page in zip(group.layers, pages, strict=True) if number in layers)

    def blocks_of_request(self, tokens: int, in_flight: int, *, states: int = 1) -> int:
        """Return the most blocks that a request of ``tokens`` occupies, summed over all groups.

        ``in_flight`` tokens may be scheduled but not yet computed, and a sliding window keeps their blocks until then.
        ``states`` is the number of recurrent states that a request keeps: prefix caching needs a second one.
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += states
            elif group.kind == "sliding":
                # One more, because a window need not start at the start of a block.
                total += math.ceil(min(group.window - 1 + in_flight, tokens) / group.block) + 1
            else:
                total += math.ceil(tokens / group.block)
        return total


def cache_groups(layers: Sequence[LayerCache], *, block_size: int) -> CacheGroups:
    """Return the groups that vLLM forms of a whole model's layers; no groups for a model without caches."""
    attending = [cache for cache in layers if cache.kind != "state"]
    states = [cache for cache in layers if cache.kind == "state"]
    largest = max((cache.nbytes for cache in attending if cache.kind == "full"), default=0)
    largest = largest or max((cache.nbytes for cache in attending), default=0)
    if states and largest:
        # A block of attention must be as large as a state; it grows in steps of the block size.
        block_size *= math.ceil(max(cache.nbytes for cache in states) / (block_size * largest))
    page = max(block_size * largest, max((cache.nbytes for cache in states), default=0))
    if {cache.kind for cache in layers} == {"full"}:
        # Layers of one kind, of whatever size, form one group: their pages lie side by side.
        mean = sum(cache.nbytes + cache.extra for cache in attending) / len(attending)
        group = CacheGroup("full", tuple(cache.layer for cache in attending), block_size, 0)
        return CacheGroups((group,), round(mean * block_size))
    buckets: dict[tuple[CacheKind, int, int], list[int]] = {}
    for cache in layers:
        block = 0 if cache.kind == "state" else page // cache.nbytes
        buckets.setdefault((cache.kind, cache.window, block), []).append(cache.layer)
    fewest, most = min(map(len, buckets.values()), default=0), max(map(len, buckets.values()), default=0)
    # vLLM's heuristic against padding when two kinds have nearly as many layers.
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for (kind, window, block), numbers in buckets.items():
        count = math.ceil(len(numbers) / size)
        groups += [CacheGroup(kind, tuple(numbers[start::count]), block, window) for start in range(count)]
    return CacheGroups(tuple(groups), page)


def groups_of_model(facts: ModelFacts, tensor: int, dtype: str, kind: str, block_size: int) -> CacheGroups:
    """Return the groups of one rank; arguments as for `kv_bytes_per_token`, ``block_size`` in tokens.

    DeepSeek V4 has blocks of its own sizes, and an own layout, whatever is asked for.
    """
    if facts.compressed:
        return _packed_groups(_compressed_caches(facts))
    return cache_groups(layer_caches(facts, tensor, dtype, kind), block_size=block_size)


class _Bucket(NamedTuple):
    """A block table's kind, tokens of a block, and window."""

    kind: CacheKind
    block: int
    window: int


def _compressed_caches(facts: ModelFacts) -> Iterator[tuple[_Bucket, int, int]]:
    """Yield bucket, layer and bytes of a page of each cache of DeepSeek V4; ranks have copies.

    Every layer keeps a window of entries; layers with a compressor also keep an entry for several tokens, and the
    window of inputs (keys and scores in float32) that the next entry needs; overlapping layers keep both for the
    indexer as well.
    """
    assert facts.compressed is not None  # noqa: S101 - the caller asked
    size = facts.indexer[1] if facts.indexer else 0
    for layer, ratio in enumerate(facts.compressed.ratios):
        yield _Bucket("sliding", _WINDOW_BLOCK, facts.window or 0), layer, _padded(_WINDOW_BLOCK * _ENTRY_BYTES)
        if not ratio:
            continue
        overlaps = ratio == OVERLAPPING
        entries, inputs = _ENTRY_BLOCK // ratio, _STATE_BLOCKS[overlaps]
        state = _Bucket("sliding", inputs, ratio * (1 + overlaps))
        full = _Bucket("full", _ENTRY_BLOCK, 0)
        yield full, layer, _padded(entries * _ENTRY_BYTES)
        yield state, layer, _padded(inputs * 2 * (1 + overlaps) * facts.head_dim * 4)
        if overlaps and size:
            yield full, layer, _padded(entries * _indexer_bytes(size))
            yield state, layer, _padded(inputs * 2 * (1 + overlaps) * size * 4)


def _packed_groups(caches: Iterable[tuple[_Bucket, int, int]]) -> CacheGroups:
    """Return vLLM's groups of layers whose pages differ (0.32 kv_cache_utils.py, _get_packed_kv_cache_groups).

    A bucket with equally many layers of each page size is cut into groups of as many layers as are in the largest such
    bucket that mixes sizes, or a few more if that pads less; other buckets stay whole.
    """
    buckets: dict[_Bucket, dict[int, list[int]]] = {}
    for bucket, layer, page in caches:
        buckets.setdefault(bucket, {}).setdefault(page, []).append(layer)
    lengths = {
        bucket: len(next(iter(pages.values())))
        for bucket, pages in buckets.items()
        if len(set(map(len, pages.values()))) == 1
    }
    mixed = max((length for bucket, length in lengths.items() if len(buckets[bucket]) > 1), default=0)
    sizes = range(mixed, max(lengths.values(), default=0) + 1) if mixed else range(0)
    repeats = min(sizes, key=lambda size: (sum(-length % size for length in lengths.values()), -size), default=0)
    groups = []
    for bucket, pages in buckets.items():
        count = math.ceil(lengths[bucket] / repeats) if repeats and bucket in lengths else 1
        for start in range(count):
            cells = [(number, page) for page, numbers in pages.items() for number in numbers[start::count]]
            numbers, nbytes = zip(*cells, strict=True)
            groups.append(CacheGroup(bucket.kind, numbers, bucket.block, bucket.window, nbytes))
    return CacheGroups(tuple(groups), 0)


def _padded(nbytes: int) -> int:
    return math.ceil(nbytes / _PAGE_STEP) * _PAGE_STEP


def _indexer_bytes(size: int) -> int:
    """Return the bytes of an indexer's key: FP8, and a float32 scale for every 128 elements (deepseek_v2.py)."""
    return size + size // 128 * 4


def default_block_size(facts: ModelFacts, kind: str) -> int:
    """Return vLLM's default block in tokens on rocm, cuda or cpu (0.32 platforms/cpu.py, v1/attention/backends/mla)."""
    latent = facts.latent is not None
    if kind == "cpu":
        return 16 if latent else 128
    return 64 if latent and kind == "cuda" else 16


def kv_bytes_per_token(facts: ModelFacts, tensor_parallel: int, kv_cache_dtype: str, *, kind: str = "cuda") -> int:
    """Return the bytes that one more token takes on one accelerator, over all layers that keep every token.

    For a model without such layers, those with a sliding window count. ``kv_cache_dtype`` is "auto" for 16 bit, starts
    with "fp8" for 8 bit, or is "float32". ``kind`` is rocm, cuda or cpu.
    """
    if facts.compressed:
        caches = _compressed_caches(facts)
        return round(sum(page / bucket.block for bucket, _, page in caches if bucket.kind == "full"))
    layers = layer_caches(facts, tensor_parallel, kv_cache_dtype, kind)
    counted = [cache for cache in layers if cache.kind == "full"] or [c for c in layers if c.kind == "sliding"]
    return sum(cache.nbytes + cache.extra for cache in counted)


def layer_caches(facts: ModelFacts, tensor_parallel: int, kv_cache_dtype: str, kind: str) -> tuple[LayerCache, ...]:
    """Return the caches of one rank, in the order of the layers; arguments as for `kv_bytes_per_token`."""
    return tuple(_layer_caches(facts, tensor_parallel, kv_cache_dtype, kind))


def _layer_caches(facts: ModelFacts, tensor: int, dtype: str, kind: str) -> Iterator[LayerCache]:
    item = 1 if dtype.startswith("fp8") else 4 if dtype == "float32" else 2
    token = 2 * max(1, facts.kv_heads // tensor) * facts.head_dim * item
    extra = 0
    if facts.latent:
        # One latent for all heads, a copy on every rank.
        token = (facts.latent.rank + facts.latent.rope) * item
        if facts.indexer:
            if item == 1 and kind == "cuda":
                token = 656  # fp8_ds_mla: latents in 8 bit, their scales, the rotary part in 16 (flashmla_sparse.py)
            extra = _indexer_bytes(facts.indexer[1])
    for number, mixer in enumerate(facts.kinds):
        if mixer == "sliding" and facts.window:
            yield LayerCache(number, "sliding", token, facts.window)
        elif mixer in ("full", "chunked", "sliding"):
            # Chunked attention keeps every token: vLLM turns its hybrid manager off for it (vllm/config/vllm.py).
            yield LayerCache(number, "full", token, extra=extra)
        elif mixer != "none":
            yield LayerCache(number, "state", _state_bytes(facts, mixer, tensor, kind))


def _state_bytes(facts: ModelFacts, mixer: str, tensor: int, kind: str) -> int:
    """Return the bytes of one request's state in one layer on one GPU: the convolution's inputs and the recurrent
    state.

    ``mixer`` is the layer's kind ("mamba2" pads its groups), ``tensor`` the number of GPUs that share the layer,
    ``kind`` that of the hardware, "cpu" or one of a GPU. The recurrent state is in 16 bit, but in float32 if the
    configuration asks for it, in Nemotron-H (models/config.py), and on CPUs, whose AVX-512 kernels need it
    (platforms/cpu.py). Shapes: vLLM 0.32 mamba_utils.py.
    """
    sizes = facts.recurrent
    assert sizes is not None  # noqa: S101 - a layer of this kind has them
    configured = facts.fields.get("mamba_ssm_cache_dtype") or facts.fields.get("mamba_ssm_dtype")
    dtype = configured or ("float32" if facts.text_type == "nemotron_h" else "auto")
    item = 4 if kind == "cpu" or dtype == "float32" else 2
    inner = sizes.heads * sizes.head_dim
    groups = math.ceil(sizes.groups / tensor) * tensor if mixer == "mamba2" else sizes.groups
    channels = inner + 2 * groups * sizes.state
    return -(-channels // tensor) * (sizes.kernel - 1) * 2 + -(-inner // tensor) * sizes.state * item
