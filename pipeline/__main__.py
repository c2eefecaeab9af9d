"""`python -m pipeline` is `quantmint`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
