"""The webhook: a server on this machine gets a chat's messages; its death costs nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.instrumentation.assembly import sinks_of
from mfu_jax.logger.records.summary import Summary
from mfu_jax.settings import Settings
from mfu_jax.sinks import StepRecord, make_sink


class Chat(HTTPServer):
    """Keeps what is posted to it, in Slack's form."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.texts: list[str] = []
        self.answer = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T0/SECRET"


class _Handler(BaseHTTPRequestHandler):
    server: Chat

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert list(content) == ["text"]
        self.server.texts.append(content["text"])
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def chat() -> Iterator[Chat]:
    with Chat() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def record(step: int, *, mfu: float = 0.4, loss: float = 3.0, kind: str = "step") -> StepRecord:
    scalars = {"perf/mfu": mfu, "learning/loss": loss}
    return StepRecord(step=step, kind=kind, unix_seconds=1.0, scalars=scalars)


def test_a_fall_is_told_once_and_again_after_it_was_over(chat: Chat) -> None:
    sink = make_sink("webhook", chat.url, run="a on host")
    speeds = [0.5] * 40 + [0.41] * 40 + [0.39] * 200 + [0.5] * 40 + [0.3] * 40
    for step, mfu in enumerate(speeds):
        sink.write(record(step, mfu=mfu))
    assert chat.texts == [
        "a on host: MFU has fallen from 50.0% to 39.0% in the last 16 steps, up to step 88",
        "a on host: MFU has fallen from 41.0% to 30.0% in the last 16 steps, up to step 328",
    ]


def test_a_loss_that_is_not_finite_is_told_when_it_begins(chat: Chat) -> None:
    sink = make_sink("webhook", chat.url)
    for step, loss in enumerate([1.0, float("nan"), float("nan"), 1.0, float("inf")]):
        sink.write(record(step, loss=loss))
    assert chat.texts == ["the loss of step 1 is nan", "the loss of step 4 is inf"]


def test_the_end_is_told_as_done_or_with_its_exception(chat: Chat) -> None:
    sink = make_sink("webhook", chat.url)
    sink.write_summary(Summary(steps=7))
    sink.write_failure("ValueError('no')")
    sink.write_summary(Summary(steps=7))
    assert chat.texts == ["done after 7 measured steps", "the loop ended with ValueError('no')"]


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks.slack.com/x", "file:///etc/passwd", "https://"),
        *("http://[passwd", "http://h:passwd/"),
    ],
)
def test_what_is_no_address_of_the_web_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="expected https://HOST/PATH") as error:
        make_sink("webhook", url)
    assert "passwd" not in str(error.value)


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/SECRET"


def test_a_server_that_is_down_hangs_or_refuses_costs_one_warning_and_no_record(
    chat: Chat, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_jax.logger.sinks.webhook._TIMEOUT_SECONDS", 0.2)
    chat.answer = 404
    with black_hole() as hanging:
        for url in (chat.url, hanging, "http://127.0.0.1:1/SECRET"):
            caplog.clear()
            sink = make_sink("webhook", url)
            began = time.monotonic()
            for _ in range(3):
                sink.write_alarm("help")
            assert time.monotonic() - began < 5
            (line,) = caplog.messages
            assert line.startswith("the webhook at 127.0.0.1 is not told: ")
            assert "SECRET" not in line


def test_a_server_that_is_none_of_the_web_costs_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                with server.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        sink = make_sink("webhook", f"http://127.0.0.1:{server.getsockname()[1]}/SECRET")
        for _ in range(2):
            sink.write_alarm("help")
        thread.join()
    (message,) = caplog.messages
    assert message.startswith("the webhook at 127.0.0.1 is not told: SSH-2.0-OpenSSH")
    assert "\n" not in message


def test_a_run_folder_with_a_slash_at_its_end_has_its_name(chat: Chat, tmp_path: Path) -> None:
    settings = Settings(run_dir=f"{tmp_path}/a/", webhook_url=chat.url)
    for sink in sinks_of(settings):
        sink.write_alarm("help")
        sink.close()
    (text,) = chat.texts
    assert text.startswith("a on ")


def test_a_run_tells_of_its_hang_and_its_end_and_never_waits_for_the_server(
    chat: Chat, tmp_path: Path
) -> None:
    step = mfu_jax.instrument(
        jax.jit(lambda x: (x, {"loss": jnp.sum(x)})),
        run_dir=str(tmp_path / "a"),
        webhook_url=chat.url,
        hang_seconds=0.3,
        hang_factor=1.0,
        peak_tflops_per_device=1.0,
    )
    for _ in range(8):
        step(jnp.ones(3))[0].block_until_ready()
    deadline = time.monotonic() + 20
    while not chat.texts and time.monotonic() < deadline:
        time.sleep(0.05)  # the hang
    for _ in range(2):
        step(jnp.ones(3))
    step.close()
    hang, end = chat.texts
    assert hang.startswith("a on ")
    assert ": no step completed for " in hang
    assert "done after " in end
    for path in (tmp_path / "a").rglob("*"):
        assert path.is_dir() or b"SECRET" not in path.read_bytes()


def test_a_dead_server_does_not_slow_or_end_a_run(tmp_path: Path) -> None:
    with black_hole() as url:
        step = mfu_jax.instrument(
            jax.jit(lambda x: (x, {"loss": jnp.sum(x) * jnp.nan})),
            run_dir=str(tmp_path),
            webhook_url=url,
            peak_tflops_per_device=1.0,
        )
        began = time.monotonic()
        for _ in range(10):
            step(jnp.ones(3))
        assert time.monotonic() - began < 4  # of which most is the compilation
        summary = step.close()
    assert summary.steps + summary.warmup_steps + summary.compile_steps == 10
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10
