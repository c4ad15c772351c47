"""The base of agentrl's HTTP servers: sockets, access control and limits."""
