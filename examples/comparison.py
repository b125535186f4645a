"""Curves, a table and a plot: what diloco.py, gossip_digits.py and sparse_svm.py share."""

import time

import numpy as np
from synchronous import forward, initial_model, loss_and_gradient

BROUGHT = "brought to reductions by learner 0"  # bytes, as the objects count them


class Curve:
    """A model at moments of its training: losses are computed when that is over."""

    def __init__(self):
        self.seconds, self.counted, self.models, self.losses = [], [], [], []
        self.begin()

    def begin(self):
        """Count the time from here."""
        self.start = time.perf_counter()

    def note(self, model, counted):
        self.seconds.append(time.perf_counter() - self.start if self.seconds else 0.0)
        self.counted.append(counted)  # bytes
        self.models.append({name: array.copy() for name, array in model.items()})

    def evaluate(self, loss):
        self.losses = [float(loss(model)) for model in self.models]


def initial():
    """Return the model of synchronous.py in float32, the same everywhere."""
    model = initial_model(np.random.default_rng(0)).items()
    return {name: array.astype(np.float32) for name, array in model}


def digits_scores(seen, held_out):
    """Return a function for the loss of a model, on what it trained with, and its accuracy."""

    def loss(model):
        return loss_and_gradient(model, *seen)[0]

    def accuracy(model):
        images, labels = held_out
        return (forward(model, images)[1].argmax(axis=1) == labels).mean()

    return loss, accuracy


def print_heading(counted):
    print(
        f"{'method':<18}  {counted:>10}  {'bytes':>9}  seconds  first loss  last loss  accuracy"
    )


def print_row(name, counted, curve, loss, accuracy):
    """Print a row of the table; the losses of the curve are computed before."""
    curve.evaluate(loss)
    row = f"{name:<18}  {counted:>10}  {curve.counted[-1]:>9}  {curve.seconds[-1]:>7.2f}"
    losses = f"{curve.losses[0]:>10.4f}  {curve.losses[-1]:>9.4f}"
    print(f"{row}  {losses}  {accuracy(curve.models[-1]):>8.3f}")


def draw(path, title, curves, loss="training loss", counted=BROUGHT, log_bytes=False):
    """Write a plot of the loss against time and against bytes; `curves` has them by name."""
    from matplotlib.figure import Figure  # not pyplot: this may be one thread of many

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        left.plot(curve.seconds, curve.losses, ".-", label=name)
        megabytes = np.divide(curve.counted, 1e6)
        if log_bytes:
            megabytes[megabytes == 0] = np.nan
        right.plot(megabytes, curve.losses, ".-")
    left.set(yscale="log", xlabel="time (s)", ylabel=loss)
    right.set(xscale="log" if log_bytes else "linear", xlabel=f"{counted} (MB)")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "2357" else "")
    for panel in (left, right):
        panel.grid(alpha=0.3, which="both")
    left.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
