"""The command line as a person and a program meet it: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.commands import cli

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "rich", "scipy", "matplotlib", "datasets", "lm_eval", "numpy", "yaml")
COMMANDS = tuple(cli.cli.list_commands(None))
Quantmint = Callable[..., Any]


def in_a_process(*arguments: str, code: str = "from quantmint.pipeline.commands.cli import main; main()") -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", ["--version", "schemes"])  # click writes the one, rich the other
def test_a_reader_who_leaves_is_no_verdict(command: str) -> None:
    """`quantmint ... | head`: 1 would be a FAIL, and a shell says 141 of whoever writes then."""
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-c", "from quantmint.pipeline.commands.cli import main; main()", command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(words, env=environment, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["", "debug"])
@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("click", ""),
        ("click", "raise SystemExit(1)"),
        ("click", "raise SystemExit('not yours')"),
        ("click", "class Odd(BaseException): pass\nraise Odd"),
        ("yaml", "from nothing_at_all import this"),
        ("yaml", "raise SystemExit(1)"),
        ("yaml", "class Odd(BaseException): pass\nraise Odd"),
        ("pydantic", ""),
    ],
)
def test_a_foreign_module_on_the_path_is_no_verdict(tmp_path: Path, module: str, text: str, debug: list[str]) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-P", "-m", "quantmint", *debug, "recipe", "show", "tiny-ptpc"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert done.stdout == ""
    if "Odd" not in text or module == "click":
        assert "PYTHONPATH" in done.stderr
        assert ("Traceback" in done.stderr) == bool(debug)


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys\nfrom quantmint.pipeline.commands.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print('LOADED', len(sys.modules), *found, file=sys.stderr)\n"
    )
    done = in_a_process("--help", code=code)
    assert done.returncode == 0
    marker, count, *found = done.stderr.split()
    assert (marker, found) == ("LOADED", [])
    assert int(count) < 400
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    text = " ".join(done.stdout.split())
    for words in ("0 PASS", "1 FAIL", "2 usage or bad recipe", "3 INCONCLUSIVE", "4 INVALID", "5 a stage broke"):
        assert words in text


def _pages(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command that is no group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _pages(command, (*names, name))
        else:
            yield (*names, name)


@pytest.mark.parametrize("words", list(_pages(cli.cli)), ids=" ".join)
def test_every_command_has_help_with_an_example(quantmint: Quantmint, words: tuple[str, ...]) -> None:
    ended = quantmint(*words, "--help")
    assert ended.code == 0
    assert ended.out.startswith(f"Usage: quantmint {' '.join(words)}")
    assert f"Example: quantmint {' '.join(words)}" in " ".join(ended.out.split())
    assert ended.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runn", "tiny-ptpc-fp8kv"], "no command 'runn' (did you mean \"run\"?)"),
        (["verify", "release"], "no command 'verify': it is \"quantmint release verify\""),
        (["run"], "Missing argument 'RECIPE'"),
        (["gc", "--keep", "-1"], "-1"),
        (["run", "llama70b-fp8k"], 'found no recipe "llama70b-fp8k" (did you mean "llama70b-fp8kv"?)\n  There are: '),
        (["gate", "none.json"], "none.json: there is no such file or folder"),
        (["inspect", "none"], "none: no such folder"),
        (["run", "r.yaml", "--until", "quantise"], 'did you mean "quantize"'),
        (["plan", "bad.yaml"], "bad.yaml:3:24: quantization.scheme: "),
        (["plan", "torn.yaml"], "torn.yaml:3:1: not valid YAML"),
        (["report", "r.yaml"], "r: there is no such file or folder, and no report of such a recipe"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_asked_wrongly_is_one_message(
    quantmint: Quantmint, project: Path, arguments: list[str], words: str
) -> None:
    (project / "bad.yaml").write_text("name: bad\nsource: {repo: a/b}\nquantization: {scheme: ptpc_fp9}\n")
    (project / "torn.yaml").write_text("name: torn\nsource: {repo: a/b\n")
    ended = quantmint(*arguments)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert len([line for line in ended.err.splitlines() if line.startswith(("quantmint:", "Error:"))]) == 1
    entries = list(project.rglob("record.json"))
    assert entries == []
    if "r.yaml" not in arguments:
        assert not (project / "store").exists()

    told = quantmint(*arguments, "--json")
    assert told.code == 2
    assert told.json["exit_code"] == 2
    assert told.json["error"]
    assert "Traceback" not in told.err


@pytest.mark.parametrize("arguments", [["inspect", "LONG"], ["run", "LONG"]])
def test_a_name_that_no_file_can_have(quantmint: Quantmint, project: Path, arguments: list[str]) -> None:
    ended = quantmint(*("o" * 300 if word == "LONG" else word for word in arguments))
    assert ended.code == 2
    assert ended.err == f"quantmint: {'o' * 40}...: found a name of 300 bytes in a path, expected at most 255\n"
    assert not (project / "store").exists()


@pytest.mark.parametrize("arguments", [["runn"], ["plan", "nothing", "--json"]])
def test_the_exit_code_reaches_the_shell(arguments: list[str]) -> None:
    done = in_a_process(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(Path.cwd().iterdir()) == []


def test_no_arguments_show_the_help(quantmint: Quantmint) -> None:
    ended = quantmint()
    assert ended.code == 2
    assert "Make:" in ended.err


def test_debug_shows_where(quantmint: Quantmint) -> None:
    assert "Traceback" not in quantmint("plan", "nothing").err
    ended = quantmint("--debug", "plan", "nothing")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "pipeline/recipe/load.py" in ended.err
    assert ended.err.splitlines().count('quantmint: found no recipe "nothing"') == 1


def raising(error: BaseException) -> Callable[[Any], None]:
    def work(job: Any) -> None:
        raise error

    return work


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ServingError("it did not start", hint="look at the log"), 5, "it did not start\n  look at the log"),
        (ZeroDivisionError("division by zero"), 5, "stage only broke: ZeroDivisionError: division by zero\n  Run"),
        (KeyboardInterrupt(), 130, "interrupted; what was finished is kept, and the same command goes on from there"),
    ],
    ids=["ours", "unexpected", "interrupt"],
)
def test_a_stage_that_breaks(
    orchestra: Any, quantmint: Quantmint, error: BaseException, code: int, message: str, as_json: bool
) -> None:
    orchestra.plan(orchestra.stage("only", work=raising(error)))
    ended = quantmint("run", "r.yaml", *(["--json"] if as_json else []))
    assert ended.code == code
    assert "Traceback" not in ended.err
    assert ended.err.count(f"quantmint: {message}") == 1
    if as_json:
        assert ended.json["exit_code"] == code
        assert ended.json["error"].startswith(message)
    else:
        assert ended.out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_of_ours(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    def broken(root: Path) -> None:
        raise LookupError("what")

    monkeypatch.setattr("quantmint.pipeline.store.gc.list_runs", broken)
    ended = quantmint("runs", *(["--json"] if as_json else []))
    assert ended.code == 5
    assert ended.err.startswith("quantmint: unexpected LookupError: what\n  --debug shows where")
    assert "Traceback" not in ended.err
    assert (ended.json["exit_code"] == 5) if as_json else (ended.out == "")


VERDICTS = [("PASS", 0), ("FAIL", 1), ("INCONCLUSIVE", 3), ("INVALID", 4)]


def judged(orchestra: Any, verdict: str) -> None:
    folder = Path("published/.releases/r/v20261121-0123abcd")

    def publish(job: Any) -> None:
        (folder / "quantmint").mkdir(parents=True)
        (folder / "quantmint" / "report.html").write_text("<html>")
        Path("published/r").symlink_to(folder.relative_to("published"))

    places = [str(Path.cwd() / "published" / "r"), "my-org/r"]
    told = {"tag": folder.name, "revision": "0123abcd", "current": True, "again": False}
    orchestra.plan(
        orchestra.stage("gate", result={"verdict": verdict, "reasons": ["because of this"]}),
        orchestra.stage("report", "gate", work=lambda job: (job.path / "report.html").write_text("<html>")),
        orchestra.stage(
            "publish", "report", work=publish, result={"targets": [{"place": place, **told} for place in places]}
        ),
    )


@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_a_run_ends_with_its_verdict(
    orchestra: Any, quantmint: Quantmint, project: Path, verdict: str, code: int
) -> None:
    judged(orchestra, verdict)
    ended = quantmint("run", "r.yaml")
    assert ended.code == code
    lines = ended.out.split("\n")
    assert lines[1:3] == [f"{verdict}  r", "  because of this"]
    assert any(line.startswith("report ") and line.endswith("report.html") for line in lines)
    placed = [f"checkpoint  {place}  v20261121-0123abcd" for place in ("published/r", "my-org/r")]
    assert [line for line in lines if line.startswith("checkpoint")] == (placed if verdict == "PASS" else [])
    assert ("report      published/r/quantmint/report.html" in lines) == (verdict == "PASS")


@pytest.mark.slow
@pytest.mark.parametrize(("verdict", "code"), VERDICTS)
def test_a_program_reads_the_same(orchestra: Any, quantmint: Quantmint, project: Path, verdict: str, code: int) -> None:
    judged(orchestra, verdict)
    for cached in (False, True):
        ended = quantmint("run", "r.yaml", "--json")
        assert ended.code == code
        told = ended.json
        assert told.keys() == {
            "recipe", "verdict", "reasons", "measured", "stopped", "checkpoint", "published", "report", "tracked",
            "stages", *(["advice", "paste", "paste_seconds"] if verdict == "FAIL" else []),
        }  # fmt: skip
        assert (told["recipe"], told["verdict"], told["reasons"]) == ("r", verdict, ["because of this"])
        assert (told["checkpoint"] == str(project / "published" / "r")) == (verdict == "PASS")
        assert [place["place"] for place in told["published"]] == (
            [told["checkpoint"], "my-org/r"] if verdict == "PASS" else []
        )
        assert Path(told["report"]).read_text() == "<html>"
        assert [stage["cached"] for stage in told["stages"]] == [cached] * (3 if verdict == "PASS" else 2)
        for stage in told["stages"]:
            assert stage.keys() == {"stage", "fingerprint", "cached", "seconds", "path"}
            assert (Path(stage["path"]) / "record.json").is_file()


def test_a_verdict_names_what_it_was_measured_with(orchestra: Any, quantmint: Quantmint, project: Path) -> None:
    told = {"runtime": "transformers 5.17.0 in float32", "hardware": "cpu", "device": "AMD EPYC"}

    def work(job: Any) -> None:
        (job.path / "gate.json").write_text(json.dumps(told))

    orchestra.plan(orchestra.stage("gate", result={"verdict": "PASS", "reasons": []}, work=work))
    assert "measured    by transformers 5.17.0 in float32 on AMD EPYC" in quantmint("run", "r.yaml").out.splitlines()
    assert quantmint("run", "r.yaml", "--json").json["measured"] == told


def test_the_store_is_where_one_says(
    orchestra: Any, quantmint: Quantmint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra.plan(orchestra.stage("only"))
    monkeypatch.setenv("QUANTMINT_STORE", str(tmp_path / "by variable"))
    assert quantmint("run", "r.yaml").code == 0
    assert (tmp_path / "by variable" / "only").is_dir()
    assert quantmint("run", "r.yaml", "--store", tmp_path / "by option").code == 0
    assert (tmp_path / "by option" / "only").is_dir()


def test_json_is_plain_for_every_list(quantmint: Quantmint, project: Path) -> None:
    for arguments in (["recipe", "list"], ["schemes"], ["runs"], ["gc", "--dry-run"], ["recipe", "show", "r.yaml"]):
        ended = quantmint(*arguments, "--json")
        assert ended.code == 0
        assert isinstance(json.loads(ended.out), list | dict)
        assert "\x1b" not in ended.out


@pytest.mark.parametrize(
    ("module", "extra"), [("torch", "quantize"), ("lm_eval.models", "evaluate"), ("jinja2", "report")]
)
def test_a_package_of_an_extra_that_is_not_there_is_named_with_the_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli.cli, "main", absent)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "tiny-ptpc-fp8kv"])
    assert ended.value.code == 2
    name = module.partition(".")[0]
    assert capsys.readouterr().err == (
        f"quantmint: this needs {name}, which is not installed.\n  pip install 'quantmint[{extra}]'\n"
    )


def test_json_keeps_standard_output_clean(orchestra: Any, quantmint: Quantmint) -> None:
    def work(job: Any) -> None:
        job.progress.warn("careful")
        with job.progress.bar(10, "samples") as advance:
            advance(10)

    orchestra.plan(orchestra.stage("only", work=work))
    ended = quantmint("run", "r.yaml", "--json")
    assert (ended.code, json.loads(ended.out)["stages"][0]["stage"]) == (0, "only")
    assert ended.err.splitlines() == [
        "[1/1] only: started",
        "    warning: careful",
        "    100 % of 10 samples",
        ended.err.splitlines()[-1],
    ]
