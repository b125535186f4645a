"""Data-parallel training of a torch network: each learner takes a part of every batch.

`GradientSync` makes `loss.backward()` sum the gradients over the role, while it still runs; the
loop of the training is otherwise that of one process. Every part of a batch gives its share of the
sum, so the losses are those of one learner that takes the whole batch, within 1e-5: in float32
another grouping of the additions shows. The learners hold the same network, to the last bit.

$ python -m mpiml.run -n 2 examples/data_parallel_torch.py
[learner/0] 2 learners: accuracy 0.9... on 360 held-out images, loss 0.0...
[learner/0] the loss of every step is that of one learner within 1e-05

$ python -m mpiml.run -n 4 examples/data_parallel_torch.py
[learner/0] 4 learners: accuracy 0.9... on 360 held-out images, loss 0.0...
[learner/0] the loss of every step is that of one learner within 1e-05

$ python -m mpiml.run --threads 2 examples/data_parallel_torch.py
[learner/0] 2 learners: accuracy 0.9... on 360 held-out images, loss 0.0...
[learner/0] the loss of every step is that of one learner within 1e-05
"""

import numpy as np
import torch
from synchronous import load

import mpiml
from mpiml.collectives import allreduce
from mpiml.torch import GradientSync

BATCH, TOLERANCE = 96, 1e-5


def network():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    with torch.no_grad():  # not the global generator: threads of one process share it
        for layer in (model[0], model[2]):
            layer.weight.normal_(std=1 / 8, generator=generator)
            layer.bias.zero_()
    return model


def tensors(images, labels):
    return torch.from_numpy(images).float(), torch.from_numpy(labels)


def train(model, index, parts, steps, rate):
    """Train on part `index` of every batch; return what it contributes to each step's loss."""
    images, labels = tensors(*load()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = np.empty(steps)
    for step in range(steps):
        batch = np.random.default_rng(step).integers(len(labels), size=BATCH)
        mine = torch.from_numpy(batch[index::parts])
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(
            model(images[mine]), labels[mine], reduction="sum"
        )
        loss = found / BATCH  # of all parts together the mean loss of the batch
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def digest(model):
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return np.array(mpiml.stable_hash(data), np.uint64)


def learn(steps, learning_rate):
    me = mpiml.context()
    torch.set_num_threads(1)
    model = network()
    with GradientSync(model, op="sum"):
        losses = train(model, me.index, me.replicas, steps, learning_rate)
    losses = allreduce(losses, "sum")
    assert allreduce(digest(model), "min") == allreduce(digest(model), "max"), "one network"
    if me.index:
        return

    images, labels = tensors(*load()[1])
    accuracy = (model(images).argmax(dim=1) == labels).float().mean()
    print(
        f"{me.replicas} learners: accuracy {accuracy:.3f} on {len(labels)} held-out images, "
        f"loss {losses[-20:].mean():.4f}"
    )
    alone = train(network(), 0, 1, steps, learning_rate)
    np.testing.assert_allclose(losses, alone, rtol=0, atol=TOLERANCE)
    print(f"the loss of every step is that of one learner within {TOLERANCE:.0e}")


def build(
    learners: int = mpiml.FILL, steps: int = 150, learning_rate: float = 0.1
) -> mpiml.Program:
    program = mpiml.Program("data-parallel-torch")
    program.add_node(
        mpiml.PyNode(learn, steps, learning_rate), label="learner", replicas=learners
    )
    return program


if __name__ == "__main__":
    mpiml.launch(build)
