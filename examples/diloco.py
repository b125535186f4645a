"""DiLoCo against synchronous training: 1/100 of the messages, and what becomes of the loss.

Each learner has a part of the digits. Synchronous SGD and AdamW reduce the gradients in every
step: `LocalSGD` with every=1. DiLoCo (Douillard et al. 2023) does 100 steps of AdamW apart, and
then one of Nesterov momentum with the mean of how far the learners went. Reductions, and
the bytes that learner 0 brought to them, are as the objects counted them.

$ python -m mpiml.run -n 2 examples/diloco.py
[learner/0] method              reductions      bytes  seconds  first loss  last loss  accuracy
[learner/0] synchronous SGD            600   11544000 ... 2.3...
[learner/0] synchronous AdamW          600   11544000 ... 2.3...
[learner/0] DiLoCo                       6     115440 ... 2.3...
[learner/0] DiLoCo: 1/100 of the reductions, 1/100 of the bytes
[learner/0] wrote diloco.png

$ python -m mpiml.run --threads 4 examples/diloco.py --steps 300 --every 50 --plot four.png
[learner/0] method ...
[learner/0] synchronous SGD ...
[learner/0] synchronous AdamW ...
[learner/0] DiLoCo ...
[learner/0] DiLoCo: 1/50 of the reductions, 1/50 of the bytes
[learner/0] wrote four.png
"""

from pathlib import Path

import numpy as np
from comparison import Curve, digits_scores, draw, initial, print_heading, print_row
from synchronous import load, loss_and_gradient

import mpiml
from mpiml.collectives.averaging import DiLoCo, LocalSGD
from mpiml.optim import SGD, AdamW, Momentum

BATCH = 32  # of each learner
POINTS = 40  # on a curve, about


def train(model, steps, interval, seen):
    """Train on this learner's part; return the curve, whose last model is that of all."""
    me = mpiml.context()
    images, labels = (part[me.index :: me.replicas] for part in seen)
    rng, curve = np.random.default_rng(me.index), Curve()
    for step in range(steps):
        if step % interval == 0:
            curve.note(model.params, model.statistics()["bytes"])
        batch = rng.integers(len(labels), size=BATCH)
        model.step(loss_and_gradient(model.params, images[batch], labels[batch])[1])
    model.meet()  # if there are steps left over since they last did
    curve.note(model.params, model.statistics()["bytes"])
    return curve


def compare(steps, every, plot):
    me, (seen, held_out) = mpiml.context(), load()
    loss, accuracy = digits_scores(seen, held_out)
    outer = Momentum(0.7, 0.9, nesterov=True)
    kinds = {
        "synchronous SGD": lambda w: LocalSGD(w, SGD(0.1), every=1),
        "synchronous AdamW": lambda w: LocalSGD(w, AdamW(2e-3), every=1),
        "DiLoCo": lambda w: DiLoCo(w, AdamW(2e-3), outer, every=every),
    }
    curves, counted = {}, {}
    if me.index == 0:
        print_heading("reductions")
    for name, make in kinds.items():
        with make(initial()) as model:
            interval = every if name == "DiLoCo" else max(1, steps // POINTS)
            curves[name] = train(model, steps, interval, seen)
            counted[name] = model.statistics()
        if me.index == 0:
            print_row(name, counted[name]["reductions"], curves[name], loss, accuracy)
    if me.index == 0:
        all_, own = counted["synchronous AdamW"], counted["DiLoCo"]
        fewer, less = (all_[key] / own[key] for key in ("reductions", "bytes"))
        print(f"DiLoCo: 1/{fewer:.0f} of the reductions, 1/{less:.0f} of the bytes")
        title = f"Digits, learners: {me.replicas}, steps: {steps}"
        draw(plot, title, curves, log_bytes=True)


def build(
    learners: int = mpiml.FILL,
    steps: int = 600,
    every: int = 100,
    plot: Path = Path("diloco.png"),
) -> mpiml.Program:
    program = mpiml.Program("DiLoCo")
    node = mpiml.PyNode(compare, steps, every, plot)
    program.add_node(node, label="learner", replicas=learners)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
