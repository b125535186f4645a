"""Data-parallel training in NumPy: each learner takes a part of every batch, gradients are summed.

The counterpart of synchronous.py without a trainer. The gradients of a step and its loss live in a
`Bucket`, and one allreduce sums them over the role, in place. As the parts make up the batch that
one learner would take alone, the losses are those of one learner too, whatever the number of
learners: within 1e-12, since the additions are grouped in another way. With the same number of
learners they are the same to the bit, however these are spread over ranks and threads.

$ python -m mpiml.run -n 2 examples/data_parallel_numpy.py
[learner/0] 2 learners: accuracy 0.9... on 360 held-out images, loss 0.1...
[learner/0] the loss of every step is that of one learner within 1e-12

$ python -m mpiml.run -n 4 examples/data_parallel_numpy.py
[learner/0] 4 learners: accuracy 0.9... on 360 held-out images, loss 0.1...
[learner/0] the loss of every step is that of one learner within 1e-12

$ python -m mpiml.run --threads 4 examples/data_parallel_numpy.py
[learner/0] 4 learners: accuracy 0.9... on 360 held-out images, loss 0.1...
[learner/0] the loss of every step is that of one learner within 1e-12
"""

import numpy as np
from synchronous import BATCH, forward, initial_model, load, loss_and_gradient

import mpiml
from mpiml.collectives import Bucket, allreduce

TOLERANCE = 1e-12


def initial():
    return initial_model(np.random.default_rng(0))  # the same everywhere


def train(index, parts, sums, reduce, steps, rate):
    """Train on part `index` of every batch; return the model and the loss of each step.

    `sums` holds the loss and the gradient; `reduce()` sums it over all parts, in place.
    """
    (images, labels), _ = load()
    model, losses = initial(), []
    for step in range(steps):
        batch = np.random.default_rng(step).integers(len(labels), size=BATCH)
        mine = batch[index::parts]
        share = len(mine) / BATCH  # parts may differ by one image
        loss, gradient = loss_and_gradient(model, images[mine], labels[mine])
        sums["loss"][...] = share * loss
        for name in model:
            np.multiply(gradient[name], share, out=sums["gradient"][name])
        reduce()
        losses.append(float(sums["loss"]))
        for name in model:
            model[name] -= rate * sums["gradient"][name]
    return model, losses


def digest(model):
    data = b"".join(model[name].tobytes() for name in model)
    return np.array(mpiml.stable_hash(data), np.uint64)


def learn(steps, learning_rate):
    me = mpiml.context()
    like = {"loss": np.zeros(()), "gradient": initial()}
    with Bucket(like=like) as bucket:
        model, losses = train(
            me.index, me.replicas, bucket.tree, bucket.allreduce, steps, learning_rate
        )
    mine = digest(model)
    assert allreduce(mine, "min") == allreduce(mine, "max"), "all hold the same model"
    if me.index:
        return

    images, labels = load()[1]
    accuracy = (forward(model, images)[1].argmax(axis=1) == labels).mean()
    print(
        f"{me.replicas} learners: accuracy {accuracy:.3f} on {len(labels)} held-out images, "
        f"loss {np.mean(losses[-20:]):.4f}"
    )
    _, alone = train(0, 1, like, lambda: None, steps, learning_rate)
    np.testing.assert_allclose(losses, alone, rtol=0, atol=TOLERANCE)
    print(f"the loss of every step is that of one learner within {TOLERANCE:.0e}")


def build(
    learners: int = mpiml.FILL, steps: int = 300, learning_rate: float = 0.3
) -> mpiml.Program:
    program = mpiml.Program("data-parallel")
    program.add_node(
        mpiml.PyNode(learn, steps, learning_rate), label="learner", replicas=learners
    )
    return program


if __name__ == "__main__":
    mpiml.launch(build)
