"""What is asked of `/generate` from the event loop; nobody's turn goes on for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

from agentrl.engine.server.answers import refusal
from agentrl.engine.server.process import Serving, look_for_death
from agentrl.errors import EngineError
from agentrl.http import HttpClient

ABORT_SECONDS = 10.0


class Requests:
    """Those that are under way at one server; all belong to one event loop."""

    def __init__(self, http: HttpClient, aside: HttpClient, process: Serving | None):
        """Ask nothing yet.

        Args:
            http: to the server.
            aside: another, whose requests do not wait for a place behind turns; with the admin key,
                without which SGLang aborts nothing.
            process: its own, where it is ours: a connection that breaks may be its death.
        """
        self._http, self._aside, self._process = http, aside, process
        self._aborts: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any], where: str, deadline: float, episode_id: str) -> Any:
        """One request's answer; what is not waited for any more is aborted.

        Args:
            body: of the request, less its id.
            where: for messages.
            deadline: of `time.monotonic`.
            episode_id: keeps an episode's turns together behind a router.

        Raises:
            EngineDead: the server, which is ours, ended.
            EngineError: it is refused, or there is no answer in time.
        """
        # SGLang aborts by prefix: ids of one length are no prefix of each other.
        rid = uuid.uuid4().hex
        answered = False
        try:
            # Sent again where an idle connection was closed at that moment; the server refuses an
            # id that it is at work on.
            status, answer = await self._http.request_json(
                "POST",
                "/generate",
                body | {"rid": rid},
                deadline=deadline,
                retries=1,
                headers={"x-smg-routing-key": episode_id},  # SGLang's router keeps it to a worker
            )
            answered = True
        except EngineError as e:
            if time.monotonic() < deadline:
                await look_for_death(self._process)
            raise type(e)(f"{where}: {e}") from None
        finally:
            if not answered:
                task = asyncio.create_task(self._abort(rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)
        if status != 200:
            error = refusal(status, answer, where)
            adapter = body.get("lora_path")
            # A server that was started anew forgot it: its fault, not the request's.
            raise EngineError(str(error)) if adapter and adapter in str(error) else error
        return answer

    async def check_health(self, deadline: float) -> None:
        """Have the scheduler sample a token, or show that it is sampling others.

        Raises:
            EngineError: it did not by then.
        """
        path = "/health_generate"
        status, answer = await self._aside.request_json("GET", path, deadline=deadline, retries=1)
        if status != 200:
            raise refusal(status, answer, path)

    async def _abort(self, rid: str) -> None:
        """Best effort: a server that does not hear it ends the turn at its limit."""
        with contextlib.suppress(EngineError):
            await self._aside.request_json(
                "POST",
                "/abort_request",
                {"rid": rid},
                deadline=time.monotonic() + ABORT_SECONDS,
            )
