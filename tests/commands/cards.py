"""Shipped recipes run on tiny models of their families, and their checkpoints held against what AMD's cards say."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantmint import recipes
from quantmint.pipeline.quantize.formats.layout import layout
from tests.zoo.models import read, read_config

TINY = (
    "target: {hardware: cpu, gpus: 1, workload: tiny, max_model_len: 512}",
    "evaluation: {suite: tiny-recall, runtime: reference}",
    "gate: {throughput: {min_ratio: null}, canary: null, acceptance: null}",
)
DTYPES = {
    None: "torch.bfloat16",
    **dict.fromkeys(("ptpc_fp8", "fp8_block"), "torch.float8_e4m3fn"),
    **dict.fromkeys(("mxfp4", "mxfp4_fp8"), "torch.uint8"),
}


@dataclass(frozen=True)
class Card:
    """What a card says: globs of modules in 16 bit, then globs of modules with a scheme of their own, then the rest."""

    excluded: Sequence[str]
    rest: str
    schemes: Mapping[str, str]

    def scheme(self, module: str) -> str | None:
        """Return the scheme of a linear module, None for 16 bit."""
        if any(fnmatchcase(module, pattern) for pattern in self.excluded):
            return None
        return next((scheme for glob, scheme in self.schemes.items() if fnmatchcase(module, glob)), self.rest)


def run_shipped(quantmint: Callable[..., Any], name: str, source: Path, *lines: str) -> Path:
    """Make the checkpoint of a shipped recipe from the tiny model ``source``, inspect it, and return its folder.

    ``lines`` are further sections of a recipe that extends the shipped one, such as calibration texts.
    """
    shutil.copytree(Path(recipes.__path__[0]), "shipped", ignore=lambda *_: ["tiny", "__pycache__"])
    shipped = Path(f"shipped/{name}.yaml")
    shipped.write_text(shipped.read_text().replace("{margins: {wikitext: null}}", "{margin: 0.1}"))  # of another suite
    text = [f"name: {name}-tiny", f"extends: {name}.yaml", f"source: {{folder: {source}, repo: null, revision: null}}"]
    Path(f"shipped/{name}-tiny.yaml").write_text("\n".join([*text, *TINY, *lines]))
    made = quantmint("run", f"shipped/{name}-tiny.yaml", "--until", "inspect", "--device", "cpu")
    assert made.code == 0, made.err
    (config,) = Path("store/quantize").glob("*/**/config.json")
    return config.parent


def assert_card(folder: Path, card: Card) -> dict[str | None, int]:
    """Assert that a checkpoint in Quark's layout has each linear module as the card says, declared and stored.

    Returns the number of modules by scheme.
    """
    matrices = {
        name.removesuffix(".weight"): tensor for name, tensor in read(folder).items() if name.endswith(".weight")
    }
    matrices = {name: tensor for name, tensor in matrices.items() if tensor.ndim == 2 and "embed" not in name}
    claims = layout("quark").claims(read_config(folder)["quantization_config"], list(matrices))
    expected = {module: card.scheme(module) for module in matrices}
    assert claims.schemes == expected
    assert not claims.unknown
    assert {module: str(tensor.dtype) for module, tensor in matrices.items()} == {
        module: DTYPES[scheme] for module, scheme in expected.items()
    }
    return {scheme: list(expected.values()).count(scheme) for scheme in expected.values()}
