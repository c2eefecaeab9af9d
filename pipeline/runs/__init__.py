"""Runs of a recipe: the planner, the runner, forecasts, preflight checks, sessions and searches."""
