"""Stages that ask both sides the same, where the candidate's is given what the baseline's recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantmint.eval import prompts
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.stages.serve import model_key, require_server, runtime_tools
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Check, SideStage
from quantmint.pipeline.store.disk import sha256_of


class PairedStage(SideStage):
    """A stage that asks a side's server, and compares the candidate's answers with the ``baseline`` entry."""

    version = 1
    asks_server = True
    measures = True

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`."""
        return (require_server,)

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage keys of the side's `serve` and `model`, and for the candidate of the `baseline` answers."""
        compared = {"baseline": f"{self.family}-baseline"} if self.side == "candidate" else {}
        return {"serve": f"serve-{self.side}", "model": model_key(self.side), **compared}

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of the runtime and, for the baseline, of the tokenizer's libraries.

        The candidate gets the token ids that the baseline recorded.
        """
        tokenizes = versions("transformers", "tokenizers") if self.side == "baseline" else {}
        return {**tokenizes, **runtime_tools(setting)}


def prompt_settings(setting: Setting) -> dict[str, object]:
    """Return what determines the held-out prompts' token ids beside the tokenizer, for a fingerprint."""
    return {
        "prompts": sha256_of(prompts.FOLDER / f"{setting.suite.canary}.jsonl"),
        "max_length": setting.recipe.target.max_model_len,
    }
