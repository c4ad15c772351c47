"""Tools over HTTP: the server, its access control and its processes."""
