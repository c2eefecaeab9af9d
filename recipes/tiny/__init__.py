"""The embedded tiny model: a toy world, the Llama that has learned it, and how both were made.

``recipes/tiny/model`` is a real checkpoint of a few megabytes. Every stage of the pipeline runs on it without a
download, and it is a measuring instrument: a good scheme leaves its scores where they are and a poor one moves them.
`recipes.tiny.world` says how that is arranged.
"""
