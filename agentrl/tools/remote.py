"""The workers of a tool server, as their driver sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

from agentrl.errors import ToolServerError
from agentrl.http import HttpClient
from agentrl.tools.serving.sticky import worker_of


class RemoteWorkers:
    """A client for each of them. Belongs to one event loop.

    Args:
        url: of any of them.
        token: the bearer token, if they ask for one.
    """

    def __init__(self, url: str, token: str):
        self._url, self._token = url, token
        self._clients = [HttpClient(url, token=token, error=ToolServerError)]

    def spread(self, ports: Sequence[int]) -> None:
        """From now on an episode's requests go to the worker it stays with.

        Args:
            ports: where the workers listen, by number; none where there is but one.
        """
        url = urlsplit(self._url)
        host = url.netloc.rpartition("@")[2].removesuffix(f":{url.port}")
        urls = [url._replace(netloc=f"{host}:{port}").geturl() for port in ports] or [self._url]
        have = {c.base_url: c for c in self._clients}
        self._clients = [
            have.get(u) or HttpClient(u, token=self._token, error=ToolServerError) for u in urls
        ]

    def of(self, episode_id: str) -> HttpClient:
        """The client of the worker that an episode stays with."""
        if len(self._clients) == 1:
            return self._clients[0]
        return self._clients[worker_of(episode_id, len(self._clients))]

    async def aclose(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(c.aclose() for c in self._clients))
