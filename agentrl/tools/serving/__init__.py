"""Tools behind HTTP: the server, who may speak to it, and the processes it runs in."""
