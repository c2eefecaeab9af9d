"""What to make: a YAML file per checkpoint, and the embedded tiny model."""
