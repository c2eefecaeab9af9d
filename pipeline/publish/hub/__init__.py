"""A repository of the Hugging Face Hub as a destination."""
