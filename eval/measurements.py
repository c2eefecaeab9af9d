"""Measurements of a candidate and its baseline: cells, launches, servers, and all of them as the gate takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

from quantmint.eval.acceptance import AcceptancePairs
from quantmint.eval.canary import Canary
from quantmint.eval.errors import MeasurementError
from quantmint.eval.history import EarlierVerdict
from quantmint.eval.kl import Divergences
from quantmint.eval.layout import LayoutMeasurement
from quantmint.eval.long_context import LongDivergence
from quantmint.eval.records import Part, Record
from quantmint.eval.samples import SampleSet
from quantmint.eval.verdict import Verdict

Side = Literal["baseline", "candidate"]


@dataclass(frozen=True, slots=True)
class CellResult(Part):  # earlier records have the most requests in flight, too
    """One cell on one launch of a server.

    `duration` is in seconds, throughputs in tokens per second over all requests, latencies in milliseconds: time to
    first token (ttft), time per output token after the first (tpot), gap between tokens (itl), whole request (e2el).

    `gpus` shared the work. `concurrency` and `request_rate` (requests per second) are the cell's limits, None without
    one: a cell with a rate offers that load whatever the server could do, so that its throughput says nothing about
    speed, only its latencies do. `goodput` counts the requests per second that met the cell's latency goals, None
    where it has none. `peak_output_throughput` is vLLM's: the most pieces of answers (of a token or more) in a second.
    """

    cell: str
    completed: int
    failed: int
    duration: float
    output_throughput: float
    total_throughput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    e2el_p50: float
    e2el_p99: float
    gpus: int = 1
    concurrency: int | None = None
    request_rate: float | None = None
    requests_per_second: float | None = None
    goodput: float | None = None
    peak_output_throughput: float | None = None


@dataclass(frozen=True, slots=True)
class MachineState(Record):
    """The accelerators (on a CPU server: the cores) while the cells of a launch ran; None where nothing tells.

    `clock_mhz` is the median clock under load, `clock_mhz_low` its 5th percentile, `temperature_c` the highest
    temperature, `power_w` the median power of all accelerators together. `throttled` names what slowed them down that
    should not: heat, a failing power supply; a power cap that is reached under load is as it should be, and shows in
    the clock. `samples` counts the looks.
    """

    clock_mhz: float | None = None
    clock_mhz_low: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Launch(Record):
    """One fresh server of a side, with what every cell measured on it: the replicate of a comparison.

    `number` counts the launches of both sides in the order in which they were made, from 0. `kv_tokens`,
    `kv_cache_dtype` and `attention_backend` are those that the server's log says were really chosen, None where it
    does not say. `started_seconds` went by before it answered. `client_cpu` is the largest share of one core that the
    load generator's event loop used over a cell: near 1.0 it sets the pace and not the server; None where it was not
    seen. `server_cpu` is the same of an API server's event loop. `started` is the time of the start
    (ISO 8601, UTC): launches of a series that was interrupted lie further apart. `faults` are lines of the log that
    void what was measured, each with what it means. `device` is what the server ran on, in its own words: a series may
    go on, or be made again, on another machine. `reused`: the launch is an earlier series', of the same baseline.
    """

    side: Side
    number: int
    cells: Mapping[str, CellResult]
    kv_tokens: int | None
    kv_cache_dtype: str | None
    started_seconds: float
    client_cpu: float | None
    machine: MachineState
    started: str | None = None
    attention_backend: str | None = None
    faults: tuple[str, ...] = ()
    device: str | None = None
    server_cpu: float | None = None
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields; earlier records do not know `reused`, which is left out where it is False."""
        return {name: value for name, value in Record.to_json(self).items() if name != "reused" or value}


def order(launches: int) -> tuple[Side, ...]:
    """Return the sides of a series with so many launches on each: ABBA BAAB BAAB ABBA, A being the baseline.

    It is the Thue-Morse sequence: a drift of the machine that is linear in time (of any degree d, over 2^(d+1)
    launches) is the same on both sides and cancels (Prouhet 1851).
    """
    return tuple("candidate" if number.bit_count() % 2 else "baseline" for number in range(2 * launches))


def reusable(launches: int) -> int:
    """Return how many of the baseline's launches a series of so many a side may reuse: half of four to seven, else 0.

    With fewer fresh launches than half, or more than seven a side, a checkpoint that is exactly as fast as promised
    passes more than 5 % of the time where the machine changed meanwhile (docs/notes/gate-simulations.md).
    """
    return launches // 2 if 4 <= launches <= 7 else 0


_BASELINE: tuple[Side, ...] = ("baseline",)
_CANDIDATE: tuple[Side, ...] = ("candidate",)


def reuse_order(launches: int) -> tuple[tuple[Side, ...], tuple[Side, ...], tuple[Side, ...]]:
    """Return the sides of a series that may reuse launches: its start, and its two ends.

    After the start, which has every fresh launch of the baseline, follows the first end where the reused launches agree
    with these, else the second: BBAA, then BB or AABB. Either way a drift of the machine that is linear in time is the
    same on both sides (an odd number of launches leaves a fraction of a launch).
    """
    half, odd = divmod(launches, 2)
    first = (half + odd + 1) // 2
    start = (*_CANDIDATE * half, *_BASELINE * first, *_CANDIDATE * odd, *_BASELINE * (half + odd - first))
    return start, _CANDIDATE * half, (*_BASELINE * half, *_CANDIDATE * half)


# What a checkpoint brings with it: these differ by design between a baseline and its quantized candidate.
ARTEFACT_FLAGS = frozenset({"--model", "--tokenizer", "--revision", "--quantization", "--kv-cache-dtype"})
# Where the server listens or writes, which no result depends on.
ENDPOINT_FLAGS = frozenset({"--host", "--port", "--served-model-name", "--api-key", "--uvicorn-log-level"})
UNKNOWN = "unknown"
"""Hardware that no table names."""


@dataclass(frozen=True, slots=True)
class Server(Record):
    """The server of one side: its software, device, command and what its log says.

    `version` is that of the runtime, `device` what the accelerator calls itself ("NVIDIA H100 80GB HBM3") or the CPU's
    model, `hardware` its name in the table of targets: both were measured where the server ran, not taken from the
    recipe. `argv` is the command, `env` the variables of the launch plan, `image` the container's digest (None outside
    one), `faults` what the log says that voids a measurement.

    `runtime` is what answered: the engine, then after a comma what it does with this checkpoint ("vllm 0.32.0",
    "transformers 5.17.0, dequantized weights, simulated FP8 activations"). `kv_cache_dtype` is the type that the cache
    really has (None: nothing tells), `template` and `tokenizer` are the SHA-256 of the chat template and of the
    tokenizer's files (None: there is none, or nobody looked). `mx_scales` is how the scales of MX inputs were rounded
    ("even", "up"; None: as the target's own kernels do).
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
    mx_scales: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields, without an unknown `mx_scales`, which earlier records do not have."""
        return {name: value for name, value in Record.to_json(self).items() if name != "mx_scales" or value}

    @property
    def engine(self) -> str:
        """Return the runtime's name and version, without what it does to this side's checkpoint."""
        return self.runtime.partition(",")[0].strip()

    @property
    def measures_speed(self) -> bool:
        """Return whether vLLM answered: throughput of another runtime, with other kernels, means nothing."""
        return self.engine.startswith("vllm")

    @property
    def promised_kv_cache(self) -> str:
        """Return the KV cache's type in the launch plan; "auto" is the model's own."""
        return _options(self.argv).get("--kv-cache-dtype", "auto")


def differences(baseline: Server, candidate: Server) -> tuple[str, ...]:
    """Return a sentence for each difference between the servers that the checkpoints do not explain."""
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
    """Return the flags that both sides must share, with their values."""
    ignored = ARTEFACT_FLAGS | ENDPOINT_FLAGS
    return {name: value for name, value in _options(argv).items() if name not in ignored}


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Return all flags with their values; arguments before the first flag name the checkpoint."""
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


Both = tuple[SampleSet, SampleSet]
"""The baseline's samples and the candidate's."""


@dataclass(frozen=True, slots=True)
class StructureCheck(Record):
    """Verdict of the inspection of the checkpoint's files, with one sentence for each reason."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements(Record):
    """Both sides of every measurement.

    `artefact` is the candidate's digest. `samples` maps a task of the suite to its (baseline, candidate) runs,
    `control` to what the baseline answered when some items were asked again. `launches` are those of both sides, in
    the order in which they were made. `weights` are the bytes of the (baseline's, candidate's) tensors, `claims` what
    the guides promise of such a checkpoint (`eval.gate.judgement`), `chance` the score that guessing among choices
    reaches, by task (a task without choices is not in it). `stopped` names the measurement that ended the
    run: nothing after it was measured. `faults` are sentences about measurements that were tried and broke (the text
    of a `MeasurementError`): each makes the verdict INVALID, with its reason on record. `history` are the verdicts on
    this model that were known when it was judged, by their times. `baseline_rounding` says how the baseline's own
    configuration rounds the inputs of its linear layers; None for a baseline in 16 bit. `acceptance` are the drafts of
    speculative decoding by prompt; None where the sides were served without it. `long` is the KL by position of long
    texts. `kl`, `layout` and `long` are None where they were not measured.
    """

    artefact: str
    structure: StructureCheck
    baseline: Server
    candidate: Server
    samples: Mapping[str, Both] = field(default_factory=dict)
    control: Mapping[str, SampleSet] = field(default_factory=dict)
    canary: Canary | None = None
    launches: tuple[Launch, ...] = ()
    weights: tuple[int, int] = (0, 0)
    claims: Mapping[str, float] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)
    stopped: str | None = None
    faults: tuple[str, ...] = ()
    history: tuple[EarlierVerdict, ...] = ()
    baseline_rounding: str | None = None
    acceptance: AcceptancePairs | None = None
    long: LongDivergence | None = None
    kl: Divergences | None = None
    layout: LayoutMeasurement | None = None

    @property
    def kv_tokens(self) -> dict[Side, float]:
        """The tokens that a side's KV cache holds, the median of its launches; none where no log tells."""
        tokens_by_side = {
            side: [launch.kv_tokens for launch in self.launches if launch.side == side] for side in get_args(Side)
        }
        return {
            side: median(positive) for side, tokens in tokens_by_side.items() if (positive := [*filter(None, tokens)])
        }

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of everything but samples and control, which are kept in files of their own."""
        return {
            "artefact": self.artefact,
            "structure": self.structure.to_json(),
            "servers": {"baseline": self.baseline.to_json(), "candidate": self.candidate.to_json()},
            "canary": None if self.canary is None else self.canary.to_json(),
            "launches": [launch.to_json() for launch in self.launches],
            "weights": list(self.weights),
            "claims": dict(self.claims),
            **({"chance": dict(self.chance)} if self.chance else {}),  # earlier records do not know of it
            "stopped": self.stopped,
            "faults": list(self.faults),
            **({"history": [earlier.to_json() for earlier in self.history]} if self.history else {}),  # nor of that
            **({"baseline_rounding": self.baseline_rounding} if self.baseline_rounding else {}),
            **({} if self.acceptance is None else {"acceptance": self.acceptance.to_json()}),
            **({} if self.long is None else {"long": self.long.to_json()}),
            **({} if self.kl is None else {"kl": self.kl.to_json()}),
            **({} if self.layout is None else {"layout": self.layout.to_json()}),
        }

    @classmethod
    def read(
        cls, data: Mapping[str, Any], samples: Mapping[str, Both], control: Mapping[str, SampleSet]
    ) -> Measurements:
        """Read back what `to_json` wrote, with what was kept beside it; `MeasurementError` for anything else."""
        try:
            sides = {side: data["servers"][side] for side in ("baseline", "candidate")}
            flat = {name: value for name, value in data.items() if name not in ("servers", "samples", "control")}
        except (AttributeError, KeyError, TypeError) as error:
            raise MeasurementError(f"not the measurements of a candidate: {error!r}") from error
        return replace(cls.from_json({**flat, **sides}), samples=samples, control=control)
