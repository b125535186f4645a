"""Compression side by side: what a learner sends in each step, and how well the network does.

The training of data_parallel_numpy.py in float32, once with each method. What a biased method
(top-k, the signs, PowerSGD) did not send is kept and added to the next gradient: error feedback.
SignMajority sends a direction only, so it has a small step size of its own. A method may be a
class of yours, such as `EightBits` here.

$ python -m mpiml.run -n 2 examples/gradient_compression.py
[learner/0] method               bytes a step    of all  accuracy    loss
[learner/0] none                        19240    100.0%     0.9...
[learner/0] bfloat16                     9620     50.0%     0.9...
[learner/0] EightBits, fed back          4826     25.1%     0.9...
[learner/0] QSGD, 4 bits                 2453     12.7%     0.9...
[learner/0] RandomK, 10 %                1924     10.0%     0.9...
[learner/0] PowerSGD, rank 2             1912      9.9%     0.9...
[learner/0] TernGrad                     1219      6.3%     0.9...
[learner/0] OneBit                       1210      6.3%     0.9...
[learner/0] EFSign                        618      3.2%     0.9...
[learner/0] TopK, 2 %                     582      3.0%     0.9...
[learner/0] SignMajority                  602      3.1%     0.9...
[learner/0] the worst is ...% less accurate than no compression

$ python -m mpiml.run --threads 4 examples/gradient_compression.py --steps 100
...
[learner/0] the worst is ...% less accurate than no compression
"""

import numpy as np
from synchronous import BATCH, forward, initial_model, load, loss_and_gradient

import mpiml
from mpiml.collectives import Bucket
from mpiml.collectives import compression as by


class EightBits:
    """Sends whole numbers from -127 to 127, and a scale for each array."""

    def encode(self, array):
        scale = np.abs(array).max() / 127 or 1.0
        return np.array([scale], array.dtype), np.rint(array / scale).astype(np.int8)

    def decode(self, payload, shape, dtype):
        scale, numbers = payload
        return (scale * numbers).astype(dtype)


def methods():
    """Return name, object and step size of each method. Objects remember: one per training."""
    return [
        ("none", None, 0.3),
        ("bfloat16", by.Cast("bfloat16"), 0.3),
        ("EightBits, fed back", by.ErrorFeedback(EightBits()), 0.3),
        ("QSGD, 4 bits", by.QSGD(bits=4), 0.3),
        ("RandomK, 10 %", by.RandomK(0.1), 0.3),
        ("PowerSGD, rank 2", by.PowerSGD(rank=2), 0.3),
        ("TernGrad", by.TernGrad(), 0.3),
        ("OneBit", by.OneBit(), 0.3),
        ("EFSign", by.EFSign(), 0.3),
        ("TopK, 2 %", by.TopK(0.02), 0.3),
        ("SignMajority", by.SignMajority(), 0.003),
    ]


def initial():
    model = initial_model(np.random.default_rng(0)).items()
    return {name: array.astype(np.float32) for name, array in model}


def train(bucket, data, compress, step_size, steps):
    """Train on this learner's part of every batch; return the model."""
    images, labels = data
    model = initial()
    for step in range(steps):
        batch = np.random.default_rng(step).integers(len(labels), size=BATCH)
        mine = batch[bucket.index :: bucket.size]
        _, gradient = loss_and_gradient(model, images[mine], labels[mine])
        for name in model:
            bucket[name][...] = gradient[name]
        bucket.allreduce("mean", compress=compress)
        for name in model:
            model[name] -= np.float32(step_size * (1 - step / steps)) * bucket[name]
    return model


def bytes_sent(compress, arrays):
    """Return what a learner sends of such arrays; every method says so beforehand."""
    if compress is None:
        return sum(x.nbytes for x in arrays)
    return sum(compress.nbytes(x.shape, x.dtype) for x in arrays)


def compare(steps):
    me = mpiml.context()
    (seen, (images, labels)), accuracy = load(), {}
    if me.index == 0:
        print(f"{'method':<20} bytes a step    of all  accuracy    loss")
    for name, compress, step_size in methods():
        with Bucket(like=initial()) as bucket:
            model = train(bucket, seen, compress, step_size, steps)
            sent, every = (bytes_sent(c, bucket.tree.values()) for c in (compress, None))
        accuracy[name] = (forward(model, images)[1].argmax(axis=1) == labels).mean()
        if me.index == 0:
            loss, _ = loss_and_gradient(model, *seen)
            row = f"{sent:>12} {sent / every:>9.1%} {accuracy[name]:>9.3f} {loss:>7.4f}"
            print(f"{name:<20} {row}")
    if me.index == 0:
        worst = accuracy["none"] - min(accuracy.values())
        assert worst < 0.02, accuracy
        print(f"the worst is {worst:.1%} less accurate than no compression")


def build(learners: int = mpiml.FILL, steps: int = 200) -> mpiml.Program:
    program = mpiml.Program("compression")
    program.add_node(mpiml.PyNode(compare, steps), label="learner", replicas=learners)
    return program


if __name__ == "__main__":
    mpiml.launch(build)
