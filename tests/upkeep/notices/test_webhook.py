from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.upkeep.fleet.events import Event
from quantmint.pipeline.upkeep.notices import Webhook, host_of, outlets
from tests.upkeep.notices.receiver import Receiver

Make = Callable[..., Event]
SECRET = b"s3cr3t"


def hook(receiver: Receiver, told: list[str], **options: object) -> Webhook:
    return Webhook(receiver.address, warn=told.append, **{"secret": SECRET, "first_wait_s": 0.01, **options})  # type: ignore[arg-type]


def test_a_notice_is_json_that_the_receiver_can_hold_against_the_secret(receiver: Receiver, event: Make) -> None:
    told: list[str] = []
    with closing(hook(receiver, told)) as sent:
        sent.send(event(state="ran", verdict="PASS", exit_code=0, tag="v3", places=({"folder": "/srv"},), reason="Ü"))
    (got,) = receiver.deliveries
    assert got.headers["X-Quantmint-Signature"] == "sha256=" + hmac.new(SECRET, got.body, hashlib.sha256).hexdigest()
    assert got.headers["Content-Type"] == "application/json"
    assert got.headers["X-Quantmint-Event"] == got.json["event"] == "finished"
    assert got.headers["X-Quantmint-Delivery"] == got.json["id"]
    assert got.json["schema"] == 1
    assert (got.json["recipe"], got.json["verdict"], got.json["reason"]) == ("tiny", "PASS", "Ü")
    assert told == []


def test_what_the_documentation_lists_is_what_is_sent(receiver: Receiver, event: Make) -> None:
    with closing(hook(receiver, [])) as sent:
        sent.send(event())
    page = (Path(__file__).parents[3] / "docs/notices.md").read_text(encoding="utf-8")
    fields = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "`quantmint_" not in line}
    assert set(receiver.deliveries[0].json) == fields
    example = json.loads(page.split("```json\n")[1].split("```")[0])
    assert list(example) == list(receiver.deliveries[0].json)


@pytest.mark.parametrize("answer", [(503, {}), (429, {}), None])
def test_a_fault_that_passes_is_waited_out(
    receiver: Receiver, event: Make, answer: tuple[int, dict[str, str]] | None
) -> None:
    receiver.answers.append(answer)
    told: list[str] = []
    with closing(hook(receiver, told, timeout_s=0.2 if answer is None else 10)) as sent:
        sent.send(event())
        first, second = receiver.wait_for(2)
    assert first.body == second.body  # the same identity: a receiver can tell that it is the same
    assert told == []


@pytest.mark.parametrize("status", [301, 307, 404])
def test_what_does_not_pass_is_told_at_once_by_the_host_alone(receiver: Receiver, event: Make, status: int) -> None:
    receiver.answers.extend([(status, {"Location": f"http://127.0.0.1:{receiver.port}/elsewhere"})] * 2)
    told: list[str] = []
    with closing(hook(receiver, told)) as sent:
        sent.send(event())
        sent.send(event())
        sent.send(event())
    assert len(receiver.deliveries) == 3
    assert {one.path for one in receiver.deliveries} == {"/hook/s3cr3t-path"}  # no redirect was followed
    (line,) = told  # once, and not again for the second
    assert f"127.0.0.1:{receiver.port} answered {status}" in line
    assert "s3cr3t" not in line


@pytest.mark.parametrize(
    "given",
    ["ftp://h/s3cr3t", "https://h:99999/s3cr3t", "https://a@h/s3cr3t", "https://h/s3cr3t\x00", "https:///s3cr3t"],
)
def test_an_address_that_is_none_is_refused_without_being_shown(given: str) -> None:
    with pytest.raises(UserError, match="QUANTMINT_WEBHOOK") as caught:
        host_of(given)
    assert "s3cr3t" not in str(caught.value)


def test_a_receiver_that_stays_away_is_told_once(event: Make) -> None:
    told: list[str] = []
    with closing(Webhook("http://127.0.0.1:1/s3cr3t", secret=None, warn=told.append, first_wait_s=0.001)) as sent:
        sent.send(event())
        sent.send(event())
    (line,) = told
    assert "127.0.0.1:1 cannot be reached: Connection refused" in line
    assert "s3cr3t" not in line


def test_a_receiver_that_hangs_holds_up_neither_a_round_nor_its_end(receiver: Receiver, event: Make) -> None:
    receiver.answers.append(None)
    told: list[str] = []
    sent = hook(receiver, told)
    begun = time.monotonic()
    sent.send(event(recipe="first"))
    receiver.wait_for(1)
    sent.send(event(recipe="second"))
    sent.close(0.1)
    assert time.monotonic() - begun < 5  # the receiver would hang for longer
    assert told == [f"the webhook at 127.0.0.1:{receiver.port} is too slow: what waited did not reach it"]


def test_the_environments_address_gets_what_somebody_acts_on(receiver: Receiver, event: Make, tmp_path: Path) -> None:
    told: list[str] = []
    environ = {"QUANTMINT_WEBHOOK": receiver.address, "QUANTMINT_WEBHOOK_SECRET": "s3cr3t"}
    with outlets(tmp_path, warn=told.append, environ=environ) as hear:
        for kind, fields in (
            ("queued", {}),
            ("waiting", {}),
            ("started", {}),
            ("stage", {"stage": "1/9 source"}),
            ("finished", {"state": "current"}),
            ("finished", {"state": "failed"}),
        ):
            hear(event(kind, **fields))
    got = [(one.json["event"], one.json["state"]) for one in receiver.deliveries]
    assert got == [("queued", None), ("started", None), ("finished", "failed")]
    assert all("X-Quantmint-Signature" in one.headers for one in receiver.deliveries)
    assert told == []
