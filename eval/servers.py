"""Facts about a server that decide whether two measurements may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What a checkpoint brings with it: these differ by design between a baseline and its quantized candidate.
ARTEFACT_FLAGS = frozenset({"--model", "--tokenizer", "--revision", "--quantization", "--kv-cache-dtype"})
# Where the server listens or writes, which no result depends on.
ENDPOINT_FLAGS = frozenset({"--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level"})


@dataclass(frozen=True, slots=True)
class Server:
    """How one side was served.

    `version` is vLLM's, `image` the container's digest (None outside one), `device` the accelerator's name or "CPU",
    `argv` the command, `env` the variables of the launch plan, `faults` what its log says that voids a measurement.
    """

    version: str
    device: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    image: str | None = None
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return {**asdict(self), "argv": list(self.argv), "env": dict(self.env), "faults": list(self.faults)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Server:
        """Read back what `to_json` wrote."""
        return cls(**{**data, "argv": tuple(data["argv"]), "faults": tuple(data["faults"])})


def differences(baseline: Server, candidate: Server) -> tuple[str, ...]:
    """One sentence for each difference that does not belong to the artefact; empty when the sides are comparable."""
    found = [
        f"{noun} differs: {before} for the baseline, {after} for the candidate"
        for noun, before, after in (
            ("vLLM version", baseline.version, candidate.version),
            ("container image", baseline.image, candidate.image),
            ("device", baseline.device, candidate.device),
        )
        if before != after
    ]
    for noun, before_map, after_map in (
        ("server flag", _flags(baseline.argv), _flags(candidate.argv)),
        ("environment variable", dict(baseline.env), dict(candidate.env)),
    ):
        found += [
            f"{noun} {key} differs: {before_map.get(key, 'unset')} for the baseline, "
            f"{after_map.get(key, 'unset')} for the candidate"
            for key in sorted(before_map.keys() | after_map.keys())
            if before_map.get(key) != after_map.get(key)
        ]
    return tuple(found)


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Flags that both sides must share, with their values; what comes before the first flag names the checkpoint."""
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for token in argv:
        if token.startswith("--"):
            name, separator, value = token.partition("=")
            current = flags.setdefault(name.replace("_", "-"), [])
            if separator:
                current.append(value)
        elif current is not None:
            current.append(token)
    ignored = ARTEFACT_FLAGS | ENDPOINT_FLAGS
    return {name: " ".join(values) or "set" for name, values in flags.items() if name not in ignored}
