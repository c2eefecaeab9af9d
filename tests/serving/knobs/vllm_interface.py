"""Run by the interpreter of a vLLM environment: prints what `vllm serve` knows, flags and variables."""

from __future__ import annotations

import json
import sys


def main() -> None:
    sys.argv = ["vllm", "serve"]
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    variables = sorted(name for name in envs.environment_variables if name.startswith("VLLM_"))
    sys.stdout.write(f"{json.dumps(sorted(parser._option_string_actions))}\n{json.dumps(variables)}\n")


if __name__ == "__main__":
    main()
