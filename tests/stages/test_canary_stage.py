"""The canary's stages against a stand-in that answers prompt_logprobs over HTTP."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quantmint.eval import prompts
from quantmint.eval.canary import CanaryPolicy
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.serving.running.server import HOST, RunningServer
from quantmint.pipeline.stages.canary import CanaryStage, policy_of, read_answers, read_comparison
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import LOCATION
from quantmint.pipeline.stages.stage import Job, Output

TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
VOCABULARY, PROMPTS = 40, 5

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


@dataclass
class Model:
    """Logits that follow from the tokens alone, and ``noise`` times others; ``spoil`` changes what is sent."""

    noise: float = 0.0
    spoil: Callable[[list[Any]], object] = lambda positions: None
    status: int = 200
    refusal: str = ""
    healthy: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def positions(self, ids: list[int], likeliest: int) -> list[Any]:
        found: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            # Token numbers are those of a larger vocabulary: the one that follows is listed whatever it is.
            generator, other = np.random.RandomState(ids[place]), np.random.RandomState(ids[place] + 10**6)
            logits = 3 * generator.standard_normal(VOCABULARY) + self.noise * other.standard_normal(VOCABULARY)
            logprobs = logits - np.log(np.exp(logits).sum())
            order = np.argsort(-logprobs)[:likeliest].tolist()
            listed = {str(token): {"logprob": -25.0, "rank": 99, "decoded_token": "?"}} if token >= VOCABULARY else {}
            for rank, number in enumerate([*order, *([] if token >= VOCABULARY else [token])], start=1):
                listed[str(number)] = {"logprob": float(logprobs[number]), "rank": rank, "decoded_token": "?"}
            found.append(listed)
        self.spoil(found)
        return found


@pytest.fixture
def serve() -> Iterator[Callable[[Model], RunningServer]]:
    running: list[ThreadingHTTPServer] = []

    def start(model: Model) -> RunningServer:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200 if model.healthy else 503, "")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.bodies.append({**body, "path": self.path})
                positions = model.positions(body["prompt"], body["prompt_logprobs"])
                answer = json.dumps({"choices": [{"index": 0, "prompt_logprobs": positions}]})
                self.answer(model.status, model.refusal or answer)

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((HOST, 0), Handler)
        running.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return RunningServer("m", f"http://{HOST}:{server.server_port}", None, 0.0)

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ask(
    setting: Setting, tmp_path: Path, serve: Callable[[Model], RunningServer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Output]:
    """Run a stage of the canary on a stand-in; the candidate's is given what the baseline's has left."""
    few = (prompts.FOLDER / "tiny.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:PROMPTS]
    (tmp_path / "tiny.jsonl").write_text("".join(few), encoding="utf-8")
    monkeypatch.setattr(prompts, "FOLDER", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, Path("model") / name)
    here = setting

    def run(side: str, model: Model, *, changed: Setting | None = None) -> Output:
        folder = tmp_path / side
        folder.mkdir(exist_ok=True)
        (folder / LOCATION).write_text(json.dumps({"folder": str(Path("model").resolve())}))
        entry = SimpleNamespace(stage="source", path=folder, file=lambda name: folder / name)
        inputs = {"model": entry, "baseline": SimpleNamespace(path=tmp_path / "baseline")}
        servers = SimpleNamespace(get=lambda side, plan: serve(model))
        told = PlainReporter()
        return CanaryStage(side).run(Job(changed or here, folder, inputs, told, servers))  # type: ignore[arg-type]

    return run


def test_the_baseline_reads_every_prompt_alone(ask: Any, tmp_path: Path) -> None:
    model = Model()
    output = ask("baseline", model)
    texts = prompts.parse(tmp_path / "tiny.jsonl")
    assert len(model.bodies) == len(texts)
    for body in model.bodies:
        assert body["path"] == "/v1/completions"
        assert (body["model"], body["max_tokens"], body["temperature"], body["prompt_logprobs"]) == ("m", 1, 0, 20)
        assert all(isinstance(token, int) for token in body["prompt"])
    answers = read_answers(tmp_path / "baseline")
    assert [answer.prompt for answer in answers.answers] == [prompt.name for prompt in texts]
    assert sorted(list(answer.ids) for answer in answers.answers) == sorted(body["prompt"] for body in model.bodies)
    first = answers.answers[0]
    assert {len(position) for position in first.tokens} == {20}
    assert all(list(row) == sorted(row, reverse=True) for row in first.logprobs)
    assert output.result["positions"] == sum(len(answer.ids) - 1 for answer in answers.answers)
    assert output.summary.startswith("5 prompts, ")


def test_a_candidate_is_given_the_tokens_of_the_baseline(ask: Any, tmp_path: Path) -> None:
    baseline, candidate = Model(), Model(noise=0.1)
    ask("baseline", baseline)
    for path in Path("model").glob("tokenizer*"):
        path.unlink()
    output = ask("candidate", candidate)
    assert [body["prompt"] for body in candidate.bodies] == [body["prompt"] for body in baseline.bodies]
    canary = read_comparison(tmp_path / "candidate")
    assert output.result == {"verdict": "PASS", "reasons": [], "agreement": canary.agreement, "kl": canary.kl}
    assert canary.agreement > 0.9
    assert output.summary == f"PASS: top-1 agreement {canary.agreement:.1%}, KL {canary.kl:.3g} nats"


def test_a_broken_candidate_fails_by_the_recipe_s_limits(
    ask: Any, setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    ask("baseline", Model())
    broken = ask("candidate", Model(noise=6.0))
    assert broken.result["verdict"] == "FAIL"
    assert "agreement below 70.0% by its whole interval" in broken.result["reasons"][0]
    assert "the canary stops this checkpoint: " in capsys.readouterr().err
    gate = setting.recipe.gate
    lenient = gate.model_copy(update={"canary": gate.canary.model_copy(update={"min_agreement": 0.0, "max_kl": 50.0})})
    loaded = replace(setting.loaded, recipe=setting.recipe.model_copy(update={"gate": lenient}))
    changed = replace(setting, loaded=loaded)
    assert policy_of(changed) == CanaryPolicy(0.0, 50.0)
    assert ask("candidate", Model(noise=6.0), changed=changed).result["verdict"] == "PASS"


def test_a_clear_candidate_reads_a_quarter_of_the_prompts(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound or broken; one that is near the limit reads them all."""
    monkeypatch.setattr("quantmint.eval.canary._FEWEST_PROMPTS", 2)
    ask("baseline", Model())
    near = Model(noise=2.0)
    for model, prompts_read in ((Model(noise=0.01), 2), (Model(noise=30.0), 2), (near, PROMPTS)):
        ask("candidate", model)
        assert len(model.bodies) == prompts_read == read_comparison(tmp_path / "candidate").prompts


def put(value: object) -> Callable[[list[Any]], object]:
    """Give the likeliest token of the second position another log probability."""

    def spoil(positions: list[Any]) -> None:
        next(iter(positions[1].values()))["logprob"] = value

    return spoil


@pytest.mark.parametrize(
    "broken",
    [
        Model(status=500),
        Model(status=400, refusal='{"error": {"message": "Out of range float values are not JSON compliant"}}'),
        Model(spoil=put(None)),
        Model(spoil=put(math.nan)),
        Model(spoil=put(-math.inf)),
    ],
    ids=["error 500", "vLLM's 400", "null", "NaN", "-inf"],
)
def test_a_candidate_that_computes_no_numbers_fails(ask: Any, broken: Model, tmp_path: Path) -> None:
    ask("baseline", Model())
    output = ask("candidate", broken)
    assert output.result["verdict"] == "FAIL"
    assert output.result["reasons"][0].startswith("no finite log probability for 5 of 5 prompts")
    assert len(read_comparison(tmp_path / "candidate").unanswered) == 5
