"""Run by the interpreter of a vLLM environment: says what vLLM's own parser knows, and what it thinks of launches.

Standard input is a JSON list of {"argv": [...], "env": {...}}; the last line of standard output is {"flags": [...],
"env": [...], "complaints": [[...], ...]}, one list of complaints for each launch.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys


def main() -> None:
    from vllm import envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    answers = []
    for launch in json.load(sys.stdin):
        complaints = [
            name for name in launch["env"] if name.startswith("VLLM_") and name not in envs.environment_variables
        ]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                args = parser.parse_args(launch["argv"][2:])
                args.model = args.model_tag  # as `vllm serve` does
                AsyncEngineArgs.from_cli_args(args)
        except SystemExit:
            complaints.append(said.getvalue().strip().splitlines()[-1])
        except Exception as error:
            complaints.append(f"{type(error).__name__}: {error}")
        answers.append(complaints)
    variables = [name for name in envs.environment_variables if name.startswith("VLLM_")]
    known = {"flags": list(parser._option_string_actions), "env": variables, "complaints": answers}
    sys.stdout.write("\n" + json.dumps(known))


if __name__ == "__main__":
    main()
