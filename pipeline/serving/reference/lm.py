"""lm-eval's Hugging Face model over a checkpoint with the arithmetic of its format.

Only the process that runs the model imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, GenerationConfig

from quantmint.eval.harness_client import TokenizerFacts
from quantmint.pipeline.base.errors import UserError, first_line
from quantmint.pipeline.quantize.rounding import kv_cache
from quantmint.pipeline.serving.reference.model import ReferenceModel

_LOGITS: Final = 1 << 27  # most logits of a batch: half a GiB in float32, and lm-eval keeps two copies


class ReferenceLM(TokenizerFacts, HFLM):  # type: ignore[misc]
    """The model that `eval.harness_child.Harness` uses in place of a server.

    ``arguments`` are a server client's: ``max_length`` tokens of a prompt with its answer, at most ``batch_size``
    prompts at once. ``expect`` and ``done`` count requests. ``temperatures`` and ``full`` are as in
    `eval.harness_client`.
    """

    def __init__(
        self,
        loaded: ReferenceModel,
        tokenizer: Any,
        arguments: Mapping[str, Any],
        expect: Callable[[int], None],
        done: Callable[[int], None],
    ) -> None:
        super().__init__(
            loaded.model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=arguments["max_length"],
            batch_size=arguments["batch_size"],
        )
        self.temperatures: set[float] = set()
        self.full = 0
        self._loaded = loaded
        self._expect = expect
        self._by_document = False
        self._batch_size = int(arguments["batch_size"])
        # lm-eval calls its cache for every answered request.
        self.set_cache_hook(SimpleNamespace(add_partial=lambda *_: done(1)))

    def get_model_info(self) -> dict[str, Any]:
        """Return nothing; lm-eval's own method would ask the Hub for the commit of a local folder."""
        return {}

    def loglikelihood(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """Count the requests, then answer them as lm-eval does."""
        self._expect(len(requests))
        return super().loglikelihood(requests, *args, **options)

    def generate_until(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """Count the requests, then answer them as lm-eval does."""
        self._expect(len(requests))
        self.batch_size_per_gpu = self._batch_size
        return super().generate_until(requests, *args, **options)

    def loglikelihood_rolling(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """Count the requests, then answer them as lm-eval does."""
        self._expect(len(requests))
        self._by_document = True
        try:
            return super().loglikelihood_rolling(requests, *args, **options)
        finally:
            self._by_document = False

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        if not self._by_document:  # a document is split into windows, which are full by design
            self.full += sum(length >= self.max_length for length in lengths)
        longest = min(max(lengths, default=1), self.max_length)
        fitting = _LOGITS // (longest * self.config.get_text_config().vocab_size)
        self.batch_size_per_gpu = max(1, min(self._batch_size, fitting))
        return super()._loglikelihood_tokens(requests, *args, **options)

    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return logits_of(self._loaded, inps)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        self.temperatures.add(float(options.get("temperature") or 0.0))
        room = self.max_length - (max_length - context.shape[1])
        self.full += int((options["attention_mask"].sum(1) >= room).sum())
        cache = kv_cache(self.config.get_text_config(), self._loaded.kv_scales)
        with torch.inference_mode():
            tokens: torch.Tensor = super()._model_generate(context, max_length, stop, past_key_values=cache, **options)
        return tokens


def load_tokenizer(folder: Path, loaded: ReferenceModel, *, trust_remote_code: bool = False) -> Any:
    """Return the folder's tokenizer, and set the tokens that end an answer on the model.

    Raises `UserError` when the tokenizer cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be loaded: {first_line(error)}") from None
    declared: list[Any] = [tokenizer.eos_token_id, getattr(loaded.model.config, "eos_token_id", None)]
    if (folder / "generation_config.json").is_file():
        declared.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids = {token for eos in declared for token in (eos if isinstance(eos, list) else [eos]) if token is not None}
    # Other fields of generation_config.json set sampling, which greedy answers do not use.
    loaded.model.generation_config = GenerationConfig(eos_token_id=sorted(ids) or None)
    return tokenizer


def logits_of(loaded: ReferenceModel, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, tokens, vocabulary] of token ids [rows, tokens], with the KV cache of the format."""
    cache = kv_cache(loaded.model.config.get_text_config(), loaded.kv_scales) if loaded.kv_scales else None
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
    return logits


def prompt_logprobs(
    loaded: ReferenceModel, ids: Sequence[int], likeliest: int
) -> list[dict[str, dict[str, float]] | None]:
    """Return log probabilities in the form of vLLM's ``prompt_logprobs``: one entry for each token, None for the first.

    An entry has the log probability (nats) of the token itself and of the ``likeliest`` tokens, by id.
    """
    logprobs = logits_of(loaded, torch.tensor([ids], device=loaded.device))[0, :-1].float().log_softmax(-1)
    values, tokens = logprobs.topk(likeliest)
    actual = logprobs.gather(1, torch.tensor(ids[1:], device=loaded.device)[:, None])
    rows = zip(torch.cat((tokens.new_tensor(ids[1:])[:, None], tokens), 1).tolist(),
               torch.cat((actual, values), 1).tolist(), strict=True)  # fmt: skip
    entries = ({str(token): {"logprob": value} for token, value in zip(*row, strict=True)} for row in rows)
    return [None, *entries]


def keep_logprobs(loaded: ReferenceModel, ids: Sequence[int], places: Sequence[int], path: str) -> None:
    """Write the log probabilities of the whole vocabulary, float32 [places, vocabulary], to the file ``path``.

    They are of the tokens that follow those at ``places``, indices into ``ids``.
    """
    np.save(path, _logprobs(loaded, ids, places).numpy(), allow_pickle=False)


def divergences(loaded: ReferenceModel, ids: Sequence[int], places: Sequence[int], path: str) -> list[float | None]:
    """Return KL(P || Q) in nats at each of ``places``, summed in float64; None where it is not finite.

    P is what `keep_logprobs` wrote to ``path``, Q this model's distribution.
    """
    baseline = torch.from_numpy(np.load(path, allow_pickle=False)).double()
    terms = baseline.exp() * (baseline - _logprobs(loaded, ids, places).double())
    values: list[float] = terms.masked_fill(baseline.isneginf(), 0.0).sum(-1).tolist()
    return [value if math.isfinite(value) else None for value in values]


def _logprobs(loaded: ReferenceModel, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    rows = logits_of(loaded, torch.tensor([ids], device=loaded.device))[0, list(places)]
    return rows.float().log_softmax(-1).cpu()
