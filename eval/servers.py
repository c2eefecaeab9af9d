"""Facts about a server that decide whether two measurements may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.records import Record

# What a checkpoint brings with it: these differ by design between a baseline and its quantized candidate.
ARTEFACT_FLAGS = frozenset({"--model", "--tokenizer", "--revision", "--quantization", "--kv-cache-dtype"})
# Where the server listens or writes, which no result depends on.
ENDPOINT_FLAGS = frozenset({"--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level"})
UNKNOWN = "unknown"
"""Hardware that no table names."""


@dataclass(frozen=True, slots=True)
class Server(Record):
    """How one side was served.

    `version` is that of the runtime, `device` what the accelerator calls itself ("NVIDIA H100 80GB HBM3") or the CPU's
    model, `hardware` its name in the table of targets: both were measured where the server ran, not taken from the
    recipe. `argv` is the command, `env` the variables of the launch plan, `image` the container's digest (None outside
    one), `faults` what the log says that voids a measurement.

    `runtime` is what answered: the engine, then after a comma what it does with this checkpoint ("vllm 0.32.0",
    "transformers 5.17.0, dequantized weights, simulated FP8 activations"). `kv_cache_dtype` is the type that the cache
    really has (None: nothing tells), `template` and `tokenizer` are the SHA-256 of the chat template and of the
    tokenizer's files (None: there is none, or nobody looked).
    """

    version: str
    device: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    image: str | None = None
    faults: tuple[str, ...] = ()
    runtime: str = "vllm"
    hardware: str = UNKNOWN
    kv_cache_dtype: str | None = None
    template: str | None = None
    tokenizer: str | None = None

    @property
    def engine(self) -> str:
        """What answered, without what it did to this side's checkpoint: the part that both sides share."""
        return self.runtime.partition(",")[0].strip()

    @property
    def measures_speed(self) -> bool:
        """Whether figures of throughput mean anything: what stands in for vLLM runs other kernels."""
        return self.engine.startswith("vllm")

    @property
    def promised_kv_cache(self) -> str:
        """The type that the launch plan asked for; "auto" is the model's own."""
        return _options(self.argv).get("--kv-cache-dtype", "auto")


def differences(baseline: Server, candidate: Server) -> tuple[str, ...]:
    """One sentence for each difference that does not belong to the artefact; empty when the sides are comparable."""
    found = [
        f"{noun} differs: {before} for the baseline, {after} for the candidate"
        for noun, before, after in (
            ("Runtime", baseline.engine, candidate.engine),
            ("Version", baseline.version, candidate.version),
            ("Container image", baseline.image, candidate.image),
            ("Hardware", baseline.hardware, candidate.hardware),
            ("Device", baseline.device, candidate.device),
            ("Chat template", _short(baseline.template), _short(candidate.template)),
            ("Tokenizer", _short(baseline.tokenizer), _short(candidate.tokenizer)),
        )
        if before != after
    ]
    for noun, before_map, after_map in (
        ("Server flag", _flags(baseline.argv), _flags(candidate.argv)),
        ("Environment variable", dict(baseline.env), dict(candidate.env)),
    ):
        found += [
            f"{noun} {key} differs: {before_map.get(key, 'unset')} for the baseline, "
            f"{after_map.get(key, 'unset')} for the candidate"
            for key in sorted(before_map.keys() | after_map.keys())
            if before_map.get(key) != after_map.get(key)
        ]
    return tuple(found)


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:16]


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Flags that both sides must share, with their values."""
    ignored = ARTEFACT_FLAGS | ENDPOINT_FLAGS
    return {name: value for name, value in _options(argv).items() if name not in ignored}


def _options(argv: Sequence[str]) -> dict[str, str]:
    """All flags with their values; what comes before the first one names the checkpoint."""
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
    return {name: " ".join(values) or "set" for name, values in flags.items()}
