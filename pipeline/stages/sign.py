"""sign: somebody vouches for a release, by a key or by an identity.

A stage of its own, because two signatures over the same files are different bytes: the one that was made is kept, and
goes to every place that the release is published to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.base.errors import StageError
from pipeline.base.versions import versions
from pipeline.publish.release import SIGNATURE
from pipeline.publish.signing import foreseen_fingerprint, passphrase, require_identity, require_private, sign
from pipeline.stages import package
from pipeline.stages.stage import Job, Output, Setting, Stage
from pipeline.store.disk import disk_errors


@dataclass(frozen=True, slots=True)
class SignStage(Stage):
    """Planned only where the recipe asks for a signature; leaves `model.sig` and nothing else."""

    key: str = "sign"
    family: str = "sign"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """What holds the files of the release."""
        return {name: name for name in ("package", "quantize", "gate", "report", "inspect")}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Who signs: the public key, which lies beside the private one, so that no passphrase is asked for to plan."""
        key = setting.loaded.signing_key
        return {"signer": "keyless" if key is None else {"key_sha256": foreseen_fingerprint(key)}}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """What gives the signature its form."""
        return versions("model-signing")

    def run(self, job: Job) -> Output:
        """Read every file once more, sign what was read, and hold that against what was judged and packaged."""
        release = package.release(**{name: job.inputs[name] for name in self.inputs(job.setting)})
        paths = {name: file.path for name, file in release.files.items()}
        key, word = job.setting.loaded.signing_key, passphrase()
        if key is not None:
            require_private(key, word)
        signature = job.path / SIGNATURE
        with disk_errors(job.path), job.progress.bar(release.size, "B") as advance:
            signed = sign(release.name, paths, signature, key=key, passphrase=word, advance=advance)
        changed = sorted(name for name, file in release.files.items() if signed.digests.get(name) != file.sha256)
        if changed:
            signature.unlink()
            maker = next(key for key, entry in job.inputs.items() if paths[changed[0]].is_relative_to(entry.path))
            raise StageError(
                f"{paths[changed[0]]} changed since it was judged and packaged"
                f"{f', and {len(changed) - 1} more files' if changed[1:] else ''}: nothing is signed.",
                hint=f"`quantmint run --redo {maker}` makes it again.",
            )
        return Output(
            result={"signer": signed.signer.to_json(), "identity": release.identity},
            summary=f"{len(signed.digests)} files, by {signed.signer}",
        )


def require_signer(setting: Setting) -> None:
    """Raise `UserError` or `StageError` where a run would end, hours later, at a signature that nobody can give."""
    key = setting.loaded.signing_key
    if key is None:
        require_identity()
    else:
        require_private(key, passphrase())
