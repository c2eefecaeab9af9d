"""Parameters of a vision tower and of what joins it to the language model.

Exact for Llama-4, Qwen3-VL and SigLIP as in Gemma-3, by transformers 5.17's modules; another tower is counted as a
plain vision transformer with a projection, which is right to some percent of a part that is itself a few percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.serving.model.parts import Piece


def encoder_pieces(config: Mapping[str, Any], text_hidden: int) -> Iterator[Piece]:
    """The tower's weights, in two pieces: the tower, and the projection. Nothing for a model without one."""
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        kind = str(config.get("model_type", ""))
        sizes = _sizes(vision)
        tower, projector = _COUNT.get(kind.removesuffix("_moe"), _plain)(vision, sizes, config, text_hidden)
        yield Piece("visual", None, "encoder", "encoder", tower, 2 * tower)
        yield Piece("multi_modal_projector", None, "encoder", "encoder", projector, 2 * projector)


def _sizes(vision: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, hidden size, and width of the feed-forward layers."""
    # Where there is an embed_dim, as in Qwen2-VL, hidden_size is the language model's.
    hidden = _number(vision, "embed_dim", "hidden_size", "width") or 1152
    layers = _number(vision, "num_hidden_layers", "depth", "layers") or 24
    ratio = vision.get("mlp_ratio")
    width = int(ratio * hidden) if isinstance(ratio, int | float) else 4 * hidden
    return layers, hidden, _number(vision, "intermediate_size") or width


def _number(vision: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that is a number; of a list, as sizes in two directions are, its first."""
    for name in names:
        value = vision.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int | float):
            return int(value)
    return 0


def _blocks(layers: int, hidden: int, width: int) -> int:
    """Layers of a vision transformer: four projections and two feed-forward matrices with biases, two layer norms."""
    return layers * (4 * (hidden * hidden + hidden) + 2 * hidden * width + width + hidden + 4 * hidden)


def _plain(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    layers, hidden, width = sizes
    patch = _number(vision, "patch_size") or 14
    patches = (_number(vision, "image_size") // patch) ** 2
    tower = _blocks(layers, hidden, width) + hidden * 3 * patch * patch + hidden + patches * hidden + 2 * hidden
    return tower, hidden * text_hidden


def _gemma3(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    _, hidden, width = sizes
    tower, projector = _plain({"image_size": 224, **vision}, sizes, config, text_hidden)
    if vision.get("vision_use_head", True):  # SigLIP's pooling: a probe that attends to all patches; releases lack it
        tower += hidden + _blocks(1, hidden, width) - 2 * hidden
    return tower, projector + hidden


def _llama4(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    layers, hidden, width = sizes
    patch = _number(vision, "patch_size") or 14
    positions = ((_number(vision, "image_size") or 448) // patch) ** 2 + 1
    projected = _number(vision, "projector_input_dim") or 4096
    output = _number(vision, "projector_output_dim") or 4096
    # Pixels are shuffled into channels before the adapter's two matrices, which have no biases.
    adapter = width * projected + projected * output
    tower = _blocks(layers, hidden, width) + 3 * patch * patch * hidden + (positions + 1) * hidden + 4 * hidden
    return tower + adapter, (_number(vision, "vision_output_dim") or output) * text_hidden


def _qwen3_vl(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    layers, hidden, width = sizes
    pixels = (_number(vision, "in_channels") or 3) * (_number(vision, "temporal_patch_size") or 2)
    embedding = hidden * pixels * (_number(vision, "patch_size") or 16) ** 2 + hidden
    merged = hidden * (_number(vision, "spatial_merge_size") or 2) ** 2
    output = _number(vision, "out_hidden_size") or text_hidden
    merger = merged * merged + merged + merged * output + output
    deep = len(vision.get("deepstack_visual_indexes") or ())
    # The norm of a deep merger comes after the merge, of the last one before it.
    mergers = (1 + deep) * merger + 2 * hidden + deep * 2 * merged
    positions = _number(vision, "num_position_embeddings") * hidden
    return _blocks(layers, hidden, width) + embedding + positions, mergers


_COUNT = {"llama4": _llama4, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_vl, "gemma3": _gemma3}
