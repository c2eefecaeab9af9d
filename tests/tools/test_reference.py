"""The pages of the documentation: generated ones are up to date, links lead somewhere, errors are ours."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.tools.reference import DOCS

ROOT = DOCS.parent
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def test_generated_pages_are_up_to_date() -> None:
    """In a process of their own: click keeps a command's help option as the first caller in a process names it."""
    command = [sys.executable, "-m", "tests.tools.reference", "--check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def _links() -> Iterator[tuple[Path, str, str]]:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("**/*.md"))):
        for link, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in link:
                yield page, link, anchor


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page, link, anchor in _links():
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert broken == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 9000


_PATH = re.compile(r"`((?:pipeline|eval|calibration|recipes|tests|docs)/[\w./*-]+)`")


def test_paths_that_pages_name_are_there() -> None:
    pages = (ROOT / "README.md", *(path for path in sorted(DOCS.glob("*.md")) if path.name != "commands.md"))
    named = [(page.name, path) for page in pages for path in _PATH.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 50
    assert [
        (page, path) for page, path in named if not re.search("NAME|FAMILY", path) and not any(ROOT.glob(path))
    ] == []


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob("**/*.md"))]
    assert [name for name in pages if name not in nav] == []


def _literals() -> Iterator[str]:
    """Yield every text of the sources, with ``\\0`` where a value is filled in."""
    for room in ("pipeline", "eval", "calibration"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    causes = yaml.safe_load((ROOT / "pipeline" / "serving" / "running" / "failures.yaml").read_text(encoding="utf-8"))
    for cause in causes:
        yield re.sub(r"\{\w+\}", "\0", cause["message"])


def test_the_messages_that_are_explained_are_ours() -> None:
    """A row's quotation begins as a message does; ``...`` stands for what is filled in."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    literals = "\n".join(text.replace("\n", " ") for text in _literals())
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(quoted) > 80
    unknown = []
    for message in quoted:
        parts = [re.escape(part.strip(" .,:;()")) for part in message.split("...")]
        if not re.search("^" + "[^\n]*?".join(parts), literals, re.M):
            unknown.append(message)
    assert unknown == []
