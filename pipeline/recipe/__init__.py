"""What a recipe says, read strictly.

    loaded = load_recipe("llama8b-ptpc")
    refuse([*check(loaded, config=config), *check_run(loaded)])

Importing this package costs a few hundred milliseconds at most: pydantic and PyYAML, no PyTorch.
"""

from __future__ import annotations

from pipeline.recipe.faults import Fault, Place, refuse
from pipeline.recipe.load import LoadedRecipe, load_recipe, recipe_names, resolved_yaml
from pipeline.recipe.schema import Recipe

__all__ = ["Fault", "LoadedRecipe", "Place", "Recipe", "load_recipe", "recipe_names", "refuse", "resolved_yaml"]
