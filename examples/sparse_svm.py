"""A sparse SVM by Hogwild!: updates under a lock, updates that race, and HogWild++ side by side.

All learners, on one host, add to one model in its memory (`SharedModel`; Niu et al. 2011): a row
at a time under a mutex or a spinlock; or without a lock, each component atomically, or by plain
load and store ("racy"), which loses what others write in between. HogWild++ (`RingModel`; Zhang
et al. 2016) has a model for each learner, and a token that brings two of them together at a time;
fewer turns of the ring leave the models further apart, each trained on the rows of one learner.
Rows are made in the shape of RCV1, or come from a LIBSVM file (--data). The objective is the mean
over all rows. Bytes are what learner 0 wrote: components of its rows, and of models in its turns.

$ python -m mpiml.run -n 2 examples/sparse_svm.py
[learner/0] method                 updates      bytes  seconds  first loss  last loss  accuracy
[learner/0] locked, mutex            40000   12000000 ... 1.0000 ...
[learner/0] locked, spinlock         40000   12000000 ... 1.0000 ...
[learner/0] racing, atomic           40000   12000000 ... 1.0000 ...
[learner/0] racing, racy             40000   12000000 ... 1.0000 ...
[learner/0] HogWild++                40000 ... 1.0000 ...
[learner/0] HogWild++: 2 clusters, ... turns of the ring
[learner/0] wrote sparse_svm.png

$ python -m mpiml.run --threads 4 examples/sparse_svm.py --rows 2000 --plot four.png
[learner/0] method ...
...
[learner/0] HogWild++: 4 clusters, ... turns of the ring
[learner/0] wrote four.png
"""

from pathlib import Path

import numpy as np
from comparison import Curve, draw, print_heading, print_row

import mpiml
from mpiml.collectives import RingModel, SharedModel
from mpiml.collectives.onesided.svm import svm_epoch, svm_score
from mpiml.datasets import rcv1_like, read_libsvm

STEP, DECAY, MU = 0.5, 0.8, 1.0  # the step size, what becomes of it in an epoch, regularisation
LOCKED = {"locked, mutex": "mutex", "locked, spinlock": "spinlock"}
RACING = {"racing, atomic": "atomic", "racing, racy": "racy", "HogWild++": "atomic"}


def make(name, data):
    like = {"w": np.zeros(data.shape[1], np.float32)}
    if name == "HogWild++":
        return RingModel(like=like, cluster_size=1, step=STEP, decay=DECAY)
    return SharedModel(like=like)


def written(model, data, updates):
    """Return the bytes that this learner wrote: a row's columns, and in turns of the ring all."""
    count = model.statistics()
    turns = count.get("moved", 0) + count.get("kept", 0)  # components
    return data.values.itemsize * (updates * data.nonzeros // len(data) + turns)


def train(model, data, epochs, how):
    """Visit this learner's rows in each epoch, in a random order; return the curve."""
    me, ring = mpiml.context(), isinstance(model, RingModel)
    own = np.arange(me.index, len(data), me.replicas)
    degrees, rng = data.degrees(), np.random.default_rng(me.index)
    curve = Curve()

    def note(epoch):
        if me.index == 0:
            tree, _ = model.evaluated() if ring else model.snapshot()
            curve.note(tree, written(model, data, epoch * len(own)))

    note(0)
    model.barrier()
    curve.begin()
    for epoch in range(epochs):
        step = model.step if ring else STEP * DECAY**epoch
        svm_epoch(model, "w", data, step, MU, degrees, rng.permutation(own), how)
        if ring:
            model.end_epoch()
        model.barrier()  # the next step size is for all
        note(epoch + 1)
    return curve


def compare(rows, epochs, path, plot):
    me, curves = mpiml.context(), {}
    data = rcv1_like(rows).data if path is None else read_libsvm(path)

    def objective(tree):
        return svm_score(tree["w"], data, MU).objective / len(data)

    def accuracy(tree):
        return svm_score(tree["w"], data, MU).accuracy

    if me.index == 0:
        print_heading("updates")
    for name, how in (LOCKED | RACING).items():
        with make(name, data) as model:
            curves[name] = train(model, data, epochs, how)
            count = model.statistics()
        if me.index == 0:
            print_row(name, count["adds"], curves[name], objective, accuracy)
    if me.index == 0:
        print(f"HogWild++: {count['clusters']} clusters, {count['hops']} turns of the ring")
        title = "Sparse SVM, {:,} x {:,}, learners: {}".format(*data.shape, me.replicas)
        draw(plot, title, curves, "objective, mean of rows", "written by learner 0")


def build(
    learners: int = mpiml.FILL,
    rows: int = 4000,
    epochs: int = 20,
    data: Path | None = None,
    plot: Path = Path("sparse_svm.png"),
) -> mpiml.Program:
    program = mpiml.Program("sparse SVM")
    node = mpiml.PyNode(compare, rows, epochs, data, plot)
    program.add_node(node, label="learner", replicas=learners)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
