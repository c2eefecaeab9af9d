"""Every architecture in FP8 and in one of the schemes without data: our bytes beside those of both libraries.

Each of those schemes meets weights by themselves and stacked experts; how a scheme rounds does not know its model.

Llama's are in test_oracles, and through our workers in test_llmcompressor and test_quark.

Where ours differ it is on purpose, and `MEANT` says why; a difference that is gone fails as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.formats.layout import layout
from tests.quantize.engines.libraries.cases import Adopted, Case, Make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MODELS = ("qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3", "llama4")
SCHEMES = {
    "llmcompressor": ("fp8", "ptpc_fp8", "fp8_block", "mxfp4"),
    "quark": ("fp8", "ptpc_fp8", "mxfp4"),
}
LAYOUT = {"llmcompressor": "compressed-tensors", "quark": "quark"}
# (engine, model): why no cache scales are asked of it.
NO_CACHE_SCALES: Mapping[tuple[str, str], str] = {
    **{(engine, "deepseek-v3"): "neither layout has scales for a latent cache" for engine in SCHEMES},
    ("llmcompressor", "llama4"): "compressed-tensors' cache ends with an error there",
    ("quark", "phi3"): "Quark looks for k_proj and v_proj, and Phi-3 has both in one: it would write none",
}
# (engine, model, scheme): which tensors may differ, and why. Everything else is the same, byte for byte.
MEANT: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("quark", model, "fp8"): (r".*\.experts\..*\.input_scale", "Quark measures an expert on the tokens routed to it")
    for model in ("mixtral", "qwen3-moe", "deepseek-v3")
}
# (engine, model, scheme): why the library cannot be asked.
CANNOT: Mapping[tuple[str, str, str], str] = {
    ("llmcompressor", "llama4", "fp8"): "its data needs a processor of images; see test_expert_oracles for its scales",
    **{
        ("llmcompressor", model, "fp8_block"): "parts of what vLLM loads as one end within a block, which is refused"
        for model in ("deepseek-v3", "llama4")
    },
    **{("quark", "llama4", scheme): "Quark does not take its experts apart" for scheme in SCHEMES["quark"]},
}


def cases(engine: str) -> dict[str, Case]:
    found = {}
    calibrated, *others = SCHEMES[engine]
    for number, model in enumerate(MODELS):
        for scheme in (calibrated, others[number % len(others)]):
            if (engine, model, scheme) in CANNOT:
                continue
            cached = scheme == "fp8" and (engine, model) not in NO_CACHE_SCALES
            section = {"kv_cache": "fp8"} if cached else {}
            found[f"{model}-{scheme}"] = Case(model, scheme, section, calibrated=scheme == "fp8")
    return found


@pytest.fixture(scope="module")
def made(by_library: Make) -> Callable[[str], Mapping[str, Adopted]]:
    known: dict[str, Mapping[str, Adopted] | BaseException] = {}

    def get(engine: str) -> Mapping[str, Adopted]:
        if engine not in known:
            try:
                known[engine] = by_library(engine, cases(engine))
            except (AssertionError, pytest.skip.Exception) as error:
                known[engine] = error  # not once more for every test
        found = known[engine]
        if isinstance(found, BaseException):
            raise found
        return found

    return get


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: t for shard in checkpoint.shards for name, t in load_file(checkpoint.folder / shard).items()}


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine in SCHEMES for name in cases(engine)], ids=lambda part: str(part)
)
def test_the_bytes_are_the_librarys(
    made: Callable[[str], Mapping[str, Adopted]], quantize: Callable[..., Any], engine: str, name: str
) -> None:
    case, adopted = cases(engine)[name], made(engine)[name]
    assert adopted.wrong == ()
    cached = "kv_cache" in case.section
    ours = quantize(case.model, LAYOUT[engine], scheme=case.scheme, kv_cache=cached)
    mine, theirs = tensors(ours.checkpoint), tensors(adopted.checkpoint)
    assert set(mine) == set(theirs)
    assert any("k_scale" in each or "k_proj.output_scale" in each for each in mine) is cached
    different = {
        each
        for each, tensor in mine.items()
        if tensor.dtype != theirs[each].dtype
        or tensor.shape != theirs[each].shape
        or not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, theirs[each])))
    }
    meant = MEANT.get((engine, case.model, case.scheme))
    if meant is None:
        assert different == set()
    else:
        assert different, "a difference that was meant is gone"
        assert {each for each in different if re.fullmatch(meant[0], each)} == different
    modules = tuple(ours.structure.linear)
    form = layout(LAYOUT[engine])
    claims = [
        form.claims(each.config["quantization_config"], modules) for each in (ours.checkpoint, adopted.checkpoint)
    ]
    assert claims[0] == claims[1]
