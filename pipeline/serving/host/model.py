"""What `quantmint doctor --model` names: a checkpoint's folder, or a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.serving.host.subject import Wanted
from pipeline.serving.planning.target import Target, checked

if TYPE_CHECKING:
    from pipeline.serving.model.facts import ModelFacts


def wanted_of(model: str) -> tuple[Wanted, Target | None]:
    """What is to be served, and on what where a recipe says so. UserError for what is neither folder nor recipe."""
    folder = Path(model)
    if folder.is_dir():
        from pipeline.serving.model.facts import model_facts

        return wanted_by(model_facts(folder)), None
    from pipeline.recipe.load import load_recipe

    recipe = load_recipe(model).recipe
    made, target = recipe.quantization, recipe.target
    return Wanted(made.scheme, made.kv_cache, made.format), checked(Target(target.hardware, target.gpus))


def wanted_by(facts: ModelFacts) -> Wanted:
    """What a checkpoint with these facts asks of a machine."""
    return Wanted(facts.quantization, facts.kv_cache_scheme or "auto", facts.checkpoint_format, facts.weights)
