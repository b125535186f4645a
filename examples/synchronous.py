"""Synchronous data-parallel training: the trainer waits for all gradients of a step.

The counterpart of parameter_server.py. Of each batch every worker takes its part, and the
gradients are averaged in the order of the workers and applied once: so for one seed and one
number of workers the result is the same however the nodes are spread over ranks and threads.

$ python -m mpiml.run -n 3 examples/synchronous.py --workers 2
[trainer/0] accuracy 0.9... on 360 held-out images, loss 0.0...
[trainer/0] 500 steps at .../s

$ python -m mpiml.run examples/synchronous.py --workers 2
[trainer/0] accuracy 0.9... on 360 held-out images, loss 0.0...
[trainer/0] 500 steps at .../s
"""

import time

import numpy as np
from sklearn.datasets import load_digits

import mpiml

HIDDEN, CLASSES, BATCH = 64, 10, 96


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


class Worker:
    def __init__(self):
        me = mpiml.context()
        mine = slice(me.index, None, me.replicas)
        self.images, self.labels = (part[mine] for part in load()[0])
        self.rng, self.batch = me.rng, BATCH // me.replicas

    def gradient(self, model):
        chosen = self.rng.integers(len(self.labels), size=self.batch)
        return loss_and_gradient(model, self.images[chosen], self.labels[chosen])


def train(workers, steps, learning_rate):
    model = initial_model(mpiml.context().rng)
    start = time.perf_counter()
    for step in range(steps):
        losses, gradients = zip(*workers.gradient(model), strict=True)
        for name in model:
            model[name] -= learning_rate * np.mean([g[name] for g in gradients], axis=0)
        mpiml.context().report(step + 1, steps, loss=np.mean(losses))
    seconds = time.perf_counter() - start

    (train_images, train_labels), (images, labels) = load()
    accuracy = (forward(model, images)[1].argmax(axis=1) == labels).mean()
    loss, _ = loss_and_gradient(model, train_images, train_labels)
    print(f"accuracy {accuracy:.3f} on {len(labels)} held-out images, loss {loss:.4f}")
    print(f"{steps} steps at {steps / seconds:.0f}/s")
    return accuracy


def build(
    workers: int = mpiml.FILL, steps: int = 500, learning_rate: float = 0.3
) -> mpiml.Program:
    program = mpiml.Program("synchronous")
    handles = program.add_node(mpiml.ServiceNode(Worker), label="worker", replicas=workers)
    program.add_node(mpiml.PyNode(train, handles, steps, learning_rate), label="trainer")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
