"""On what ranges are measured, and how."""
