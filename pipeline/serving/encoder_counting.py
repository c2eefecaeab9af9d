"""Parameters of a vision tower and of what joins it to the language model.

Exact for Llama-4, Qwen3-VL and SigLIP as in Gemma-3, by transformers 5.17's modules; another tower is counted as a
plain vision transformer with a projection, which is right to some percent of a part that is itself a few percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.serving.parts import Piece


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
    hidden = int(vision.get("hidden_size") or vision.get("embed_dim") or vision.get("width") or 1152)
    layers = int(vision.get("num_hidden_layers") or vision.get("depth") or vision.get("layers") or 24)
    return layers, hidden, int(vision.get("intermediate_size") or vision.get("mlp_ratio", 4) * hidden)


def _blocks(layers: int, hidden: int, width: int) -> int:
    """Layers of a vision transformer: four projections and two feed-forward matrices with biases, two layer norms."""
    return layers * (4 * (hidden * hidden + hidden) + 2 * hidden * width + width + hidden + 4 * hidden)


def _plain(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    layers, hidden, width = sizes
    patch = int(vision.get("patch_size") or 14)
    patches = (int(vision.get("image_size") or 0) // patch) ** 2
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
    patch = int(vision.get("patch_size") or 14)
    positions = (int(vision.get("image_size") or 448) // patch) ** 2 + 1
    projected, output = int(vision["projector_input_dim"]), int(vision["projector_output_dim"])
    # Pixels are shuffled into channels before the adapter's two matrices, which have no biases.
    adapter = width * projected + projected * output
    tower = _blocks(layers, hidden, width) + 3 * patch * patch * hidden + (positions + 1) * hidden + 4 * hidden
    return tower + adapter, int(vision["vision_output_dim"]) * text_hidden


def _qwen3_vl(
    vision: Mapping[str, Any], sizes: tuple[int, int, int], config: Mapping[str, Any], text_hidden: int
) -> tuple[int, int]:
    layers, hidden, width = sizes
    pixels = int(vision.get("in_channels") or 3) * int(vision.get("temporal_patch_size") or 2)
    embedding = hidden * pixels * int(vision.get("patch_size") or 16) ** 2 + hidden
    merged, output = hidden * int(vision.get("spatial_merge_size") or 2) ** 2, int(vision["out_hidden_size"])
    merger = merged * merged + merged + merged * output + output
    deep = len(vision.get("deepstack_visual_indexes") or ())
    # The norm of a deep merger comes after the merge, of the last one before it.
    mergers = (1 + deep) * merger + 2 * hidden + deep * 2 * merged
    positions = int(vision.get("num_position_embeddings") or 0) * hidden
    return _blocks(layers, hidden, width) + embedding + positions, mergers


_COUNT = {"llama4": _llama4, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_vl, "gemma3": _gemma3}
