"""The shipped recipes, a YAML file per checkpoint, and the embedded tiny model."""
