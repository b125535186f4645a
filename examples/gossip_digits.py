"""Gossip against allreduce where one learner is slow: who waits for it?

A step takes each learner 2 ms, in which it sleeps as if an accelerator worked, and the last one
10 ms more. With allreduce all wait for it. In D-PSGD (Lian et al. 2017) a learner averages with
its neighbours in a ring, and waits for them, as they do for theirs. In AD-PSGD (Lian et al. 2018)
learners average in pairs, and nobody waits for the slow one: each makes as many steps as it can
in the time that allreduce took. Steps and bytes of learner 0 are as the objects counted them:
bytes that it brought to reductions, of which allreduce may send more or fewer, and that it sent to
its neighbours in D-PSGD and AD-PSGD. The curves are of the model of learner 0, their last points of the mean of all.

$ python -m mpiml.run -n 3 examples/gossip_digits.py
[learner/0] method                   steps      bytes  seconds  first loss  last loss  accuracy
[learner/0] allreduce                   80    1539200 ... 2.3...
[learner/0] D-PSGD                      80    3078400 ... 2.3...
[learner/0] AD-PSGD ... 2.3...
[learner/0] steps of each learner in AD-PSGD: ...
[learner/0] wrote gossip_digits.png

$ python -m mpiml.run --threads 4 examples/gossip_digits.py --slow 0.004 --steps 100
[learner/0] method ...
[learner/0] allreduce                  100    1924000 ...
[learner/0] D-PSGD                     100    3848000 ...
[learner/0] AD-PSGD ...
[learner/0] steps of each learner in AD-PSGD: ...
[learner/0] wrote gossip_digits.png
"""

import time
from pathlib import Path

import numpy as np
from comparison import Curve, digits_scores, draw, initial, print_heading, print_row
from diloco import BATCH, POINTS
from synchronous import load, loss_and_gradient

import mpiml
from mpiml import topology
from mpiml.collectives import allreduce
from mpiml.collectives.averaging import LocalSGD
from mpiml.collectives.neighbors import ADPSGD, DPSGD
from mpiml.optim import SGD

RATE = 0.2
STEP = 0.002  # s that a step takes, and more


def train(model, seen, slow, steps, seconds):
    """Train on this learner's part, for so many steps or so long; return the curve."""
    me = mpiml.context()
    images, labels = (part[me.index :: me.replicas] for part in seen)
    last = me.replicas > 1 and me.index == me.replicas - 1
    rng, curve = np.random.default_rng(me.index), Curve()
    done = 0.0  # how much of it all
    while done < 1:
        if done >= len(curve.models) / POINTS:
            curve.note(model.params, model.statistics()["bytes"])
        batch = rng.integers(len(labels), size=BATCH)
        gradient = loss_and_gradient(model.params, images[batch], labels[batch])[1]
        time.sleep(STEP + slow * last)
        model.step(gradient)
        passed = time.perf_counter() - curve.start
        done = model.steps / steps if seconds is None else passed / seconds
    counted = model.statistics()["bytes"]
    model.meet()  # the mean of all
    curve.note(model.params, counted)
    return curve


def compare(steps, slow, plot):
    me, (seen, held_out) = mpiml.context(), load()
    loss, accuracy = digits_scores(seen, held_out)
    ring, pairs = topology.ring(me.replicas), topology.bipartite(me.replicas)
    kinds = {
        "allreduce": lambda w: LocalSGD(w, SGD(RATE), every=1),
        "D-PSGD": lambda w: DPSGD(w, SGD(RATE), ring),
        "AD-PSGD": lambda w: ADPSGD(w, SGD(RATE), pairs),
    }
    curves, seconds = {}, None
    if me.index == 0:
        print_heading("steps")
    for name, make in kinds.items():
        if name == "AD-PSGD":
            longest = np.array(curves["allreduce"].seconds[-1])
            seconds = float(allreduce(longest, "max"))
        with make(initial()) as model:
            curves[name] = train(model, seen, slow, steps, seconds)
            if name == "AD-PSGD":
                model.finish()
        if me.index == 0:
            print_row(name, model.steps, curves[name], loss, accuracy)
    each = np.zeros(me.replicas, int)
    each[me.index] = model.steps
    each = allreduce(each)
    if me.index == 0:
        print("steps of each learner in AD-PSGD:", *each)
        title = f"Digits, learners: {me.replicas}, of which the last needs {1000 * slow:g} ms more for a step"
        counted = "learner 0: brought to reductions, or sent to neighbours"
        draw(plot, title, curves, counted=counted)


def build(
    learners: int = mpiml.FILL,
    steps: int = 80,
    slow: float = 0.01,  # s that the last learner needs more in each step
    plot: Path = Path("gossip_digits.png"),
) -> mpiml.Program:
    program = mpiml.Program("gossip")
    node = mpiml.PyNode(compare, steps, slow, plot)
    program.add_node(node, label="learner", replicas=learners)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
