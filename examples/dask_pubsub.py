"""The parameter server that Dask's users sketched with Pub and Sub, in topics.

In https://github.com/dask/dask-ml/issues/171 the server subscribes to "updates" and publishes
"parameters"; workers subscribe to the parameters and publish updates. Peers talk directly, and
nobody asks a scheduler. Here a worker gets the newest parameters only, and no update is lost:
a worker waits where the server is eight behind. The server decides when it is enough and
returns; that ends the workers' iteration. docs/coming-from.md has the old code beside it.

$ python -m mpiml.run -n 4 examples/dask_pubsub.py
[server/0] accuracy 0.9... on 360 held-out images
[server/0] 3000 updates at .../s, mean staleness ...

$ python -m mpiml.run --threads 2 examples/dask_pubsub.py --updates 1600
[server/0] accuracy 0.9... on 360 held-out images
[server/0] 1600 updates at .../s, mean staleness ...

$ python -m mpiml.run --threads 1 examples/dask_pubsub.py --updates 1000
[server/0] accuracy 0.9... on 360 held-out images
[server/0] 1000 updates at .../s, mean staleness 0.0
"""

import time

from synchronous import forward, initial_model, load, loss_and_gradient

import mpiml

BATCH = 32


def serve(updates, parameters, wanted, learning_rate):
    model = initial_model(mpiml.context().rng)
    version = staleness = 0
    start = time.perf_counter()
    parameters.put((version, model))
    for seen, gradient in updates:
        for name, value in gradient.items():
            model[name] -= learning_rate * value
        staleness += version - seen
        version += 1
        if version == wanted:
            break
        parameters.put((version, model))  # what is put is a copy
    seconds = time.perf_counter() - start

    _, (images, labels) = load()
    accuracy = (forward(model, images)[1].argmax(axis=1) == labels).mean()
    print(f"accuracy {accuracy:.3f} on {len(labels)} held-out images")
    print(
        f"{version} updates at {version / seconds:.0f}/s, "
        f"mean staleness {staleness / version:.1f}"
    )


def work(parameters, updates):
    me = mpiml.context()
    images, labels = (part[me.index :: me.replicas] for part in load()[0])
    for version, model in parameters:  # ends when the server has returned
        chosen = me.rng.integers(len(labels), size=BATCH)
        _, gradient = loss_and_gradient(model, images[chosen], labels[chosen])
        updates.put((version, gradient))


def build(
    workers: int = mpiml.FILL, updates: int = 3000, learning_rate: float = 0.1
) -> mpiml.Program:
    program = mpiml.Program("dask pubsub")
    parameters = program.topic("parameters", policy="latest")
    gradients = program.topic("updates", policy=mpiml.Keep(8, on_full="block"))
    server = mpiml.PyNode(
        serve, gradients.subscriber(), parameters.publisher(), updates, learning_rate
    )
    program.add_node(server, label="server")
    worker = mpiml.PyNode(work, parameters.subscriber(), gradients.publisher())
    program.add_node(worker, label="worker", replicas=workers)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
