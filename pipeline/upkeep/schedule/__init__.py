"""When recipes are looked at again: cron expressions, exported units and manifests, and a resident scheduler."""
