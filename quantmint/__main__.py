"""`python -m quantmint` is `quantmint`."""

from quantmint.pipeline.commands.cli import run

if __name__ == "__main__":
    run()
