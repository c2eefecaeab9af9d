"""A launch plan as text: for people, for a shell, and for what runs containers. Pure functions, nothing is started."""
