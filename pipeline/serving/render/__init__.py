"""Render a launch plan as text, shell script, container command or manifest. Pure functions; nothing is started."""
