"""Measuring a server under load: the load itself, what the machine did meanwhile, whether the client kept up."""
