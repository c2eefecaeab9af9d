"""`python -m quantmint`, and the installed `quantmint`: the command line, once it can be imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line as this process. Ends with 5 where a module that it needs cannot be imported.

    Python itself would end with 1, which is a judgement here. A module of PYTHONPATH that has the name of a needed
    one may raise anything, an exit included.
    """
    try:
        from quantmint.pipeline.commands.cli import run
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        if "--debug" in sys.argv:
            sys.excepthook(type(error), error, error.__traceback__)
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        file = "?" if place is None else place.tb_frame.f_code.co_filename
        path = os.environ.get("PYTHONPATH")
        hint = (
            f"PYTHONPATH is {path}: a module there may hide one that quantmint needs." if path else "Install it anew."
        )
        print(f"quantmint: cannot start: {type(error).__name__}: {error} ({file})\n  {hint}", file=sys.stderr)  # noqa: T201
        sys.exit(5)
    run()


if __name__ == "__main__":
    main()
