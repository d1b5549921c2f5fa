"""Actor processes under load: python -m tests.chaos.actor ENDPOINT FIRST CLIENTS BATCHES SIZE [RUN].

Opens CLIENTS clients, of the indices FIRST and on, and pushes BATCHES batches of SIZE actions through each, in turns.
The contents follow from index and number, so that the exact counts are known beforehand. Prints one JSON object a line:
{"sent": …} now and then, {"done": true, "sent": …, "durable": …} at the end.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import numpy.typing as npt

from cotuned.client import ActorClient
from cotuned.wire.protocol import DEFAULT_RUN

K = 11
PATIENCE = 120.0


def counts(index: int, number: int, size: int) -> npt.NDArray[np.int64]:
    """Counts a bin of batch `number` (from 1) of actor `index`."""
    rest = size // 2
    held = np.zeros(K, dtype=np.int64)
    held[(index + number) % K] = size - rest
    return held + np.bincount(np.arange(number, number + rest) % K, minlength=K)


def actions(index: int, number: int, size: int) -> npt.NDArray[np.uint8]:
    """The batch itself."""
    return np.repeat(np.arange(K, dtype=np.uint8), counts(index, number, size))


def main() -> None:
    """See the module."""
    endpoint, (first, n_clients, batches, size) = sys.argv[1], map(int, sys.argv[2:6])
    run = sys.argv[6] if len(sys.argv) > 6 else DEFAULT_RUN
    clients = [ActorClient(endpoint, run=run, actor=f"chaos-{first + i}", timeout=PATIENCE) for i in range(n_clients)]
    cycle = [[actions(first + i, number, size) for number in range(1, K * K + 1)] for i in range(n_clients)]
    for number in range(1, batches + 1):
        for client, prepared in zip(clients, cycle, strict=True):
            client.push(prepared[(number - 1) % (K * K)], step=number)
        if number % 200 == 0:
            print(json.dumps({"sent": number * n_clients}), flush=True)
    for client in clients:
        client.flush()
    durable = batches * n_clients - sum(client.unconfirmed for client in clients)
    print(json.dumps({"done": True, "sent": batches * n_clients, "durable": durable}), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
