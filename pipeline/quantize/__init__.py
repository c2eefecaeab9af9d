"""The core: checkpoint formats, model structure, engines and inspection."""
