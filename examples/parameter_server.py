"""Training with a parameter server: handwritten digits, one server or several, N workers.

Each worker has a part of the images. It pulls the model, computes a gradient on a batch, and
pushes it without waiting. When gradients are applied, and how long a pull waits, is up to the
consistency: with "async" each is applied as it comes, and nobody waits; with "ssp" no worker is
more than `ahead` steps ahead of the slowest; with "bsp" all gradients of a step are applied
together, as one update, before anybody begins the next. How many updates came between the pull
behind a gradient and its own update, is its staleness.

$ python -m mpiml.run -n 4 --progress examples/parameter_server.py
...
[worker/0] accuracy 0.9... on 360 held-out images
[worker/0] 3000 gradients, 3000 updates at .../s, mean staleness ...

$ python -m mpiml.run -n 4 examples/parameter_server.py --consistency ssp --ahead 2
[worker/0] accuracy 0.9... on 360 held-out images
[worker/0] 3000 gradients, 3000 updates at .../s, mean staleness ...

$ python -m mpiml.run -n 4 examples/parameter_server.py --consistency bsp --shards 2
[worker/0] accuracy 0.9... on 360 held-out images
[worker/0] 2000 gradients, 1000 updates at .../s, mean staleness 0.0

$ python -m mpiml.run examples/parameter_server.py --workers 2 --steps 800
[worker/0] accuracy 0.9... on 360 held-out images
[worker/0] 1600 gradients, 1600 updates at .../s, mean staleness ...
"""

import time
from typing import Literal

import numpy as np
from synchronous import forward, initial_model, load, loss_and_gradient

import mpiml
from mpiml.collectives import allreduce
from mpiml.consistency import SSP
from mpiml.optim import SGD

BATCH = 32


def work(server, clocks, steps):
    me = mpiml.context()
    images, labels = (part[me.index :: me.replicas] for part in load()[0])
    start = time.perf_counter()
    for step in range(steps):
        model, version = server.pull()
        chosen = me.rng.integers(len(labels), size=BATCH)
        loss, gradient = loss_and_gradient(model, images[chosen], labels[chosen])
        pushed = server.futures.push(gradient, version)
        if clocks:
            server.futures.clock()
        me.report(step + 1, steps, loss=loss)
    pushed.result()  # gradients of one worker arrive in order, so the others have too
    slowest = allreduce(np.array(time.perf_counter() - start), "max")  # all are here
    if me.index == 0:
        finish(server, slowest)


def finish(server, seconds):
    model, version = server.pull()
    _, (images, labels) = load()
    accuracy = (forward(model, images)[1].argmax(axis=1) == labels).mean()
    print(f"accuracy {accuracy:.3f} on {len(labels)} held-out images")
    done = server.statistics()
    staleness = sum(n * count for n, count in done["staleness"].items()) / done["pushes"]
    print(
        f"{done['pushes']} gradients, {version} updates at {version / seconds:.0f}/s, "
        f"mean staleness {staleness:.1f}"
    )


def build(
    workers: int = mpiml.FILL,
    steps: int = 1000,
    learning_rate: float = 0.1,
    consistency: Literal["async", "ssp", "bsp"] = "async",
    ahead: int = 4,  # of "ssp"
    shards: int = 1,
) -> mpiml.Program:
    ssp = consistency == "ssp"
    node = mpiml.ParameterServerNode(
        lambda: initial_model(np.random.default_rng(0)),  # called on the servers only
        SGD(learning_rate),
        SSP(ahead) if ssp else consistency,
        shards=shards,
    )
    program = mpiml.Program("parameter server")
    server = program.add_node(node, label="server")
    program.add_node(mpiml.PyNode(work, server, ssp, steps), label="worker", replicas=workers)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
