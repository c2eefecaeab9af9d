"""A whole recipe's run on another place: Slurm, Kubernetes, a Ray cluster."""
