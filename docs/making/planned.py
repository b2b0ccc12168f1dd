"""The plan of a network for the README's picture, made and stored: python docs/making/planned.py.

The picture (picture.py) is drawn from the file, so that drawing needs no planning. Times are simulated from the
catalogue's estimates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "drawings" / "desk.json"
NETWORK, BATCH_SIZE = "vgg16", 4
CLUSTER = {
    "name": "desk",
    "devices": [{"name": "laptop", "kind": "laptop"}, {"kind": "pi5", "count": 3}],
    "link": {"rate": "1 Gbit/s", "delay": "0.3 ms"},
}


def found() -> dict[str, Any]:
    """Return the plan, each layer's multiply-accumulates, and one simulated step."""
    import manyhands as mh
    from manyhands.plans.networks import load_network

    cluster = mh.Cluster.from_dict(CLUSTER)
    network = load_network(NETWORK)
    planned = mh.plan(network, cluster, batch_size=BATCH_SIZE)
    result = mh.simulate(planned.plan, network, cluster)
    alone = {}
    for device in ({"name": "laptop", "kind": "laptop"}, {"name": "pi5", "kind": "pi5"}):
        only = mh.Cluster.from_dict({**CLUSTER, "devices": [device]})
        alone[device["name"]] = mh.simulate(mh.plan(network, only, batch_size=BATCH_SIZE).plan, network, only).seconds
    spans = [
        {"device": span.device, "start": round(span.start, 4), "end": round(span.end, 4), "kind": span.kind}
        for span in result.spans
        if span.track == "compute"
    ]
    return {
        "command": f"manyhands plan -m {NETWORK} -c docs/drawings/desk.yaml -b {BATCH_SIZE}",
        "network": network.name, "input": network.input_text, "batch_size": BATCH_SIZE,
        "cluster": CLUSTER, "devices": list(cluster.names), "plan": planned.plan.to_dict(),
        "layers": [{"name": layer.name, "macs": layer.macs} for layer in network.layers],
        "seconds": result.seconds, "alone_seconds": alone, "spans": spans,
    }  # fmt: skip


if __name__ == "__main__":
    import yaml

    FILE.write_text(json.dumps(found(), indent=1) + "\n")
    FILE.with_suffix(".yaml").write_text(yaml.safe_dump(CLUSTER, sort_keys=False))
    print(f"wrote {FILE} and {FILE.with_suffix('.yaml')}")
