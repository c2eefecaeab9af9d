"""Facts of cards as runs would have gathered them; the figures are those of `tests.eval.report.made`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantmint.eval import workloads
from quantmint.pipeline.publish.card import CalibrationText, CardFacts, CardSource, QuantizationFacts
from quantmint.pipeline.publish.licences import terms
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.sections import Licence
from quantmint.pipeline.serving.model.facts import as_quantized, model_facts
from quantmint.pipeline.stages.card import launches
from tests.eval.report import made as reports

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
LLAMA: Mapping[str, Any] = {
    "license": "llama3.3",
    "library_name": "transformers",
    "language": ["en", "fr", "it", "pt", "hi", "es", "th", "de"],
    "tags": ["facebook", "meta", "pytorch", "llama", "llama-3", "region:us"],
    "pipeline_tag": "text-generation",
    "extra_gated_prompt": "### LLAMA 3.3 COMMUNITY LICENSE AGREEMENT",
}


def llama(name: str = "llama70b-fp8kv", **changes: Any) -> CardFacts:
    """Llama 3.3 70B by one of the recipes, published to the Hub from an MI300X."""
    recipe = load_recipe(name).recipe
    quantization = recipe.quantization
    source = model_facts(CONFIGS / "Llama-3.3-70B-Instruct")
    checkpoint = as_quantized(
        source, scheme=quantization.scheme, kv_cache=quantization.kv_cache, format=quantization.format
    )
    repo = {"mxfp4": "my-org/Llama-3.3-70B-Instruct-MXFP4"}.get(quantization.scheme, "my-org/Llama-3.3-70B-FP8-KV")
    calibrated = CalibrationText(
        name="ultrachat", samples=512, sequence_length=2048, dataset="HuggingFaceH4/ultrachat_200k",
        revision="8049631c405ae6576f93f445c6b8166f76f5505a", tokens=1_048_576,
    )  # fmt: skip
    facts = CardFacts(
        name=recipe.name,
        repo=repo,
        artefact="3f1c0a52" * 8,
        judged="2026-11-21T11:59:58.120Z",
        base=CardSource(
            name="meta-llama/Llama-3.3-70B-Instruct",
            repo="meta-llama/Llama-3.3-70B-Instruct",
            commit="6f6073b423013f6a7d4d9f39144961bfbfbc386b",
            architecture="LlamaForCausalLM",
            metadata=LLAMA,
        ),
        quantization=QuantizationFacts(
            quantization,
            schemes={quantization.scheme: 560},
            unquantized=("lm_head",),
            calibration=calibrated if quantization.kv_cache == "fp8" else None,
        ),
        terms=terms(LLAMA, ("LICENSE", "USE_POLICY.md"), Licence(accepted=True)),
        launches=launches(recipe, workloads.load(recipe.target.workload), checkpoint, repo, vllm="0.32.0"),
        report=reports.good(),
        signed="key",
    )
    return replace(facts, **changes)


def tiny(**changes: Any) -> CardFacts:
    """A model of a folder, made for a CPU and measured there, that goes to a folder; nobody says its licence."""
    recipe = load_recipe("tiny-ptpc-fp8kv").recipe
    folder = Path(__file__).parents[3] / "recipes" / "tiny" / "model"
    checkpoint = as_quantized(model_facts(folder), scheme="ptpc_fp8", kv_cache="fp8", format=recipe.quantization.format)
    facts = llama()
    return replace(
        facts,
        **{
            "name": recipe.name,
            "repo": None,
            "base": CardSource(name="tiny/model", digest="4b091d1c" * 8, architecture="LlamaForCausalLM"),
            "quantization": replace(
                facts.quantization, section=recipe.quantization, schemes={"ptpc_fp8": 28},
                calibration=CalibrationText(name="tiny", samples=64, sequence_length=256, sha256="b0f7dbc6" * 8),
            ),
            "terms": terms({}, ()),
            "launches": launches(recipe, workloads.load("tiny"), checkpoint, recipe.name, vllm="0.32.0"),
            "report": reports.elsewhere(),
            "signed": None,
            **changes,
        },
    )  # fmt: skip


def hostile() -> CardFacts:
    """Names that would be markup, formulas or the end of a table."""
    bad = "<img src=x onerror=alert(1)> | $x^2$ [a](javascript:alert(1)) `b` **c** &lt;"
    facts = llama()
    section = {"exclude": [r"re:.*(q|k)_proj`", "a|b", bad], "algorithm": "gptq"}
    made = replace(
        facts.quantization, unquantized=(bad,), schemes={"fp8": 3, bad: 1},
        section=facts.quantization.section.model_copy(update=section),
        calibration=CalibrationText(name=bad, samples=1, sequence_length=1, dataset="a/b) <script>", revision=bad),
    )  # fmt: skip
    metadata = {**LLAMA, "license": "other", "license_name": bad, "license_link": "javascript:alert(1)"}
    return replace(
        facts,
        repo=None,
        name=bad,
        base=CardSource(name=bad, digest="0" * 64, metadata={**metadata, "tags": [bad, "---", "no"]}),
        quantization=made,
        terms=replace(terms(metadata, ("LICENSE",)), conditions=(bad,), display=(bad,)),
    )
