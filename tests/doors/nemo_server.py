"""One resources server of NeMo Gym, without its head server: `PYTHON nemo_server.py NAME PORT`.

This runs in the Python of the package. `NAME` is a folder of the package `resources_servers`. The
server is built as its own `run_webserver` builds it. Fields of its config may follow as JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import DictConfig


def main() -> None:
    """Serve until the process is ended."""
    name, port, *rest = sys.argv[1:]
    module = importlib.import_module(f"resources_servers.{name}.app")
    own = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
    ]
    [server] = [
        c for c in own if issubclass(c, SimpleResourcesServer) and not inspect.isabstract(c)
    ]
    config = server.model_fields["config"].annotation
    assert config is not None and issubclass(config, BaseResourcesServerConfig)
    fields = {"host": "127.0.0.1", "port": int(port), "entrypoint": "app.py", "name": name}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=0),
        global_config_dict=DictConfig({}),
    )
    made = server(
        config=config(**fields, **json.loads(rest[0] if rest else "{}")), server_client=client
    )
    app = made.setup_webserver()
    made.setup_exception_middleware(app)
    uvicorn.run(app, host="127.0.0.1", port=int(port), timeout_keep_alive=30, access_log=False)


if __name__ == "__main__":
    main()
