"""Recipes: schema, strict reading, and faults with their place."""
