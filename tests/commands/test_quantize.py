"""quantmint quantize: a recipe's bytes without a recipe, and a folder that is whole or visibly is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantmint.pipeline.quantize.gptq import latents

Quantmint = Callable[..., Any]
KV = ("--kv-cache", "fp8", "--calibration", "words.yaml")


@pytest.fixture
def source(models: Callable[..., Path]) -> Path:
    """A Llama in several files, and beside the test a calibration set in its words."""
    text = "\n".join(" ".join(f"w{(line * word) % 500 + 4}" for word in range(1, 60)) for line in range(1, 40))
    Path("words.txt").write_text(text)
    Path("words.yaml").write_text(
        "name: words\ndescription: Words.\nfile: words.txt\nsamples: 4\nsequence_length: 64\nseed: 2\n"
    )
    return models("llama", sharded=True)


@pytest.fixture
def copied(source: Path) -> Path:
    """The same model, to be changed."""
    return Path(shutil.copytree(source, "copied"))


def weights(folder: Path) -> dict[str, bytes]:
    """All files of a checkpoint but what says where it came from."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def everything(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("scheme", "layout", "more"),
    [
        ("ptpc_fp8", "compressed-tensors", KV),
        ("fp8", "quark", KV),
        ("mxfp4", "quark", ()),
        ("nvfp4", "compressed-tensors", KV),
    ],
)
def test_bytes_are_those_of_the_recipe(
    quantmint: Quantmint, source: Path, scheme: str, layout: str, more: tuple[str, ...]
) -> None:
    excluded = "re:.*layers\\.0\\."
    kv_cache = "fp8" if more else "auto"
    Path("r.yaml").write_text(
        f"name: r\nsource: {{folder: {source}}}\n"
        f"quantization: {{scheme: {scheme}, format: {layout}, kv_cache: {kv_cache}, exclude: ['{excluded}']}}\n"
        "calibration: {set: words.yaml}\ntarget: {max_model_len: 512, workload: tiny}\n"
        "evaluation: {suite: tiny}\ngate: {accuracy: {margin: 0.02}}\n"
    )
    ran = quantmint("run", "r.yaml", "--until", "quantize", "--json")
    assert ran.code == 0, ran.err
    told = ran.json
    recipes = Path(told["stages"][-1]["path"]) / "checkpoint"
    ended = quantmint("quantize", source, "out", "--scheme", scheme, "--format", layout, "--exclude", excluded, *more)
    assert ended.code == 0, ended.err
    assert weights(Path("out")) == weights(recipes)
    assert quantmint("inspect", "out", "--source", source).code == 0


def test_what_it_says(quantmint: Quantmint, source: Path) -> None:
    planned = quantmint("quantize", source, "out", "--scheme", "ptpc_fp8", *KV, "--dry-run", "--json").json
    assert not Path("out").exists()
    ended = quantmint("quantize", source, "out", "--scheme", "ptpc_fp8", *KV)
    assert ended.code == 0
    lines = dict(line.split(None, 1) for line in ended.out.splitlines())
    assert lines["serve"] == "vllm serve out --kv-cache-dtype fp8"
    assert lines["inspection"] == "PASS"
    assert lines["error"].startswith("least SQNR ")
    assert lines["modules"] == "14 modules in ptpc_fp8, 1 kept in 16 bit"
    assert [part.split()[0] for part in lines["time"].split(", ")] == ["start", "calibrate", "work", "flush", "proof"]
    assert not Path("out/.quantmint").exists()
    assert not list(Path("out").glob(".*"))

    again = quantmint("quantize", source, "out", "--scheme", "ptpc_fp8", *KV, "--json").json
    assert (again["made"], again["schemes"], again["kept"]) == (False, {"ptpc_fp8": 14}, 1)
    assert again["checkpoint"] == str(Path("out").absolute())
    assert again["inspection"] == "PASS"
    assert again["worst"]["module"].startswith("model.layers.")
    assert planned["schemes"] == again["schemes"]
    assert (planned["state"], planned["predicted"]["source"]) == ("nothing is there yet", again["source_bytes"])
    size = sum(path.stat().st_size for path in Path("out").glob("*.safetensors"))
    assert planned["predicted"]["checkpoint"] == planned["disk"]["needed"] == again["bytes"] == size
    record = json.loads(Path("out/quantmint/job.json").read_text())
    assert {name: fact["size"] for name, fact in record["files"].items()} == {
        path.name: path.stat().st_size for path in Path("out").iterdir() if path.is_file()
    }
    assert str(Path.home()) not in json.dumps(record)
    assert str(source) not in json.dumps(record)


def test_a_model_without_a_tokenizer_is_made_with_a_warning(quantmint: Quantmint, copied: Path) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    ended = quantmint("quantize", copied, "out", "--scheme", "ptpc_fp8")
    assert ended.code == 0
    assert "copied has no tokenizer: found no tokenizer.json" in ended.err
    assert "vllm serve" not in ended.out, "as a plan has it: nothing can be asked of it"
    assert "not before a tokenizer lies beside it" in ended.out


def test_a_name_that_no_disk_takes_is_one_message(quantmint: Quantmint, source: Path) -> None:
    ended = quantmint("quantize", source, "x" * 300, "--scheme", "ptpc_fp8")
    assert (ended.code, ended.out) == (2, "")
    assert "OUT: xxx" in ended.err
    assert "cannot be a folder: File name too long" in ended.err
    assert "report it" not in ended.err


@pytest.mark.slow
def test_options_reach_the_engine(quantmint: Quantmint, source: Path) -> None:
    fp8 = ("quantize", source, "--scheme", "fp8", *KV, "--no-inspect")
    assert quantmint(*fp8, "shared").code == 0
    for name, option in (
        ("apart", ("--no-shared-scales",)),
        ("heads", ("--kv-cache-granularity", "head")),
        ("fewer", ("--samples", 1)),
        ("seeded", ("--seed", 9)),
    ):
        ended = quantmint(*fp8, name, *option)
        assert ended.code == 0, ended.err
        assert weights(Path(name)) != weights(Path("shared")), name


def test_a_finished_folder_is_left_alone(quantmint: Quantmint, source: Path) -> None:
    command = ("quantize", source, "out", "--scheme", "ptpc_fp8")
    assert quantmint(*command, "--no-inspect").code == 0
    before = everything(Path("out"))
    for more in ((), ("--no-inspect",), ("--device", "cpu")):
        ended = quantmint(*command, *more)
        assert ended.code == 0
        assert ended.out.startswith("finished before, with the same source and options: nothing to do\n")
        assert everything(Path("out")) == before
    one = next(Path("out").glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-1])
    ended = quantmint(*command)
    assert ended.code == 2
    assert f"{one} is not what this job wrote" in ended.err


def change_a_weight(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a clock that was put back
    return f'files["{path.name}"]: "{status.st_size} bytes'


def change_the_configuration(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    return 'files["config.json"]: "'


def add_a_file(folder: Path) -> str:
    (folder / "extra.txt").write_text("new")
    return 'files["extra.txt"]: nothing there'


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_finished_checkpoint_is_never_made_of_something_else(quantmint: Quantmint, copied: Path) -> None:
    command = ("quantize", copied, "out", "--scheme", "fp8", *KV, "--no-inspect")
    assert quantmint(*command).code == 0
    before = everything(Path("out"))
    other = quantmint("quantize", copied, "out", "--scheme", "ptpc_fp8", *KV, "--seed", 3)
    assert other.code == 2
    assert 'quantize.settings.scheme: "fp8" there, "ptpc_fp8" now' in other.err
    assert "calibrate.settings.seed: 2 there, 3 now" in other.err
    for change in (change_a_weight, change_the_configuration, add_a_file):
        words = change(copied)
        ended = quantmint(*command)
        assert ended.code == 2
        assert words in ended.err
    assert everything(Path("out")) == before


def test_what_was_begun_is_ended_as_it_is_asked_for_now(
    quantmint: Quantmint, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another source or scheme than before an interruption: by fingerprint, nothing of the other is mixed in."""
    with monkeypatch.context() as patched:
        patched.setattr("quantmint.pipeline.stages.inspect.InspectStage.run", interrupted)
        assert quantmint("quantize", copied, "out", "--scheme", "ptpc_fp8").code == 130
    assert not Path("out/config.json").exists()
    change_a_weight(copied)
    again = ("quantize", copied, "out", "--scheme", "mxfp4", "--no-inspect")
    assert quantmint(*again, "--dry-run", "--json").json["state"] == "goes on where it stopped"
    assert quantmint(*again).code == 0
    assert quantmint("quantize", copied, "plain", "--scheme", "mxfp4", "--no-inspect").code == 0
    assert weights(Path("out")) == weights(Path("plain"))
    assert not list(Path("out").glob(".*"))


def test_what_was_measured_is_not_measured_again(
    quantmint: Quantmint, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("quantize", source, "out", "--scheme", "ptpc_fp8", *KV)
    with monkeypatch.context() as patched:
        patched.setattr("quantmint.pipeline.stages.quantize.QuantizeStage.run", interrupted)
        assert quantmint(*command).code == 130
    monkeypatch.setattr("quantmint.pipeline.stages.calibrate.CalibrateStage.run", interrupted)
    ended = quantmint(*command, "--json")
    assert ended.code == 0, ended.err
    assert "calibrate: cached" in ended.err
    assert {"start", "work", "proof"} <= ended.json["seconds"].keys(), "what this process did"
    assert "calibrate" not in ended.json["seconds"], "an earlier one's time"


@pytest.mark.parametrize("what", ["file", "folder", "model"])
def test_what_is_there_is_never_overwritten(quantmint: Quantmint, source: Path, copied: Path, what: str) -> None:
    out = copied if what == "model" else Path("out")
    if what == "file":
        out.write_text("mine")
    elif what == "folder":
        (out / "mine").mkdir(parents=True)
    before = everything(out)
    ended = quantmint("quantize", source, out, "--scheme", "ptpc_fp8")
    assert ended.code == 2
    assert "OUT: found " in ended.err
    assert everything(out) == before


def test_an_unsound_checkpoint_never_gets_its_configuration(
    quantmint: Quantmint, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmint.pipeline.quantize.inspection.findings import Inspection, InspectionFinding

    found = Inspection("compressed-tensors", (InspectionFinding("zero", "a.weight", "is all zero"),), (), {}, 14)
    monkeypatch.setattr("quantmint.pipeline.stages.inspect.inspect_checkpoint", lambda *_, **__: found)
    for _ in range(2):
        ended = quantmint("quantize", source, "out", "--scheme", "ptpc_fp8")
        assert ended.code == 1
        assert "zero: a.weight: is all zero" in ended.err
        assert not Path("out/config.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scheme", "ptcp_fp8"), '--scheme: found "ptcp_fp8", expected one of .* (did you mean "ptpc_fp8"?)'),
        (("--scheme", "ptpc_fp8", "--format", "gguf"), '--format: found "gguf", expected one of compressed-tensors'),
        (("--scheme", "ptpc_fp8", "--algorithm", "awq", *KV), "--algorithm: "),
        (("--scheme", "fp8"), "--scheme: found fp8 without calibration, expected --calibration SET"),
        (("--scheme", "ptpc_fp8", "--samples", "3"), "--samples: found it without --calibration"),
        (
            ("--scheme", "ptpc_fp8", *KV[:2], "--calibration", "tinny"),
            '--calibration: found no calibration set "tinny"',
        ),
        (
            ("--scheme", "ptpc_fp8", "--exclude", "lm_hed"),
            "--exclude: found 'lm_hed', which matches none of the model's",
        ),
        (
            ("--scheme", "ptpc_fp8", "--exclude", "model.layers.0.self_attn.q_proj"),
            "--exclude: found 16 bit for model.layers.0.self_attn.q_proj beside ptpc_fp8 for",
        ),
        (("--scheme", "ptpc_fp8", "--parameter", "scaling=true"), "--parameter: found it without --algorithm"),
        (
            ("--scheme", "ptpc_fp8", "--algorithm", "gptq", "--parameter", "scaling"),
            "--parameter: found 'scaling', expected NAME=VALUE",
        ),
        (("--scheme", "ptpc_fp8", "--override", "lm_head"), "--override: found 'lm_head', expected NAME=SCHEME"),
        (("--scheme", "ptpc_fp8", "--override", "lm_head=fp9"), '--override: found "fp9", expected one of'),
        (("--scheme", "ptpc_fp8", "--device", "cuda:77"), "--device: found 'cuda:77', which PyTorch cannot use here"),
        ((), "Missing option '--scheme'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_asked_wrongly_is_one_message(
    quantmint: Quantmint, source: Path, options: tuple[str, ...], words: str
) -> None:
    ended = quantmint("quantize", source, "out", *options)
    assert (ended.code, ended.out) == (2, "")
    assert re.search(re.escape(words).replace(r"\.\*\ ", ".* "), ended.err), ended.err
    assert "Traceback" not in ended.err
    assert not Path("out").exists()


@pytest.mark.parametrize("given", ["absent", "./org/name", "a/b/c", ""])
def test_a_source_that_is_neither_a_folder_nor_a_repository(quantmint: Quantmint, given: str) -> None:
    ended = quantmint("quantize", given, "out", "--scheme", "ptpc_fp8")
    assert ended.code == 2
    assert f"MODEL: found {given!r}, expected a folder with a model, or organisation/name[@revision]" in ended.err


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with org/llama at a commit, as the Hub's client lays it out."""
    snapshot = tmp_path / "hub" / "models--org--llama" / "snapshots" / COMMIT
    shutil.copytree(source, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_repository_at_a_commit_needs_no_network(quantmint: Quantmint, cached: Path, source: Path) -> None:
    assert quantmint("quantize", source, "one", "--scheme", "mxfp4", "--no-inspect").code == 0
    planned = quantmint("quantize", f"org/llama@{COMMIT}", "two", "--scheme", "mxfp4", "--dry-run", "--json").json
    assert planned["source"] == {"repo": "org/llama", "commit": COMMIT}
    ended = quantmint("quantize", f"org/llama@{COMMIT}", "two", "--scheme", "mxfp4", "--no-inspect", "--json")
    assert ended.code == 0, ended.err
    assert weights(Path("two")) == weights(Path("one"))
    record = json.loads(Path("two/quantmint/job.json").read_text())
    assert record["payload"]["source"]["settings"] == {"repo": "org/llama", "commit": COMMIT}
    assert quantmint("quantize", f"org/llama@{COMMIT}", "two", "--scheme", "mxfp4", "--json").json["made"] is False


@pytest.mark.slow
def test_two_at_once_make_it_once(source: Path, warm_python: Path) -> None:
    command = [warm_python, "-m", "quantmint", "quantize", source, "out", "--scheme", "mxfp4", "--json"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [json.loads(one.communicate()[0]) for one in both]
    assert [one.returncode for one in both] == [0, 0], told
    assert sorted(one["made"] for one in told) == [False, True]
    assert not list(Path("out").glob(".*"))


@pytest.mark.slow
def test_killed_at_any_moment(source: Path, warm_python: Path) -> None:
    """Before each of the last renames and some of the first: where files appear under the names they keep."""
    arguments = ["quantize", "--scheme", "ptpc_fp8", *KV, str(source)]

    def run(folders: dict[str, int | None]) -> list[dict[str, Any]]:
        Path("job.json").write_text(json.dumps({"arguments": arguments, "folders": folders}))
        script = [warm_python, "-m", "tests.commands.killed_quantize", "job.json", "ended.json"]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        ended: list[dict[str, Any]] = json.loads(Path("ended.json").read_text())
        return ended

    [plain] = run({"plain": None})
    assert plain["code"] == 0
    total = int(Path("plain.renames").read_text())
    moments = sorted({*range(2, total - 8, max(total // 6, 1)), *range(total - 8, total + 1)})
    ended = run({f"killed-{number}": number for number in moments})
    expected = weights(Path("plain"))
    for number, one in zip(moments, ended, strict=True):
        folder, left = Path(f"killed-{number}"), one["left"]
        assert (one["killed"], one["code"]) == (-9, 0)
        assert ("config.json" in left) <= ("quantmint/job.json" in left), "a torn folder looks whole"
        assert weights(folder) == expected
        assert {path.name for path in folder.iterdir()} == {path.name for path in Path("plain").iterdir()}
    # Some were killed between the first and the last file's move, else the test shows nothing.
    assert any(
        "config.json" not in one["left"]
        and any(name.endswith(".safetensors") and "/" not in name for name in one["left"])
        for one in ended
    )


def test_gptq_of_a_text_with_a_token_of_zeros(quantmint: Quantmint, source: Path, models: Callable[..., Path]) -> None:
    """transformers makes the padding token's embedding zero; its hidden states have no size to divide by."""
    model = models("qwen3-moe")
    words = ("--calibration", "words.yaml", "--samples", "8")
    made = quantmint("quantize", model, "out", "--scheme", "mxfp4", "--algorithm", "gptq", *words)
    assert made.code == 0, made.err
    assert "PASS" in made.out


def test_six_bits_are_rounded_by_gptq(quantmint: Quantmint, source: Path, models: Callable[..., Path]) -> None:
    options = ("--scheme", "mxfp6_e3m2", "--format", "quark", "--calibration", "words.yaml", "--samples", "8")
    made = quantmint("quantize", models("mixtral"), "out", *options, "--algorithm", "gptq")
    assert made.code == 0, made.err
    assert "PASS" in made.out
    assert "rounded to the nearest" not in made.err, "no module is left to plain rounding"
    assert quantmint("quantize", models("mixtral"), "plain", *options[:4]).code == 0
    rounded, nearest = (load_file(next(Path(folder).glob("*.safetensors"))) for folder in ("out", "plain"))
    names = {name for name, tensor in nearest.items() if tensor.dtype == torch.uint8 and not name.endswith("_scale")}
    assert len(names) == 32
    assert not [name for name in names if torch.equal(rounded[name], nearest[name])]


def test_gptq_of_a_text_of_few_words_is_sound(quantmint: Quantmint, copied: Path) -> None:
    """Least squares moved a projection, whose outputs are small beside what layers before lost, to -7.5 dB."""
    for path in copied.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("layers.1.self_attn.o_proj.weight")]:
            tensors[name] *= 0.005
        save_file(tensors, path, metadata={"format": "pt"})
    lines = (" ".join(f"w{line * word % 12 + 4}" for word in range(1, 60)) for line in range(1, 40))
    Path("words.txt").write_text("\n".join(lines))
    words = ("--calibration", "words.yaml", "--samples", "8")
    made = quantmint("quantize", copied, "out", "--scheme", "mxfp4", "--algorithm", "gptq", *words)
    assert made.code == 0, made.err
    assert "PASS" in made.out
    errors = json.loads(next(Path("out").rglob("errors.json")).read_text())
    assert errors["model.layers.1.self_attn.o_proj"]["output_db"] > 20


@pytest.mark.slow
def test_rounding_is_learned_beside_a_layer_in_fp8(
    quantmint: Quantmint, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `scheme: auto` chooses at some budgets: one layer has no weight in groups at all."""
    monkeypatch.setattr(latents, "RATE", 0.05)
    words = ("--calibration", "words.yaml", "--samples", "16", "--batch-size", "2")
    learning = ("--algorithm", "tuned", "--parameter", "weights=true", "--parameter", "steps=20", *words)
    mixed = ("--scheme", "mxfp4_fp8", "--format", "quark", "--override", "re:.*layers\\.0\\..*=ptpc_fp8")
    made = quantmint("quantize", copied, "out", *mixed, *learning)
    assert made.code == 0, made.err
    assert "100 % of 32 layer samples" in made.err
    assert "100 % of 20 steps of tuning" in made.err
    assert "tuning: on held-out samples KL is" in made.err
    inspected = quantmint("inspect", "out", "--source", copied)
    assert inspected.code == 0, inspected.out


def test_sigterm_ends_as_ctrl_c_does(source: Path, quantmint: Quantmint) -> None:
    """Service managers stop a process so; it says what is kept, and its exit code is that of the signal."""
    command = [sys.executable, "-m", "quantmint", "quantize", str(source), "out", "--scheme", "ptpc_fp8"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        while "[1/" not in run.stderr.readline():
            assert run.poll() is None
        run.terminate()
        words = run.stderr.read()
    assert run.returncode == 143, words
    assert "interrupted; what was finished is kept, and the same command goes on from there" in words
    assert quantmint("quantize", source, "out", "--scheme", "ptpc_fp8").code == 0


def test_somebodys_data_beside_a_model_is_not_copied_with_it(quantmint: Quantmint, models: Any) -> None:
    """A calibration set in the source's folder was published with the release, byte for byte."""
    shutil.copytree(models("llama"), "source")
    for name in ("held-out.json", "notes.txt"):
        Path("source", name).write_text("{}")
    Path("source/special_tokens_map.json").write_text("{}")
    made = quantmint("quantize", "source", "out", "--scheme", "ptpc_fp8")
    assert made.code == 0, made.err
    assert "held-out.json, notes.txt: no model's files, so they are not copied with it" in made.err
    names = {path.name for path in Path("out").iterdir()}
    assert "special_tokens_map.json" in names
    assert names.isdisjoint({"held-out.json", "notes.txt"})


@pytest.mark.parametrize("rest", ["ptpc_fp8", "mxfp4"])
def test_an_output_head_that_is_overridden_by_its_name_is_in_fp8(
    quantmint: Quantmint, models: Callable[..., Path], rest: str
) -> None:
    """vLLM builds a head with a quantization in compressed-tensors' layout, and in no other."""
    import torch
    from safetensors.torch import load_file

    def recipe(layout: str, scheme: str = "ptpc_fp8") -> None:
        override = f"overrides: [{{modules: [lm_head], scheme: {scheme}}}]"
        Path("head.yaml").write_text(
            f"name: head\nsource: {{folder: {models('llama')}}}\nevaluation: {{suite: tiny, runtime: reference}}\n"
            "target: {hardware: cpu, gpus: 1, workload: tiny, max_model_len: 512}\n"
            "gate: {throughput: {min_ratio: null}}\n"
            f"quantization: {{scheme: {rest}, kv_cache: auto, format: {layout}, {override}}}\n"
        )

    recipe("compressed-tensors")
    made = quantmint("run", "head.yaml", "--until", "inspect", "--device", "cpu")
    assert made.code == 0, made.err
    (config,) = Path("store/quantize").glob("*/**/config.json")
    declared = json.loads(config.read_text())["quantization_config"]
    assert [group["targets"] for group in declared["config_groups"].values() if "lm_head" in group["targets"]]
    assert "lm_head" not in declared["ignore"]
    stored = load_file(config.parent / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert stored["lm_head.weight_scale"].shape == (len(stored["lm_head.weight"]), 1)
    for layout, scheme, said in (
        ("quark", "ptpc_fp8", "found quark for lm_head in ptpc_fp8, expected compressed-tensors"),
        ("compressed-tensors", "mxfp4", "found mxfp4 for lm_head, expected ptpc_fp8"),
    ):
        recipe(layout, scheme)
        refused = quantmint("run", "head.yaml", "--until", "inspect", "--device", "cpu")
        assert refused.code == 2
        assert said in " ".join(refused.err.split())
