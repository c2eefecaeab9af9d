"""A repository of the Hugging Face Hub as a place to publish to."""
