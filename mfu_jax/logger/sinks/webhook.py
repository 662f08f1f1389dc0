"""A sink that tells a chat: a hang, a loss that is not finite, a fall of the MFU, the end."""

from __future__ import annotations

import http.client
import json
import logging
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import deque

from mfu_jax.errors import UserError, one_line
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary, fall_of
from mfu_jax.logger.sinks.base import Sink, register_sink
from mfu_jax.util.formatting import counted, percent

_log = logging.getLogger("mfu_jax")

FALL = 0.2
_WINDOW, _KEPT = 16, 512  # steps whose median is compared with the upper quartile of those before
_TIMEOUT_SECONDS, _AGAIN_SECONDS = 3.0, 0.5  # for an answer; once there was none


@register_sink("webhook")
class WebhookSink(Sink):
    """Posts ``{"text": …}``, as Slack, Mattermost and Discord (its URL + ``/slack``) take it.

    A server that does not answer costs this sink's thread 3 s once, then 0.5 s a message; such a
    message is dropped.

    Args:
        url: where to; it is a secret, so no log shows it.
        run: the run's name, with which every message begins.

    Raises:
        UserError: `url` is no address of the web.
    """

    keeps_every_step = True

    def __init__(self, url: str, *, run: str = "") -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            self._host = parts.hostname if parts.port != 0 else None
        except ValueError:  # brackets, or a port that is no number
            self._host = None
        if not self._host or not url.startswith(("https://", "http://")):
            raise UserError(
                "webhook_url is no address of the web; expected https://HOST/PATH",
                hint="usually a variable of the environment that is not set",
            )
        self._url, self._run = url, run
        self._mfu: deque[float] = deque(maxlen=_KEPT)
        self._has_fallen = self._is_not_finite = self._has_failed = self._has_warned = False

    def write(self, record: StepRecord) -> None:
        loss = record.scalars.get("learning/loss", 0.0)
        if not math.isfinite(loss) and not self._is_not_finite:
            self._post(f"the loss of step {record.step} is {loss}")
        self._is_not_finite = not math.isfinite(loss)
        mfu = record.scalars.get("perf/mfu", math.nan)
        if record.kind == "step" and not record.flags and math.isfinite(mfu):
            self._mfu.append(mfu)
            usual, now = fall_of(self._mfu, _WINDOW)
            if now < (1 - FALL) * usual and not self._has_fallen:  # told once, until it is back
                fallen = f"MFU has fallen from {percent(usual)} to {percent(now)}"
                self._post(f"{fallen} in the last {_WINDOW} steps, up to step {record.step}")
                self._has_fallen = True
            elif now >= (1 - FALL / 2) * usual:
                self._has_fallen = False

    def write_alarm(self, text: str) -> None:
        self._post(text)

    def write_failure(self, reason: str) -> None:
        self._has_failed = True
        self._post(f"the loop ended with {reason}")

    def write_summary(self, summary: Summary) -> None:
        if not self._has_failed:
            verdict = f": {summary.verdict.sentence}" if summary.verdict else ""
            self._post(f"done after {counted(summary.steps, 'measured step')}{verdict}")

    def _post(self, text: str) -> None:
        content = json.dumps({"text": f"{self._run}: {text}" if self._run else text}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, content, headers)
        seconds = _AGAIN_SECONDS if self._has_warned else _TIMEOUT_SECONDS
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
        # An HTTPException, as of a server that is none of the web, is no OSError.
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._has_warned:
                self._has_warned = True
                why = one_line(str(getattr(error, "reason", None) or error))
                _log.warning("the webhook at %s is not told: %s; said once", self._host, why)
