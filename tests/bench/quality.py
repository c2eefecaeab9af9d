"""How much of a model a checkpoint keeps: ours and other libraries', on the same tokens, as each is served.

::

    python -m tests.bench.quality --only ptpc_fp8,mxfp4,mxfp4_fp8
    python -m tests.bench.quality --only none --row 'gptq=--scheme mxfp4 --algorithm gptq' --windows 8
    python -m tests.bench.quality --only none --made mine=/path/to/checkpoint
    python -m tests.bench.quality --model tiny --json tiny.json --plot tiny.svg

Each row of ``quality.yaml`` is a command line that makes a checkpoint, in a process of its own that is timed from its
start to its exit. The checkpoint is read by the reference runtime, which rounds weights and activations as the scheme
does when it is served, and held beside the 16-bit model at every position of text that no calibration saw: KL
divergence from the 16-bit model's distribution in nats, how often both hold the same token for the likeliest, and
perplexity. Bits are those of all that is stored of the linear layers of the decoder, by weight. Scales of MX inputs are
rounded to even, or as a row's ``mx_scales`` says. Where the checkpoint has such inputs, KL is measured with both
roundings, as a gain that one of them shows alone is none of the weights.

Rows that --json already holds for the same model and text stay, so that a row can be measured again alone. A row with
``at_most`` has a goal for KL, in nats or as the name of another row, which is printed with what was reached. A row with
``samples`` is calibrated on as many windows in the place of --samples, one with ``model`` is of that model alone.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from tests.bench import smollm2
from tests.bench.model import describe

if TYPE_CHECKING:
    import torch

    from quantmint.pipeline.base.schemes import MxScales

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("quality.yaml").read_text(encoding="utf-8"))
LENGTH = 512
CALIBRATION_WINDOWS, HELD_OUT_WINDOWS = 64, 32
_SPARE = 16  # tokens: where text is cut, it may be taken apart otherwise
_BATCH = 8
_TINY_HELD_OUT = 0.34  # of its lines


def texts(model: str) -> tuple[Path, str, list[str], list[str]]:
    """The model's folder, what its texts are, documents to calibrate on, and others to measure on."""
    if model == "tiny":
        lines = (ROOT / "calibration" / "data" / "tiny.jsonl").read_text(encoding="utf-8").splitlines()
        documents = [json.loads(line)["text"] for line in lines]
        first = round(_TINY_HELD_OUT * len(documents))
        words = "sentences of the embedded model's own world, and others of it"
        return ROOT / "recipes" / "tiny" / "model", words, documents[first:], documents[:first]
    beside = smollm2.fetch()
    calibration, held_out = (
        json.loads((beside / name).read_text(encoding="utf-8")) for name in (smollm2.CALIBRATION, smollm2.HELD_OUT)
    )
    return beside if model == "smollm2" else Path(model), "Wikipedia, and ABC news", calibration, held_out


def cut(tokenizer: Any, documents: Sequence[str], count: int, spare: int = 0) -> list[list[int]]:
    """At most ``count`` windows of `LENGTH` and ``spare`` tokens, evenly over the documents one after the other."""
    ids = tokenizer("\n\n".join(documents), add_special_tokens=False, verbose=False)["input_ids"]
    size = LENGTH + spare
    whole = len(ids) // size
    places = [index * whole // min(count, whole) for index in range(min(count, whole))]
    return [ids[place * size : (place + 1) * size] for place in places]


class Bench:
    """A model, its tokens, and what is measured with them."""

    def __init__(self, model: str, samples: int, windows: int, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoTokenizer

        self.device = device

        self.source, self.text, self._documents, held_out = texts(model)
        self.folder, self._samples = folder, samples
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.source)
        self.held_out = cut(self._tokenizer, held_out, windows)
        self.calibration = self._calibrate(samples)
        self._baseline: tuple[torch.Tensor, torch.Tensor] | None = None

    def _calibrate(self, samples: int) -> int:
        """Write the texts as text for ours, a sample a line, and the same tokens as numbers for the libraries.

        Return how many windows there are, of the ``samples`` that are asked for.
        """
        passages = [self._tokenizer.decode(ids) for ids in cut(self._tokenizer, self._documents, samples, _SPARE)]
        windows = [self._tokenizer(text, add_special_tokens=False)["input_ids"][:LENGTH] for text in passages]
        lines = [json.dumps({"text": text}) + "\n" for text in passages]
        (self.folder / "words.jsonl").write_text("".join(lines), encoding="utf-8")
        described = "name: words\ndescription: text\nfile: words.jsonl\ntext: text\n"
        (self.folder / "words.yaml").write_text(described)
        numbers = [" ".join(f"w{token}" for token in ids) + "\n" for ids in windows]
        (self.folder / "words.txt").write_text("".join(numbers))
        return len(windows)

    def command(self, row: Mapping[str, Any], out: Path) -> list[str]:
        """The command line that makes a row's checkpoint."""
        count = self._calibrate(row.get("samples", self._samples))
        if "peer" in row:
            task = {"device": self.device, "text": str(self.folder / "words.txt"), "batch": _BATCH} | row["task"]
            peers = Path(__file__).with_name("peers.py")
            return [sys.executable, str(peers), row["peer"], json.dumps(task), str(self.source), str(out)]
        options = ["--device", self.device, "--json", "--no-packing", *shlex.split(row["options"])]
        options += ["--calibration", str(self.folder / "words.yaml"), "--samples", str(count)]
        options += ["--sequence-length", str(LENGTH), "--batch-size", str(_BATCH)]
        return [sys.executable, "-m", "quantmint", "quantize", str(self.source), str(out), *options]

    def make(self, row: Mapping[str, Any], out: Path) -> dict[str, Any]:
        """Make a row's checkpoint: ``wall`` and ``cpu`` in seconds, ``rss`` in bytes; or ``why_not``."""
        child = [sys.executable, "-I", str(Path(__file__).with_name("child.py")), f"{out}.stdout", f"{out}.stderr"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        answer = subprocess.run(
            [*child, *self.command(row, out)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        run = json.loads(answer.stdout)
        if run["code"]:
            why = [line for line in Path(f"{out}.stderr").read_text(errors="replace").splitlines() if line.strip()]
            click.echo("\n".join(why[-20:]), err=True)
            return {"why_not": f"failed: {why[-1] if why else 'no word'}"}
        return {"wall": run["ended"] - run["begun"], "cpu": run["cpu"], "rss": run["rss"]}

    def baseline(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The 16-bit model's last hidden states, [windows, tokens, hidden], and its head, [vocabulary, hidden].

        They give its logits in a fifth of the time that the model takes. Kept below XDG_CACHE_HOME.
        """
        import torch

        if self._baseline is None:
            files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _weights(self.source)]
            key = sha256(json.dumps([str(self.source), files, self.held_out]).encode()).hexdigest()[:16]
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            kept = root / "quantmint" / "bench-quality" / f"{key}.pt"
            if not kept.is_file():
                states, head = self._states(self.source, "even")
                kept.parent.mkdir(parents=True, exist_ok=True)
                torch.save((states, head), kept)
            self._baseline = torch.load(kept, weights_only=True)
        return self._baseline

    def _states(self, folder: Path, mx_scales: MxScales) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from quantmint.pipeline.serving.reference.model import load

        model: Any = load(folder, self.device, mx_scales=mx_scales).model
        with torch.inference_mode():
            parts = torch.tensor(self.held_out, device=self.device).split(_BATCH)
            states = torch.cat([model.model(input_ids=part, use_cache=False).last_hidden_state.cpu() for part in parts])
            return states, model.get_output_embeddings().weight.detach().cpu()

    def rounds_mx_inputs(self, folder: Path) -> bool:
        """Whether a checkpoint has MX inputs, whose scales can be rounded in two ways."""
        from quantmint.pipeline.base.schemes import has_mx_activations
        from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
        from quantmint.pipeline.quantize.formats.layout import layout_of
        from quantmint.pipeline.quantize.model.reader import read_structure

        checkpoint = open_checkpoint(folder)
        declared = checkpoint.config.get("quantization_config")
        if declared is None:
            return False
        modules = read_structure(folder, checkpoint.tensors).linear
        schemes = layout_of(checkpoint.config).claims(declared, list(modules)).schemes.values()
        return has_mx_activations(name for name in schemes if name is not None)

    def measure(self, folder: Path, mx_scales: MxScales = "even") -> dict[str, Any]:
        """What a checkpoint keeps of the model; ``kl_error`` is the standard error of ``kl`` over the windows.

        ``mx_scales`` is how the scales of MX inputs are rounded.
        """
        import torch
        from torch.nn.functional import log_softmax

        of_base, base_head = self.baseline()
        states, head = self._states(folder, mx_scales)
        divergences, agreed, surprise, base_surprise = [], 0, 0.0, 0.0
        with torch.inference_mode():
            for tokens, one, other in zip(torch.tensor(self.held_out), states, of_base, strict=True):
                log_q, log_p = log_softmax(one @ head.T, -1), log_softmax(other @ base_head.T, -1)
                agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
                after = tokens[1:, None]
                surprise -= float(log_q[:-1].gather(1, after).sum())
                base_surprise -= float(log_p[:-1].gather(1, after).sum())
                divergences.append(float((log_p.exp() * log_p.sub_(log_q)).sum(-1).mean()))
        kl, count = torch.tensor(divergences), len(divergences)
        return {
            "bits": stored_bits(self.source, folder),
            "kl": float(kl.mean()),
            "kl_error": float(kl.std() / math.sqrt(count)) if count > 1 else 0.0,
            "top1": agreed / (count * LENGTH),
            "perplexity": math.exp(surprise / (count * (LENGTH - 1))),
            "base_perplexity": math.exp(base_surprise / (count * (LENGTH - 1))),
        }


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def stored_bits(source: Path, folder: Path) -> float:
    """Bits that are stored for a weight of the decoder's linear layers: values, scales and zero points."""
    from safetensors import safe_open

    from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
    from quantmint.pipeline.quantize.model.reader import read_structure

    original = open_checkpoint(source)
    modules = set(read_structure(source, original.tensors).linear) - {"lm_head"}

    def size(place: Path, *, in_bits: bool) -> int:
        total = 0
        for path in _weights(place):
            with safe_open(path, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dictionary
                    if name.rpartition(".")[0] in modules:
                        tensor = shard.get_tensor(name)
                        total += 8 * tensor.nbytes if in_bits else tensor.numel()
        return total

    return size(folder, in_bits=True) / size(source, in_bits=False)


def table(result: Mapping[str, Any]) -> str:
    """The rows as a table of Markdown."""
    lines = [
        f"{result['text']}; {result['calibration']} x {LENGTH} tokens to calibrate, {result['windows']} x {LENGTH} "
        f"held out; "
        f"{result['machine']['accelerator'] or result['machine']['processor']}, {result['machine']['cores']} cores",
        "",
        "| checkpoint | bits | KL, nats | ... other rounding | top-1 | perplexity | made in, s | CPU, s | peak, MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    base = next((row["base_perplexity"] for row in result["rows"] if "kl" in row), None)
    if base is not None:
        lines.append(f"| 16 bit | 16.00 | 0 | - | 100 % | {base:.2f} | - | - | - |")
    for row in result["rows"]:
        if "why_not" in row:
            lines.append(f"| {row['name']} | {row['why_not']} | | | | | | | |")
            continue
        made = f"{row['wall']:.1f} | {row['cpu']:.1f} | {row['rss'] / 1e6:,.0f}" if "wall" in row else "- | - | -"
        lines.append(
            f"| {row['name']} | {row['bits']:.2f} | {row['kl']:.4f} ± {row['kl_error']:.4f} | {_other(row)} "
            f"| {row['top1']:.1%} "
            f"| {row['perplexity']:.2f} | {made} |"
        )
    return "\n".join([*lines, "", *goals(result["rows"])])


def _other(row: Mapping[str, Any]) -> str:
    return f"{row['other_kl']:.4f} ± {row['other_kl_error']:.4f}" if "other_kl" in row else "-"


def goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row that was measured and has a goal: the goal, what was reached, and whether that is enough."""
    measured = {row["name"]: row["kl"] for row in rows if "kl" in row}
    lines = []
    for row in rows:
        goal = row.get("at_most")
        most = measured.get(goal) if isinstance(goal, str) else goal
        if row["name"] in measured and most is not None:
            words = f"that of {goal}, {most:.3f}" if isinstance(goal, str) else f"{most:g}"
            reached = "reached" if measured[row["name"]] <= most else "missed"
            lines.append(f"{row['name']}: goal {words} nats: {measured[row['name']]:.3f}, {reached}")
    return lines


def _chosen(model: str, only: str | None, extra: Sequence[str], made: Sequence[str]) -> list[dict[str, Any]]:
    known = {row["name"]: row for row in ROWS if row.get("model", model) == model}
    names = list(known) if only is None else [name for name in only.split(",") if name != "none"]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"found {name!r}, expected some of {', '.join(known)}", param_hint="--only")
    pairs = [[("options", text) for text in extra], [("made", text) for text in made]]
    typed = [dict(zip(("name", kind), text.split("=", 1), strict=True)) for some in pairs for kind, text in some]
    return [known[name] for name in names] + typed


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="smollm2, tiny, or a folder.")
@click.option("--only", help=f"Rows, with commas between: {', '.join(row['name'] for row in ROWS)}; or none.")
@click.option("--row", "extra", multiple=True, help="Another row: NAME=OPTIONS of `quantmint quantize`.")
@click.option("--made", multiple=True, help="A checkpoint that is there: NAME=FOLDER.")
@click.option("--samples", default=CALIBRATION_WINDOWS, show_default=True, help="Windows to calibrate on.")
@click.option("--windows", default=HELD_OUT_WINDOWS, show_default=True, help="Windows of held-out text.")
@click.option("--device", default="cpu", show_default=True, help="Where checkpoints are made and measured.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw bits against KL there: .svg or .png.")
def main(
    model: str,
    only: str | None,
    extra: tuple[str, ...],
    made: tuple[str, ...],
    samples: int,
    windows: int,
    device: str,
    folder: Path | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Hold quantized checkpoints, ours and other libraries', beside the 16-bit model."""
    rows = _chosen(model, only, extra, made)
    work = Path(tempfile.mkdtemp(prefix="quantmint-quality-", dir=folder))
    try:
        bench = Bench(model, samples, windows, work, device)
        result: dict[str, Any] = {
            "machine": describe(device),
            "model": model,
            "text": bench.text,
            "calibration": bench.calibration,
            "windows": len(bench.held_out),
            "rows": [],
        }
        if json_path is not None and json_path.is_file():
            before = json.loads(json_path.read_text(encoding="utf-8"))
            if all(before[key] == result[key] for key in ("model", "text", "calibration", "windows")):
                result["rows"] = before["rows"]
        for row in rows:
            out = Path(row["made"]) if "made" in row else work / "out"
            found = {"name": row["name"], "by": row.get("by", "quantmint")}
            found |= {key: row[key] for key in ("at_most", "samples") if key in row}
            found |= {} if "made" in row else bench.make(row, out)
            if "why_not" not in found:
                how = row.get("mx_scales", "even")
                found |= bench.measure(out, how)
                if bench.rounds_mx_inputs(out):
                    other = bench.measure(out, "up" if how == "even" else "even")
                    found |= {"other_kl": other["kl"], "other_kl_error": other["kl_error"]}
            shutil.rmtree(work / "out", ignore_errors=True)
            result["rows"] = [old for old in result["rows"] if old["name"] != row["name"]] + [found]
            click.echo(table(result | {"rows": [found]}).strip().splitlines()[-1])
            if json_path is not None:
                json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    click.echo(f"\n{table(result)}")
    if plot is not None:
        from tests.bench import plots

        plots.quality(result, plot)
    sys.exit(1 if any("why_not" in row for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
