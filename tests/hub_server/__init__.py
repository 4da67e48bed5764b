"""A hub of our own, on two loopback ports, spoken to by the unmodified `huggingface_hub` client.

    with running_hub(tmp_path) as hub:
        api = HfApi(endpoint=hub.url, token="hf_anna")
        hub.faults.add("commit", "drop_after", times=2)

Token `hf_<name>` is the user <name>, `hf_ro_<name>` the same with a read-only token. Kinds of
requests are in `app.py`, faults in `faults.py`. Source: spec hf-endpoints.md.
"""

from tests.hub_server.client import Faults, Hub
from tests.hub_server.environment import environment, hub_environment
from tests.hub_server.running import running_hub, spawned_hub

__all__ = ["Faults", "Hub", "environment", "hub_environment", "running_hub", "spawned_hub"]
