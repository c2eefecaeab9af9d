"""quantmint verify REPO_OR_PATH"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option

if TYPE_CHECKING:
    from pipeline.verify.check import Check


@click.command(name="verify")
@click.argument("subject", metavar="REPO_OR_PATH")
@click.option(
    "--key", type=click.Path(path_type=Path), help="PEM file with the public key of whom you trust to publish it."
)
@click.option("--identity", help="Whom you trust, where it was signed without a key: an address or a workflow's URL.")
@click.option("--issuer", help="Who vouches for that identity: the OpenID provider's URL.")
@click.option("--unsigned", is_flag=True, help="Accept a release that nobody vouches for.")
@click.option("--revision", help="Tag of the release, also as REPO@TAG (default: the current one).")
@click.option(
    "--remote",
    is_flag=True,
    help="Of a repository of the Hub: fetch no weights. Their digests are the Hub's word, their numbers unchecked.",
)
@json_option
def command(
    subject: str,
    key: Path | None,
    identity: str | None,
    issuer: str | None,
    unsigned: bool,
    revision: str | None,
    remote: bool,
    as_json: bool,
) -> int:
    """Check everything that can be checked of a release, with nothing but what was published.

    REPO_OR_PATH is a folder, a repository (org/name, org/name@TAG), or a bucket (s3://bucket/prefix/name). Every file
    is hashed, the signature and the provenance are followed, the checkpoint is inspected and the gate judges again.

    Ends with 0 when everything holds, with 1 when something does not, with 3 when nothing fails but something could
    not be checked (a release without a signature, or no key to check one with), with 2 when there is no release.
    """
    from pipeline.errors import UserError
    from pipeline.progress import reporter_for
    from pipeline.publish.fetching import OtherBytesError
    from pipeline.publish.keys import public_fingerprint
    from pipeline.verify.check import exit_code, fails
    from pipeline.verify.place import opened
    from pipeline.verify.run import verify
    from pipeline.verify.signature import Trust

    if key is not None and (identity or issuer):
        raise UserError("found --key as well as --identity or --issuer, expected one of the two ways to name a signer")
    if (identity is None) != (issuer is None):
        raise UserError("found one of --identity and --issuer, expected both: names are only unique at an issuer")
    if key is not None and not key.is_file():
        raise UserError(f"--key: {key}: no such file")
    if key is not None:
        public_fingerprint(key)  # before a large model is fetched
    progress = reporter_for(json=as_json)
    try:
        with opened(subject, revision, remote=remote, progress=progress) as found:
            trust = Trust(key, identity, issuer, unsigned)
            checks = verify(found.folder, trust, progress, vouched=found.vouched, tag=found.tag)
    except OtherBytesError as error:  # what fails already on the way here needs no further check to be false
        checks = (fails("digests", error.message, "it was not fetched; nothing else was checked"),)
    if as_json:
        emit({"place": subject, "exit_code": exit_code(checks), "checks": [check.to_json() for check in checks]})
    else:
        _print(subject, checks)
    return exit_code(checks)


def _print(place: str, checks: Sequence[Check]) -> None:
    """A line for each check, what it found below it, and what all of them together say."""
    from pipeline.commands.tables import paragraph, terminal
    from pipeline.verify.check import Outcome, exit_code

    marks = {Outcome.OK: ("✓", "green"), Outcome.FAILS: ("✗", "red"), Outcome.NOT_CHECKED: ("?", "yellow")}
    ends = {0: ("VERIFIED", "green"), 1: ("FAILS", "red"), 3: ("NOT ALL CHECKED", "yellow")}
    console = terminal()
    word, colour = ends[exit_code(checks)]
    click.echo(f"{click.style(word, fg=colour, bold=True)}  {_plain(place)}")
    click.echo()
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, colour = marks[check.outcome]
        said = "" if check.outcome is Outcome.OK else f"{check.outcome.value}: "
        # The escape sequences of a colour take no room: the mark is coloured after the lines were broken.
        text = paragraph(console, f"  {mark} {check.name:<{width}}  ", said + _plain(check.reason))
        click.echo(text.replace(mark, click.style(mark, fg=colour), 1))
        for detail in check.details[:_SHOWN]:
            click.echo(paragraph(console, " " * (width + 6), _plain(detail)))
        if len(check.details) > _SHOWN:
            click.echo(f"{' ' * (width + 6)}{len(check.details) - _SHOWN} more; --json has all")


_SHOWN = 8


def _plain(text: str) -> str:
    """What a stranger wrote, on one line and without what would move a cursor or turn letters around."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
