"""Who hears how rounds go: webhooks, and Prometheus."""
