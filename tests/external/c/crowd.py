"""The Python side of crowd.c; as a program of its own it leaves rank 0 of the world out."""

import mpiml


class Net:
    def echo(self, x):
        return x


def listen(said):
    rows = sorted(tuple(int(n) for n in each) for each in said)
    print("said", rows, flush=True)


def build(blue: int = 0):
    program = mpiml.Program("crowd")
    said = program.topic("said", policy=mpiml.Keep(2))
    net = program.add_node(mpiml.ServiceNode(Net), label="net")
    program.add_node(mpiml.PyNode(listen, said.subscriber()), label="listener")
    red = mpiml.ExternalNode(publishes=said, calls=net)
    program.add_node(red, label="red", replicas=2)
    if blue:
        node = mpiml.ExternalNode(publishes=said, calls=net)
        program.add_node(node, label="blue", replicas=blue)
    return program


if __name__ == "__main__":
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part = world.Split(0, -world.rank)
    mpiml.launch(build(), part)
