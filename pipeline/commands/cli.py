"""The command line. Commands are imported when they are called, so that ``--help`` answers at once."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantmint.pipeline import __version__
from quantmint.pipeline.base.errors import QuantmintError, TerminatedError, did_you_mean


@dataclass(frozen=True, slots=True)
class _CommandEntry:
    """A command: the module below ``pipeline.commands`` that defines it, and its heading and line in --help.

    A group has entries of its own in ``group``, by name.
    """

    module: str
    heading: str
    line: str
    group: Mapping[str, _CommandEntry] | None = None


_RELEASE = {
    "list": _CommandEntry("publish", "Commands", "List the releases at a destination, and which of them readers get."),
    "promote": _CommandEntry("publish", "Commands", "Promote a candidate to the current release."),
    "rollback": _CommandEntry("publish", "Commands", "Make an earlier release the current one again."),
    "prune": _CommandEntry("publish", "Commands", "Remove old releases from a destination."),
    "verify": _CommandEntry("judge", "Commands", "Verify a release with nothing but what was published."),
}
_RECIPE = {
    "init": _CommandEntry("recipes", "Commands", "Write a first recipe for a model of your own."),
    "list": _CommandEntry("recipes", "Commands", "List the recipes."),
    "show": _CommandEntry("recipes", "Commands", "Print a recipe with everything inherited and every default."),
    "schema": _CommandEntry("recipes", "Commands", "Print the JSON Schema of recipes."),
}
_COMMANDS = {
    "recipe": _CommandEntry("recipes", "Make", "Write, list and show recipes.", _RECIPE),
    "plan": _CommandEntry("plan", "Make", "Show the stages of a run, and its time, memory and disk."),
    "run": _CommandEntry("run", "Make", "Quantize, prove and publish what a recipe says."),
    "quantize": _CommandEntry("quantize", "Make", "Quantize one model without a recipe."),
    "search": _CommandEntry("search", "Make", "Measure the KL of each scheme by layer, and spend a budget of bits."),
    "submit": _CommandEntry("submit", "Make", "Run a recipe on Slurm, Kubernetes or a Ray cluster."),
    "inspect": _CommandEntry("quantize", "Prove", "Check the structure and the numbers of any quantized checkpoint."),
    "gate": _CommandEntry("judge", "Prove", "Judge recorded measurements again."),
    "report": _CommandEntry("report", "Prove", "Open or copy a recipe's report."),
    "compare": _CommandEntry("report", "Prove", "Compare checkpoints: accuracy, size, throughput."),
    "serve": _CommandEntry("serve", "Serve", "Serve a model with the knobs for its hardware, or print the launch."),
    "tune": _CommandEntry("tune", "Serve", "Measure which knobs serve a model best."),
    "doctor": _CommandEntry("serve", "Serve", "Check whether this machine is ready to serve."),
    "knobs": _CommandEntry("tune", "Serve", "List vLLM's settings, with the value and reason of each."),
    "publish": _CommandEntry(
        "publish", "Publish", "Publish a finished run, to other destinations too, or as a candidate."
    ),
    "release": _CommandEntry("publish", "Publish", "List, promote, roll back, prune and verify releases.", _RELEASE),
    "due": _CommandEntry("requantize", "Keep fresh", "List recipes whose inputs changed since their last release."),
    "requantize": _CommandEntry("requantize", "Keep fresh", "Run the recipes that are due, side by side."),
    "schedule": _CommandEntry(
        "schedule", "Keep fresh", "Export schedules of recipes to cron, systemd, Kubernetes or GitHub."
    ),
    "schemes": _CommandEntry("recipes", "Look", "List the quantization schemes."),
    "explain": _CommandEntry("run", "Look", "Explain why each stage would run again."),
    "runs": _CommandEntry("run", "Look", "List past runs."),
    "site": _CommandEntry("report", "Look", "Render an index of all runs, with their reports."),
    "track": _CommandEntry("report", "Look", "Log a finished run to MLflow."),
    "gc": _CommandEntry("run", "Look", "Remove store entries that no recent run uses."),
}


# What is imported only where it is needed, by the extra that brings it.
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "datasets", "pyarrow", "huggingface_hub", "httpx"), "quantize"),
    "lm_eval": "evaluate",
    **dict.fromkeys(("jinja2", "markupsafe", "matplotlib"), "report"),
    **dict.fromkeys(("cyclonedx", "packageurl", "detect_secrets", "tenacity"), "publish"),
    **dict.fromkeys(("model_signing", "OpenSSL", "sigstore"), "publish"),
    "obstore": "storage",
    "cronsim": "schedule",
    "ray": "ray",
    "kubernetes": "kubernetes",
    **dict.fromkeys(("llmcompressor", "auto_round"), "llmcompressor"),
    **dict.fromkeys(("quark", "ninja"), "quark"),
}


class _Commands(click.Group):
    """A click group that imports a command's module only when the command is called."""

    def __init__(self, *, entries: Mapping[str, _CommandEntry], **settings: Any) -> None:
        super().__init__(**settings)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of that name, or build a group of its entries; None for an unknown name."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        if entry.group is not None:
            return _Commands(entries=entry.group, name=cmd_name, help=entry.line)
        module = importlib.import_module(f"quantmint.pipeline.commands.{entry.module}")
        commands = [value for value in vars(module).values() if isinstance(value, click.Command)]
        return next(command for command in commands if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands below their headings, without importing any."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self._entries.items():
            headings.setdefault(entry.heading, []).append((name, entry.line))
        widest = max(map(len, self._entries))
        for title, rows in headings.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{widest}}", line) for name, line in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and remaining arguments.

        Raises a usage error, with the nearest name, for an unknown command.
        """
        if args and args[0] not in self._entries:
            noun = next((name for name, entry in self._entries.items() if args[0] in (entry.group or {})), None)
            instead = did_you_mean(args[0], self._entries) if noun is None else f': it is "quantmint {noun} {args[0]}"'
            ctx.fail(f"no command {args[0]!r}{instead}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, entries=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantmint")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Quantize LLMs for vLLM on AMD Instinct, prove them against their 16-bit baseline, publish what passes.

    Exit codes: 0 PASS, 1 FAIL, 2 usage or bad recipe, 3 INCONCLUSIVE, 4 INVALID measurement, 5 a stage broke, 130 and
    143 ended by Ctrl-C and SIGTERM (after the last three the same command goes on from there).
    """
    ctx.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; errors are one message on standard error, never a traceback."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    stdout = sys.stdout
    try:
        code: Any = cli.main(typed, prog_name="quantmint", standalone_mode=False)
    except QuantmintError as error:
        _fail(str(error), typed, error.exit_code, transient=error.transient)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        code = 143 if isinstance(error.__cause__, TerminatedError) else 130
        _fail("interrupted; what was finished is kept, and the same command goes on from there", typed, code)
    except click.ClickException as error:
        _emit_error(error.format_message(), typed, 2)
        error.show()
        sys.exit(2)
    except SystemExit as error:
        # Where nobody reads any more click and rich end with 1, which is a judgement here: the one leaves a stream that
        # is silent, the other the error that it met.
        if sys.stdout is not stdout or isinstance(error.__context__, BrokenPipeError):
            sys.exit(141)
        if isinstance(error.code, int) and error.code >= 128:  # a signal that was ours
            sys.exit(error.code)
        _fail(f"a library ended the process: exit {error.code}{_shadow()}\n  --debug shows where.", typed, 5)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            _fail(_too_long(str(error.filename)), typed, 2)
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in _EXTRAS:
            install = f"pip install 'quantmint[{_EXTRAS[missing]}]'"
            _fail(f"this needs {missing}, which is not installed.\n  {install}", typed, 2)
        # A fault of ours; what was committed stays all the same.
        foreign = _shadow() if isinstance(error, ImportError) else ""
        _fail(
            f"unexpected {type(error).__name__}: {error}{foreign}\n  --debug shows where; please report it.", typed, 5
        )
    sys.exit(code if isinstance(code, int) else 0)


def run() -> None:
    """Run `main` as this process, and end the process at once, without Python's cleanup.

    Everything is on the disk by then, and taking a GPU's driver and the loaded modules apart would take a second.
    """
    code: object = 0
    signal.signal(signal.SIGTERM, _terminate)
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 5
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code if isinstance(code, int) else 5 if code else 0)


def _terminate(_number: int, _frame: object) -> None:
    """Raise `TerminatedError` at SIGTERM, by which service managers stop a process, to end it as Ctrl-C does."""
    raise TerminatedError


def _too_long(path: str) -> str:
    longest = max(Path(path).parts, key=len, default="")
    if len(os.fsencode(longest)) > 255:
        return f"{longest[:40]}...: found a name of {len(os.fsencode(longest))} bytes in a path, expected at most 255"
    return f"{path[:40]}...: found a path of {len(os.fsencode(path))} bytes, expected at most 4095"


def _shadow() -> str:
    """Return a hint that PYTHONPATH may hide a module that quantmint needs; empty where the variable is not set."""
    path = os.environ.get("PYTHONPATH")
    return f"\n  PYTHONPATH is {path}: a module there may hide one that quantmint needs." if path else ""


def _fail(message: str, arguments: Sequence[str], code: int, *, transient: bool = False) -> None:
    if "--debug" in arguments:
        import traceback

        traceback.print_exc()
    _emit_error(message, arguments, code, transient=transient)
    click.echo(f"quantmint: {message}", err=True)
    sys.exit(code)


def _emit_error(message: str, arguments: Sequence[str], code: int, *, transient: bool = False) -> None:
    """Print the error as a JSON object if ``arguments`` contain ``--json``, else nothing.

    ``transient`` says that the same command may succeed later.
    """
    if "--json" in arguments:
        import json

        click.echo(json.dumps({"error": message, "exit_code": code, "transient": transient}))
