"""Asynchronous training with a parameter server: handwritten digits, one server, N workers.

Each worker has a shard of the images. It pulls the model, computes a gradient on a batch,
pushes it and does not wait; the server applies each gradient as it comes. By then others may
have changed the model: how many times is the gradient's staleness, told by version numbers.

$ python -m mpiml.run -n 4 --progress examples/parameter_server.py
...
[server/0] accuracy 0.9... on 360 held-out images
[server/0] 3000 updates at .../s, loss ..., mean staleness ...

$ python -m mpiml.run examples/parameter_server.py --workers 2 --steps 800 --learning-rate 0.1
[server/0] accuracy 0.9... on 360 held-out images
[server/0] 1600 updates at .../s, loss ..., mean staleness ...
"""

import time

import numpy as np
from sklearn.datasets import load_digits

import mpiml

HIDDEN, CLASSES, BATCH = 64, 10, 32


def load():
    """Return images in [0, 1], (n, 64), and labels, (n,): to train with, then held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, train = order[:360], order[360:]
    return (images[train] / 16, labels[train]), (images[held_out] / 16, labels[held_out])


def initial_model(rng):
    w1 = rng.normal(scale=1 / 8, size=(64, HIDDEN))
    w2 = rng.normal(scale=1 / 8, size=(HIDDEN, CLASSES))
    return {"w1": w1, "b1": np.zeros(HIDDEN), "w2": w2, "b2": np.zeros(CLASSES)}


def forward(model, images):
    hidden = np.maximum(images @ model["w1"] + model["b1"], 0)  # (n, 64) -> (n, HIDDEN)
    return hidden, hidden @ model["w2"] + model["b2"]  # (n, HIDDEN) -> (n, CLASSES)


def loss_and_gradient(model, images, labels):
    """Cross-entropy of a batch, and its gradient as a dict like the model."""
    rows = np.arange(len(labels))
    hidden, logits = forward(model, images)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))  # (n, CLASSES)
    error = np.exp(log_p)
    error[rows, labels] -= 1
    error /= len(labels)
    back = (error @ model["w2"].T) * (hidden > 0)  # (n, CLASSES) -> (n, HIDDEN)
    first = {"w1": images.T @ back, "b1": back.sum(axis=0)}
    second = {"w2": hidden.T @ error, "b2": error.sum(axis=0)}
    return -log_p[rows, labels].mean(), first | second


class Server:
    def __init__(self, learning_rate):
        self.learning_rate = learning_rate
        self.model = initial_model(mpiml.context().rng)
        self.version = 0
        self.loss = np.log(CLASSES)  # a running mean over 100 updates or so
        self.staleness = 0  # the sum over all updates
        self.start = time.perf_counter()
        mpiml.context().on_stop(self._finish)

    def pull(self):
        return self.model, self.version

    def push(self, gradient, version, loss):
        for name, value in gradient.items():
            self.model[name] -= self.learning_rate * value
        self.staleness += self.version - version
        self.loss += 0.01 * (loss - self.loss)
        self.version += 1
        staleness = self.staleness / self.version
        mpiml.context().report(self.version, loss=self.loss, staleness=staleness)

    def _finish(self):
        seconds = time.perf_counter() - self.start
        _, (images, labels) = load()
        accuracy = (forward(self.model, images)[1].argmax(axis=1) == labels).mean()
        print(f"accuracy {accuracy:.3f} on {len(labels)} held-out images")
        print(
            f"{self.version} updates at {self.version / seconds:.0f}/s, loss {self.loss:.3f}, "
            f"mean staleness {self.staleness / self.version:.1f}"
        )


def work(server, steps):
    me = mpiml.context()
    images, labels = (part[me.index :: me.replicas] for part in load()[0])
    for _ in range(steps):
        model, version = server.pull()
        chosen = me.rng.integers(len(labels), size=BATCH)
        loss, gradient = loss_and_gradient(model, images[chosen], labels[chosen])
        server.futures.push(gradient, version, loss)


def build(
    workers: int = mpiml.FILL, steps: int = 1000, learning_rate: float = 0.1
) -> mpiml.Program:
    program = mpiml.Program("parameter server")
    server = program.add_node(mpiml.ServiceNode(Server, learning_rate), label="server")
    program.add_node(mpiml.PyNode(work, server, steps), label="worker", replicas=workers)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
