"""Schedules of recipes as units, crontabs, manifests and workflows."""
