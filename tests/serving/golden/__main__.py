"""Rewrites the texts of the golden plans, or with ``--check`` says which differ: ``python -m tests.serving.golden``."""

from __future__ import annotations

import sys

from tests.serving.golden.text import FOLDER, cases, text_of


def main() -> int:
    check = "--check" in sys.argv[1:]
    wanted = {f"{case['name']}.txt": text_of(case) for case in cases()}
    differing = [
        name for name, text in wanted.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text
    ]
    stale = [path for path in FOLDER.glob("*.txt") if path.name not in wanted]
    for name in differing:
        sys.stdout.write(f"{name}\n")
        if not check:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{path.name} has no case\n")
        if not check:
            path.unlink()
    return 1 if check and (differing or stale) else 0


if __name__ == "__main__":
    sys.exit(main())
