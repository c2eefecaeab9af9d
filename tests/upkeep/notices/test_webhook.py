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
from quantmint.pipeline.upkeep import notices
from quantmint.pipeline.upkeep.fleet.records import Ended
from quantmint.pipeline.upkeep.notices import Notices, host_of
from tests.upkeep.notices.receiver import Receiver

Make = Callable[..., Ended]
SECRET = "s3cr3t"


def hook(address: str, told: list[str], secret: str = SECRET) -> Notices:
    environ = {"QUANTMINT_WEBHOOK": address, "QUANTMINT_WEBHOOK_SECRET": secret}
    return Notices(Path("no-store"), None, told.append, environ)


def test_a_notice_is_json_that_the_receiver_can_hold_against_the_secret(receiver: Receiver, ended: Make) -> None:
    told: list[str] = []
    with closing(hook(receiver.address, told)) as notify:
        notify(ended(verdict="PASS", tag="v3", places=({"folder": "/srv"},), reason="Ü"))
    (got,) = receiver.deliveries
    expected = "sha256=" + hmac.new(SECRET.encode(), got.body, hashlib.sha256).hexdigest()
    assert got.headers["X-Quantmint-Signature"] == expected
    assert got.headers["Content-Type"] == "application/json"
    assert got.headers["X-Quantmint-Delivery"] == got.json["id"]
    assert (got.json["schema"], got.json["event"]) == (2, "finished")
    assert (got.json["recipe"], got.json["verdict"], got.json["reason"]) == ("tiny", "PASS", "Ü")
    assert told == []


def test_without_a_secret_nothing_is_signed(receiver: Receiver, ended: Make) -> None:
    with closing(hook(receiver.address, [], secret="")) as notify:
        notify(ended())
    assert "X-Quantmint-Signature" not in receiver.deliveries[0].headers


def test_what_the_documentation_lists_is_what_is_sent(receiver: Receiver, ended: Make) -> None:
    with closing(hook(receiver.address, [])) as notify:
        notify(ended())
    page = (Path(__file__).parents[3] / "docs/notices.md").read_text(encoding="utf-8")
    fields = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "`quantmint_" not in line}
    assert set(receiver.deliveries[0].json) == fields
    example = json.loads(page.split("```json\n")[1].split("```")[0])
    assert list(example) == list(receiver.deliveries[0].json)


@pytest.mark.parametrize("answer", [(503, {}), (429, {}), None])
def test_a_fault_that_passes_is_waited_out(
    receiver: Receiver, ended: Make, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, dict[str, str]] | None
) -> None:
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.3 if answer is None else 10)
    receiver.answers.append(answer)
    told: list[str] = []
    with closing(hook(receiver.address, told)) as notify:
        notify(ended())
        first, second = receiver.wait_for(2)
    assert first.body == second.body  # the same identity: a receiver can tell that it is the same
    assert told == []


@pytest.mark.parametrize("status", [301, 307, 404])
def test_what_does_not_pass_is_told_at_once_by_the_host_alone(receiver: Receiver, ended: Make, status: int) -> None:
    receiver.answers.append((status, {"Location": f"http://127.0.0.1:{receiver.port}/elsewhere"}))
    told: list[str] = []
    with closing(hook(receiver.address, told)) as notify:
        notify(ended("first"))
        notify(ended("second"))
    assert [delivery.path for delivery in receiver.deliveries] == ["/hook/s3cr3t-path"] * 2  # no redirect was followed
    (line,) = told
    assert line == f"the webhook at 127.0.0.1:{receiver.port} answered {status}: the notice on first is lost"


@pytest.mark.parametrize(
    "address",
    [
        "ftp://h/s3cr3t",
        "https://h:99999/s3cr3t",
        "https://a@h/s3cr3t",
        "https://h/s3cr3t\x00",
        "https:///s3cr3t",
        "https://h:s3cr3t/",
    ],
)
def test_an_address_that_is_none_is_refused_without_being_shown(address: str) -> None:
    with pytest.raises(UserError, match="QUANTMINT_WEBHOOK") as caught:
        host_of(address)
    assert "s3cr3t" not in str(caught.value)


def test_a_receiver_that_is_away_costs_its_notice(ended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "FIRST_WAIT_S", 0.001)
    told: list[str] = []
    with closing(hook("http://127.0.0.1:1/s3cr3t", told)) as notify:
        notify(ended())
    assert told == ["the webhook at 127.0.0.1:1 cannot be reached: ConnectError: the notice on tiny is lost"]


def test_a_receiver_that_hangs_holds_up_neither_a_round_nor_its_end(
    receiver: Receiver, ended: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "CLOSE_S", 0.1)
    receiver.answers.append(None)
    told: list[str] = []
    notify = hook(receiver.address, told)
    begun = time.monotonic()
    notify(ended("first"))
    receiver.wait_for(1)
    notify(ended("second"))
    notify.close()
    assert time.monotonic() - begun < 5  # the receiver would hang for longer
    assert told == [
        f"the webhook at 127.0.0.1:{receiver.port} took too long at the end of the round: 2 notices are lost"
    ]


def test_what_was_current_is_no_notice(receiver: Receiver, ended: Make) -> None:
    with closing(hook(receiver.address, [])) as notify:
        notify(ended(state="current"))
        notify(ended(state="failed", exit_code=5))
        notify(ended(state="held", exit_code=1))
    assert [delivery.json["state"] for delivery in receiver.deliveries] == ["failed", "held"]
