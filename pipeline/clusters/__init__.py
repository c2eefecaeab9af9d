"""Elsewhere: one run over the nodes of a Ray cluster (`ray`), or a whole run as a job (`submit`)."""
