"""The Model Context Protocol: tools of MCP servers, and agentrl as an MCP server (extra `mcp`)."""
