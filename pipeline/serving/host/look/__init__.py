"""The single looks at a machine: each takes a subject and says what it saw."""
