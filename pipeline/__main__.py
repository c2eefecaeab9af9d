"""`python -m pipeline` is `quantmint`."""

from pipeline.commands.cli import run

if __name__ == "__main__":
    run()
