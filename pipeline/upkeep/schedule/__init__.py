"""When recipes are looked at again: cron expressions, and exported units, crontabs, manifests and workflows."""
