"""Load one checkpoint and answer messages on a socket until the other end closes it.

The messages are those of `eval.harness_child`, and four more:

``facts``            returns version, runtime, device and kv_cache_dtype
``prompt_logprobs``  returns the log probabilities of the tokens ``ids`` and of the ``likeliest`` tokens by position
``keep_logprobs``    writes the log probabilities of the whole vocabulary at some ``places`` to ``path``
``divergences``      returns KL(P || Q) at some ``places``, with P from ``path``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.errors import QuantmintError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the checkpoint, and answer messages on the socket until it closes; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m quantmint.pipeline.serving.reference",
        description="Evaluate a checkpoint through transformers, with the arithmetic of its format.",
    )
    add = parser.add_argument
    add("model", help="folder of a checkpoint")
    add("socket", help="path of the client's socket, or @ and an abstract name")
    add("--served-model-name", help="ignored: the server has one model")
    add("--max-model-len", type=int, help="ignored: clients send the length")
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: refuse a checkpoint without scales for its cache (default: as the checkpoint declares)",
    )
    add(
        "--mx-scales",
        choices=("even", "up"),
        default="even",
        help="rounding of the scales of MX inputs (default: even)",
    )
    add("--device", default="auto", help="PyTorch's name of a device (default: a GPU if there is one)")
    add("--trust-remote-code", action="store_true", help="run Python code of the model's folder")
    options = parser.parse_args(arguments)
    try:
        _answer(options)
    except QuantmintError as error:
        hint = f" {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)  # noqa: T201 - this is a program
        return error.exit_code
    return 0


def _answer(options: argparse.Namespace) -> None:
    from quantmint.eval.harness_child import Session, Tell, answer_on
    from quantmint.pipeline.quantize.device import resolve_device
    from quantmint.pipeline.serving.host.detect import local_device
    from quantmint.pipeline.serving.reference import lm
    from quantmint.pipeline.serving.reference.model import load, reference_version

    folder, device = Path(options.model), resolve_device(options.device)
    trust = options.trust_remote_code
    loaded = load(folder, device, trust_remote_code=trust, mx_scales=options.mx_scales)
    if options.kv_cache_dtype == "fp8" and not loaded.kv_scales:
        raise UserError(f"{folder}: --kv-cache-dtype fp8, but the checkpoint has no scales for its cache.")
    tokenizer = lm.load_tokenizer(folder, loaded, trust_remote_code=options.trust_remote_code)
    facts = {
        "version": reference_version(),
        "runtime": loaded.runtime,
        "device": asdict(local_device(device)),
        "kv_cache_dtype": loaded.kv_cache_dtype,
        **({} if options.mx_scales == "even" else {"mx_scales": options.mx_scales}),
    }
    print(f"{loaded.runtime}, on {facts['device']}", file=sys.stderr, flush=True)  # noqa: T201
    session = Session(partial(lm.ReferenceLM, loaded, tokenizer))

    computations: Mapping[str, Any] = {
        "prompt_logprobs": lm.prompt_logprobs,
        "keep_logprobs": lm.keep_logprobs,
        "divergences": lm.divergences,
    }

    def reply(message: str, arguments: Mapping[str, Any], send: Tell) -> Any:
        if message == "facts":
            return facts
        if message in computations:
            return computations[message](loaded, **arguments)
        return session.reply(message, arguments, send)

    answer_on(options.socket, reply)


if __name__ == "__main__":
    sys.exit(main())
