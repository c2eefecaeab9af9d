"""Figures of a finished run in an experiment tracker, beside the report."""
