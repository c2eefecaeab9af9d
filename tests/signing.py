"""Keys for tests: made where they are needed, never kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec, rsa

WORD = "correct horse battery staple"


def write_key(private: Path, key: Any = None, *, word: str | None = WORD) -> tuple[Path, Path]:
    """Write a private key (None: a new one on P-256) and its public one beside it; returns both paths."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    hidden = forms.NoEncryption() if word is None else forms.BestAvailableEncryption(word.encode())
    private.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, hidden))
    public = private.with_suffix(".pub")
    form = forms.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(forms.Encoding.PEM, form))
    return private, public


def rsa_key() -> Any:
    """A key of a kind that signs no models."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def curve_key(curve: ec.EllipticCurve) -> Any:
    """A key on a curve."""
    return ec.generate_private_key(curve)
