"""Tools over HTTP: the server, and its processes."""
