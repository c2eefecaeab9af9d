"""An honest release, made once; each test breaks a copy of its own."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantmint.eval.report import page
from quantmint.eval.report.model import Report
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.publish.release import SIGNATURE
from quantmint.pipeline.publish.signing import sign
from quantmint.pipeline.publish.verify import documents
from quantmint.pipeline.publish.verify.files import Trust
from quantmint.pipeline.publish.verify.run import verify
from quantmint.pipeline.publish.verify.subject import ReleaseCheck
from tests.conftest import Models, Quantize
from tests.publish.conftest import bucket, s3_server
from tests.publish.verify import honest
from tests.stages.conftest import Ended

__all__ = ["bucket", "s3_server"]  # fixtures of the tests of publishing

Verify = Callable[..., Mapping[str, ReleaseCheck]]
Quantmint = Callable[..., Ended]


@pytest.fixture(scope="module", autouse=True)
def _pages_rendered_once() -> Iterator[None]:
    """Remember the page that a check renders of a report's data: its plots are most of a check's time.

    The releases themselves are rendered apart, so the first check of each file shows that both pages are the same.
    """
    pages: dict[str, str] = {}

    def render(report: Report) -> str:
        data = json.dumps(report)
        if data not in pages:
            pages[data] = page.render(report)
        return pages[data]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "page", SimpleNamespace(render=render))
        yield


@pytest.fixture(scope="session")
def made(models: Models, quantize: Quantize, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release that is copied; nobody changes it."""
    folder = tmp_path_factory.mktemp("honest") / "llama-ptpc"
    shutil.copytree(quantize("llama", "compressed-tensors").folder, folder)
    return honest.make(folder, models("llama"))


@pytest.fixture
def release(made: Path, tmp_path: Path) -> Path:
    """A copy of the honest release, unsigned."""
    return Path(shutil.copytree(made, tmp_path / "llama-ptpc"))


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy of the release that quantmint 0.1.0 published of a random model of one layer, by all of its stages."""
    with tarfile.open(Path(__file__).parents[2] / "assets/release/pages-fp8.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "pages-fp8"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """``keys("ours")`` is a private key and its public one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("keys")

    def get(name: str) -> tuple[Path, Path]:
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        if not private.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            pem = serialization.Encoding.PEM
            private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
            public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return get


@pytest.fixture(scope="session")
def signature(made: Path, keys: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signature of ours over the honest release."""
    return signed_by(made, keys("ours")[0], tmp_path_factory.mktemp("signature") / SIGNATURE)


@pytest.fixture
def signed(release: Path, signature: Path) -> Path:
    """A copy of the honest release, signed by us."""
    shutil.copy(signature, release / SIGNATURE)
    return release


def signed_by(folder: Path, private: Path, signature: Path) -> Path:
    """Sign what lies in a folder as the stage does."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != SIGNATURE
    }
    sign(folder.name, files, signature, key=private)
    return signature


@pytest.fixture
def check() -> Verify:
    """``check(folder, Trust(...))``: all checks by their names."""

    def run(folder: Path, trust: Trust | None = None) -> Mapping[str, ReleaseCheck]:
        return {check.name: check for check in verify(folder, trust or Trust(unsigned=True), PlainReporter())}

    return run


@pytest.fixture
def quantmint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Quantmint:
    """The command line, in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return run
