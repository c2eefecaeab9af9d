"""The page of models, docs/models.md: which architecture can be made in which way, as the zoo's matrix found it.

python -m tests.zoo.page outcomes.json        # of `python -m tests.zoo.matrix --json outcomes.json`
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quantmint.pipeline.quantize.model.outcomes import expected_outcome
from tests.zoo.matrix import COLUMNS, Outcome
from tests.zoo.models import KINDS, table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TITLES: Mapping[str, str] = {
    "ptpc_fp8": "PTPC-FP8",
    "fp8_cache": "FP8, FP8 cache",
    "fp8_block": "FP8 in blocks",
    "mxfp4": "MXFP4",
    "mxfp4_quark": "MXFP4, Quark",
    "mxfp4_fp8": "W4A8, Quark",
    "mxfp4_gptq": "MXFP4 by GPTQ",
}
_HEADINGS: Mapping[str, str] = {
    "dense": "Dense",
    "mixtures": "Mixtures of experts",
    "hybrids": "State spaces, linear attention and hybrids",
    "latent": "Latent attention",
    "multimodal": "With a vision or audio tower",
}
_INTRODUCTION = """\
# Models

What `quantmint quantize` makes of each architecture that transformers {transformers} and vLLM {vllm} both know. Each
was tried on a tiny random model with the names and the layout of its release: quantized, then held against its source
by `quantmint inspect --source`. A number is the share of the decoder's weights, without embeddings, that the checkpoint
holds quantized; what stays in 16 bit is what vLLM builds without a quantization (routers, state spaces, indexers), and
what cannot be rounded. A letter stands for the reason why quantmint refuses, with exit code 2 and before anything is
computed: see [below](#refusals).

`make zoo` makes this page anew.
"""


_SOURCES: Mapping[str, str] = {
    "FP8 in blocks of 128 x 128": "fp8_block",
    "FP8 in blocks with E8M0 scales (DeepSeek V4)": "fp8_block_e8m0",
    "FP8 by channel": "fp8_channel",
    "FP8 by tensor": "fp8_tensor",
    "MXFP8": "mxfp8",
    "MXFP4, that of gpt-oss and DeepSeek V4 too": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4 of ModelOpt": "nvfp4_by",
    "INT4 of compressed-tensors, groups of 128": "int4",
    "INT4 of compressed-tensors with zero points": "int4_zero",
    "INT4 of AWQ": "awq",
    "INT4 of GPTQ, both formats": "gptq",
}
"""Encodings of sources, by their names in the table."""
TARGETS = ("ptpc_fp8", "fp8_block", "mxfp8", "mxfp4", "w4a16")
_ABOUT_SOURCES = """\
## Sources that are quantized already

What becomes of each weight; [Sources that are quantized already](sources.md) says why. *Bytes*: elements and scales
are copied. *Exact*: another format that holds the very numbers; in FP8 where the exponents behind a scale span 14
binades. *In part*: exact where FP8 happens to hold all numbers behind a scale, else rounded. *Rounded*: with a loss in
dB against the decoded source, which `quantize` and `inspect` print. NVFP4 keeps its bytes in `nvfp4`.
`tests/commands/test_source_outcomes.py` makes each of these checkpoints, but for gpt-oss
(`tests/commands/test_gpt_oss.py`), DeepSeek V4 (`tests/commands/test_deepseek_v4.py`) and ModelOpt
(`tests/commands/test_encoded_sources.py`).
"""


def source_table() -> list[str]:
    """Return the lines of the table of what becomes of quantized sources, by encoding and target scheme."""
    lines = ["| source | " + " | ".join(f"`{target}`" for target in TARGETS) + " |", "|---|" + "---|" * len(TARGETS)]
    for title, encoding in _SOURCES.items():
        cells = [short_outcome(encoding, target) for target in TARGETS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def short_outcome(encoding: str, target: str) -> str:
    """Return "bytes", "exact", "in part" or "rounded" for weights in an encoding that are quantized to a scheme."""
    phrase = expected_outcome(encoding, target)
    if "under one scale" in phrase:
        return "in part"
    return "bytes" if "bytes" in phrase else "exact" if "numbers" in phrase else "rounded"


def page(outcomes: Iterable[Outcome], versions: Mapping[str, str]) -> str:
    """Return the page for outcomes of whole rows, each sound or refused."""
    rows: dict[str, dict[str, Outcome]] = {}
    for pair in outcomes:
        rows.setdefault(pair.name, {})[pair.column] = pair
    reasons: dict[str, str] = {}
    for row in rows.values():
        for pair in row.values():
            if pair.kind == "refused":
                reasons.setdefault(reason(pair.message), _letter(len(reasons)))
    lines = [_INTRODUCTION.format(**versions)]
    for kind in KINDS:
        names = [name for name in rows if table()[name]["kind"] == kind]
        lines += [f"## {_HEADINGS[kind]}", ""]
        lines += ["| architecture | " + " | ".join(_TITLES[column] for column in COLUMNS) + " |"]
        lines += ["|---|" + "--:|" * len(COLUMNS)]
        for name in names:
            cells = [_cell(rows[name][column], reasons) for column in COLUMNS]
            lines.append(f"| {table()[name]['architecture']} ({name}) | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [_ABOUT_SOURCES, *source_table(), ""]
    lines += ["## Refusals", ""]
    lines += [f"- **{letter}**: {text}" for text, letter in reasons.items()]
    return "\n".join(lines) + "\n"


def documented() -> dict[str, dict[str, str]]:
    """Read the page back: by model and column a share in percent, or the reason of a refusal."""
    text = PAGE.read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^- \*\*(\w+)\*\*: (.*)$", text, re.MULTILINE))
    rows: dict[str, dict[str, str]] = {}
    for name, cells in re.findall(r"^\| \w+ \((\w+)\) \| (.*) \|$", text, re.MULTILINE):
        values = [reasons.get(cell, cell) for cell in cells.split(" | ")]
        rows[name] = dict(zip(COLUMNS, values, strict=True))
    return rows


def written(pair: Outcome) -> str:
    """Return what the page says of a pair: the share in percent, or the reason; any other outcome as it is."""
    if pair.kind == "sound":
        return _share(pair)
    return reason(pair.message) if pair.kind == "refused" else str(pair)


def reason(message: str) -> str:
    """Shorten a refusal to what holds for every size of the architecture: no option, no path, no number."""
    text = re.sub(r"^(--[\w-]+|MODEL|source|quantization\.\w+): ", "", message)
    text = re.sub(r"^/\S+: ", "", text)
    text = re.sub(r"(?<=\.)\d+(?=\.)", "*", text)
    text = re.sub(
        r"\b(found|expected) (ptpc_fp8|fp8_block|fp8|mxfp4_fp8|mxfp4)(?=,| (for|as) )", r"\1 the scheme", text
    )
    return text.partition(" To leave such tensors")[0].partition(" Leave them in 16 bit")[0].strip()


def _cell(pair: Outcome, reasons: Mapping[str, str]) -> str:
    return reasons[reason(pair.message)] if pair.kind == "refused" else written(pair)


def _share(pair: Outcome) -> str:
    return f"{100 * pair.share:.0f} %"


def _letter(number: int) -> str:
    """The letters a to z, then aa, ab and so on."""
    return (chr(97 + number // 26 - 1) if number >= 26 else "") + chr(97 + number % 26)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page from the outcomes in a file."""
    from importlib.metadata import version

    import yaml

    (path,) = sys.argv[1:] if arguments is None else arguments
    outcomes = [Outcome(**pair) for pair in json.loads(Path(path).read_text(encoding="utf-8"))]
    loaders = sorted((Path(__file__).parents[2] / "pipeline" / "quantize" / "model" / "loaders").glob("vllm-*.yaml"))
    vllm = str(yaml.safe_load(loaders[-1].read_text(encoding="utf-8"))["vllm"])
    PAGE.write_text(page(outcomes, {"transformers": version("transformers"), "vllm": vllm}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
