"""The Model Context Protocol: tools of its servers, and ours as such a server (the extra `mcp`)."""
