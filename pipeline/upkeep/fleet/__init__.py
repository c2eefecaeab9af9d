"""Many recipes, one after another and beside each other: a queue over sets of devices."""
