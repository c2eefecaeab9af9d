"""Run by the interpreter of a vLLM environment: makes the engine of each launch, and leaves what its log said.

Standard input is a JSON list of {"argv": [...], "log": path}, the arguments of `vllm serve`; standard output the list
of exit codes. Each engine is made in a fork: what vLLM imports takes far longer than an engine for a tiny model, and
one that was made leaves nothing to the next.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = make_arg_parser(FlexibleArgumentParser())

    def make(argv: list[str]) -> None:
        args = parser.parse_args(argv[2:])
        args.model = args.model_tag  # as `vllm serve` does
        LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))

    codes = []
    for launch in json.load(sys.stdin):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                make(launch["argv"])
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write("\n" + json.dumps(codes))


if __name__ == "__main__":
    main()
