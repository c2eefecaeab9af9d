"""Find the parts of a recipe that its serving runtime cannot answer, before any work.

A run asks SGLang for log probabilities of prompts and for greedy answers: the canary, the suite and its control. What
is measured in another way, or belongs to a launch that quantmint makes, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantmint.pipeline.recipe.faults import Fault, YamlPath
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.running.dialect import VLLM, dialect_of

_ANSWERED = "the canary and the suite's tasks are asked there"


def runtime_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Yield a fault for each part of a recipe that needs vLLM while `serve.runtime` is another."""
    dialect = dialect_of(loaded.recipe.serve.runtime)
    if dialect is VLLM:
        return
    for at, value in _launch_settings(loaded.recipe):
        fault = f"found {value} with serve.runtime {dialect.runtime}, expected none"
        yield loaded.fault(at, f"{fault}: it is a setting of a vLLM that quantmint starts")
    for at, value in _endpoints(loaded.recipe):
        fault = f"found {value} with serve.runtime {dialect.runtime}, expected null: only vLLM's requests measure it"
        yield loaded.fault(at, f"{fault}; {_ANSWERED}")
    if loaded.recipe.evaluation.runtime == "reference":
        fault = f"found reference with serve.runtime {dialect.runtime}, expected one of the two"
        yield loaded.fault(("evaluation", "runtime"), f"{fault}: {dialect.title} answers for both sides")
    if loaded.recipe.search is not None:
        fault = f"found a search with serve.runtime {dialect.runtime}, expected null: each try is another checkpoint"
        yield loaded.fault(("search",), f"{fault}, which a person would have to start a server for")


def _launch_settings(recipe: Recipe) -> Iterator[tuple[YamlPath, str]]:
    """Yield (place, what was found) of settings of a launch of vLLM."""
    serve = recipe.serve
    for name in serve.knobs:
        yield ("serve", "knobs", name), name
    if serve.arguments:
        yield ("serve", "arguments"), serve.arguments[0]
    if serve.speculative is not None:
        yield ("serve", "speculative"), serve.speculative.method
    if serve.tunableop is not None:
        yield ("serve", "tunableop"), serve.tunableop
    if serve.profile is not None:
        yield ("serve", "profile"), serve.profile
    if serve.pack != 1:
        yield ("serve", "pack"), str(serve.pack)


def _endpoints(recipe: Recipe) -> Iterator[tuple[YamlPath, str]]:
    """Yield (place, what was found) of endpoints of the gate that are measured through vLLM's own requests."""
    gate, evaluation = recipe.gate, recipe.evaluation
    if gate.throughput.min_ratio is not None:
        yield ("gate", "throughput", "min_ratio"), f"{gate.throughput.min_ratio:g}"
    elif gate.throughput.launches > 0:
        yield ("gate", "throughput", "launches"), f"{gate.throughput.launches} launches"
    for section, name, value in (
        ("gate", "acceptance", gate.acceptance),
        ("gate", "kl", gate.kl),
        ("gate", "layout", gate.layout),
        ("evaluation", "tools", evaluation.tools),
        ("evaluation", "long", evaluation.long),
        ("evaluation", "reasoning", evaluation.reasoning),
    ):
        if value is not None:
            yield (section, name), f"a promise on {name}" if section == "gate" else name
