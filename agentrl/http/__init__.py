"""HTTP to tools, engines, judges and simulated users.

`client` is for rollouts, `blocking` for code that is not async, `address` what both check.
"""

from agentrl.http.blocking import fetch, fetch_json
from agentrl.http.client import HttpClient

__all__ = ["HttpClient", "fetch", "fetch_json"]
