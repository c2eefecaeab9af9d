"""Ray: parts of a stage, and whole recipes, on the nodes of a cluster that share a filesystem."""
