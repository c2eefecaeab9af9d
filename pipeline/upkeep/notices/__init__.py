"""Who hears how rounds go: a webhook, and Prometheus."""
