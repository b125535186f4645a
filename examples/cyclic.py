"""A cyclic graph: two services that call each other, as the Collatz sequence does.

An even number is halved, an odd one becomes 3 n + 1, until 1 is reached. Each service knows
one of the rules and asks the other to go on. While a method waits for that answer the service
takes further calls, so the cycle does not block.

$ python -m mpiml.run -n 3 examples/cyclic.py
[driver/0] 7 takes 16 steps: 7 22 11 34 17 52 26 13 40 20 10 5 16 8 4 2 1
[driver/0] of the numbers below 20, 18 takes the most steps: 20

$ python -m mpiml.run examples/cyclic.py --number 6
[driver/0] 6 takes 8 steps: 6 3 10 5 16 8 4 2 1
[driver/0] of the numbers below 20, 18 takes the most steps: 20
"""

import mpiml


class Even:
    def __init__(self, odd):
        self.odd = odd

    def path(self, n):
        path = []
        while n % 2 == 0:
            path.append(n)
            n //= 2
        return path + self.odd.path(n)


class Odd:
    def __init__(self, even):
        self.even = even

    def path(self, n):
        return [1] if n == 1 else [n, *self.even.path(3 * n + 1)]


def drive(even, odd, number):
    path = (odd if number % 2 else even).path(number)
    print(f"{number} takes {len(path) - 1} steps:", *path)

    futures = {n: (odd if n % 2 else even).futures.path(n) for n in range(1, 20)}
    steps = {n: len(future.result()) - 1 for n, future in futures.items()}
    most = max(steps, key=steps.get)
    print(f"of the numbers below 20, {most} takes the most steps: {steps[most]}")


def build(number: int = 7) -> mpiml.Program:
    program = mpiml.Program("cyclic")
    node = mpiml.ServiceNode(Even)
    even = program.add_node(node, label="even")
    odd = program.add_node(mpiml.ServiceNode(Odd, even), label="odd")
    node.configure(odd)  # its argument did not exist before
    program.add_node(mpiml.PyNode(drive, even, odd, number), label="driver")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
