"""The Python side of ends.c: python -m mpiml.run ends.py --how fails."""

import mpiml


class Net:
    def hold(self):
        mpiml.context().wait_for_stop()


def listen(numbers, how):
    if how in ("stopped", "fails"):
        numbers.get()  # the solver is at work
        if how == "fails":
            raise ValueError("boom")
        mpiml.context().stop()
    if how != "early":
        mpiml.context().wait_for_stop()
        return None
    return list(map(float, numbers))


def show(listener):
    print("heard", listener.result(), flush=True)


def build(how: str = "stop"):
    program = mpiml.Program("ends")
    numbers = program.topic("numbers", policy=mpiml.Keep(2))
    net = program.add_node(mpiml.ServiceNode(Net), label="net")
    listener = program.add_node(
        mpiml.PyNode(listen, numbers.subscriber(), how), label="listener"
    )
    if how == "early":
        program.add_node(mpiml.PyNode(show, listener), label="show")
    solver = mpiml.ExternalNode(publishes=numbers, calls=net)
    program.add_node(solver, label="solver", replicas=mpiml.FILL)
    return program
