"""The report's plots, each drawn for a given width so that text keeps its size on a phone."""
