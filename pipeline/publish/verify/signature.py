"""Whether somebody who is trusted signed exactly these files: all of them, no other, and no other model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.base.errors import StageError
from pipeline.publish import signing
from pipeline.publish.release import SIGNATURE
from pipeline.publish.signing import SignatureError, Signed, read_signature
from pipeline.publish.verify.check import Check, Outcome, fails, judged, not_checked
from pipeline.publish.verify.subject import Subject

_SHOWN = 5
_UNSIGNED = (
    "the other checks prove that what lies here agrees with itself; whoever can write here could have made all of it "
    "anew, scores of items included: only a signature says who vouches for it"
)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a reader trusts: a public key (PEM), or an identity with its OpenID issuer; ``unsigned``: even nobody."""

    key: Path | None = None
    identity: str | None = None
    issuer: str | None = None
    unsigned: bool = False

    @property
    def someone(self) -> bool:
        """Whether a signer is named."""
        return self.key is not None or self.identity is not None


def check_signature(subject: Subject, trust: Trust) -> Check:
    """Verify the signature by the trusted key or identity, and hold what it covers against every file."""
    if not subject.has(SIGNATURE):
        return _unsigned(trust)
    try:
        signed = read_signature(subject.folder / SIGNATURE)
    except SignatureError as error:
        return fails("signature", _short(subject, error))
    faults = _differences(subject, signed)
    if not trust.someone:
        if faults:
            return fails("signature", *faults)
        reason = f"it is signed by {signed.signer}; no --key or --identity says who it should be"
        if trust.unsigned:
            return Check("signature", Outcome.OK, f"{reason}, which --unsigned accepts", (_UNSIGNED,))
        return not_checked("signature", reason, "anybody can sign a release, and call himself anything")
    try:
        signing.verified(subject.folder / SIGNATURE, key=trust.key, identity=trust.identity, issuer=trust.issuer)
    except SignatureError as error:
        return fails("signature", _short(subject, error), *faults)
    except StageError as error:
        return not_checked("signature", error.message)
    said = f"signed by {signed.signer}, over every one of {len(signed.digests)} files"
    return judged("signature", faults, said, details=_on_word(subject))


def _short(subject: Subject, error: SignatureError) -> str:
    return error.message.replace(f"{subject.folder}/", "").replace(f"{subject.folder} ", "the folder ").rstrip(".")


def _unsigned(trust: Trust) -> Check:
    if trust.unsigned:
        return Check("signature", Outcome.OK, "nobody signed it, which --unsigned accepts", (_UNSIGNED,))
    if trust.someone:
        return fails(
            "signature", f"there is no {SIGNATURE}: nobody signed it, or the signature was taken away", _UNSIGNED
        )
    return not_checked("signature", "nobody signed it (--unsigned accepts that)", _UNSIGNED)


def _differences(subject: Subject, signed: Signed) -> list[str]:
    """Where what was signed is not what lies here; of another model nearly nothing is."""
    covered = signed.digests
    here = {name: subject.digests[name] for name in subject.listing.files if name != SIGNATURE}
    shared = covered.keys() & here.keys()
    other = sorted(name for name in shared if covered[name] != here[name])
    lost, added = sorted(covered.keys() - here.keys()), sorted(here.keys() - covered.keys())
    faults = [f"{name} is not what was signed: it was changed since" for name in other]
    faults += [f"{name} was signed, and is not here" for name in lost]
    faults += [f"{name} is not covered by the signature" for name in added]
    weights = [name for name in covered if name.endswith(".safetensors")]
    count, total = len(other) + len(lost) + len(added), len(covered.keys() | here.keys())
    named = subject.manifest is not None and signed.name != subject.manifest.name
    if weights and all(covered[name] != here.get(name) for name in weights) and (named or 2 * count > total):
        return [f"{SIGNATURE} signs another model, {signed.name}: {count} of {total} digests differ, all weights' too"]
    more = [f"{len(faults) - _SHOWN} more files"] if len(faults) > _SHOWN else []
    return faults[:_SHOWN] + more


def _on_word(subject: Subject) -> tuple[str, ...]:
    word = f"of {len(subject.vouched)} files the digest was taken on the Hub's word"
    return (word,) if subject.vouched else ()
