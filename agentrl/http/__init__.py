"""The HTTP client for tools, engines, judges and simulated users."""

from agentrl.http.client import HttpClient, fetch, fetch_json

__all__ = ["HttpClient", "fetch", "fetch_json"]
