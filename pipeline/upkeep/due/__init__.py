"""Whether a recipe is due: its newest release against a plan of now."""
