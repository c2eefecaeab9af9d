"""`python -m pipeline` is `quantmint`."""

from pipeline.commands.cli import main

if __name__ == "__main__":
    main()
