"""Sound checkpoints of the trap: schemes, layouts and sources that pass every check; faults go into copies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.base.schemes import table
from quantmint.pipeline.recipe.load import recipe_of
from quantmint.pipeline.runs.oneshot import make_checkpoint, open_job
from tests.bench import smollm2
from tests.serving.served.cases import MODEL
from tests.zoo import models as zoo

CALIBRATION: dict[str, object] = {"set": "tiny", "samples": 16, "sequence_length": 256, "batch_size": 8}
SMOLLM2 = "SmolLM2-135M"
"""The name of the source whose folder is given; see tests/bench/smollm2.py."""


@dataclass(frozen=True)
class Sound:
    """A checkpoint that must pass: its source, scheme, layout and KV cache. ``is_trained``: its source knows texts."""

    source: str
    scheme: str
    layout: str
    kv_cache: str = "auto"

    @property
    def name(self) -> str:
        """The checkpoint in words."""
        cache = ", FP8 KV cache" if self.kv_cache == "fp8" else ""
        return f"{self.source}: {self.scheme}{cache}, {self.layout}"

    @property
    def is_trained(self) -> bool:
        """Whether the source was trained on texts, so that its answers to prompts mean something."""
        return self.source in ("embedded", SMOLLM2)


SOUND: tuple[Sound, ...] = (
    Sound("embedded", "ptpc_fp8", "compressed-tensors", "fp8"),
    Sound("embedded", "ptpc_fp8", "quark"),
    Sound("embedded", "fp8", "quark", "fp8"),
    Sound("embedded", "fp8", "compressed-tensors"),
    Sound("embedded", "fp8_block", "compressed-tensors"),
    Sound("embedded", "int8_w8a8", "compressed-tensors"),
    Sound("embedded", "w4a16", "compressed-tensors"),
    Sound("embedded", "mxfp4", "quark"),
    Sound("embedded", "mxfp4", "compressed-tensors"),
    Sound("embedded", "mxfp8", "compressed-tensors"),
    Sound("mixture", "ptpc_fp8", "compressed-tensors"),
    Sound("mixture in FP8 blocks", "mxfp4", "quark"),
    Sound("latent mixture with a predictor", "ptpc_fp8", "quark"),
)
SOUND_SMOLLM2 = (
    Sound(SMOLLM2, "ptpc_fp8", "compressed-tensors", "fp8"),
    Sound(SMOLLM2, "ptpc_fp8", "quark"),
    Sound(SMOLLM2, "fp8", "quark", "fp8"),
    Sound(SMOLLM2, "mxfp8", "compressed-tensors"),
)
"""Eight bits alone: in four bits a model of its size is at the limit of the canary, however sound."""


@dataclass(frozen=True)
class Workshop:
    """A folder in which sources and checkpoints are made once."""

    folder: Path
    smollm2: Path | None = None

    def source(self, name: str) -> Path:
        """Return the folder of a source by its name."""
        if name == "embedded":
            return MODEL
        if name == SMOLLM2:
            assert self.smollm2 is not None
            return self.smollm2
        folder = self.folder / "sources" / name.replace(" ", "-")
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _BUILDERS[name](folder)
        return folder

    def checkpoint(self, wanted: Sound) -> Path:
        """Return the checkpoint's folder, quantized and inspected as `quantmint quantize` does."""
        folder = self.folder / "sound" / wanted.name.replace(": ", "-").replace(", ", "-").replace(" ", "-")
        if not folder.is_dir():
            static = wanted.kv_cache == "fp8" or table()[wanted.scheme].needs_ranges
            sections = {
                "source": {"folder": str(self.source(wanted.source))},
                "quantization": {"scheme": wanted.scheme, "format": wanted.layout, "kv_cache": wanted.kv_cache},
                "calibration": self._calibration(wanted.source) if static else None,
            }
            make_checkpoint(open_job(recipe_of(sections), folder, device="cpu"), PlainReporter())
        return folder

    def _calibration(self, source: str) -> dict[str, object]:
        """Return the calibration on what a source knows: SmolLM2's on the texts beside it."""
        if source != SMOLLM2:
            return CALIBRATION
        documents = json.loads((self.source(source) / smollm2.CALIBRATION).read_text(encoding="utf-8"))
        (self.folder / "articles.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        name = self.folder / "articles.yaml"
        name.write_text("name: articles\ndescription: Wikipedia.\nfile: articles.jsonl\ntext: text\n")
        return {**CALIBRATION, "set": str(name), "samples": 8, "sequence_length": 128}


def _mixture(folder: Path) -> None:
    zoo.build("qwen3_moe", folder)


def _in_blocks(folder: Path) -> None:
    zoo.encode_blocks(zoo.build("qwen3_moe", folder.with_name("16-bit")), folder)


def _with_predictor(folder: Path) -> None:
    zoo.add_predictor(zoo.build("deepseek_v3", folder), "deepseek")


_BUILDERS = {
    "mixture": _mixture,
    "mixture in FP8 blocks": _in_blocks,
    "latent mixture with a predictor": _with_predictor,
}
