"""Evolution strategies: fits a network without gradients, only seeds and returns on the wire.

Every worker keeps the parameters and draws each perturbation from its seed. The search sends
seeds, gets returns, and tells all workers all returns, so that each makes the same update.
After Salimans et al., "Evolution strategies as a scalable alternative to reinforcement
learning", 2017: pairs of opposite perturbations, and ranks in the place of returns. One seed
gives the same result for any number of workers.

$ python -m mpiml.run -n 4 examples/evolution.py
[search/0] generation   0: return -0.5...
[search/0] generation 100: return -0.2...
[search/0] generation 200: return -0.0...
[search/0] generation 300: return -0.0...
[search/0] 3 workers hold the same 49 parameters

$ python -m mpiml.run examples/evolution.py --workers 1 --generations 100
[search/0] generation   0: return -0.5...
[search/0] generation 100: return -0.2...
[search/0] 1 workers hold the same 49 parameters
"""

import numpy as np

import mpiml

HIDDEN = 16
SIZE = 3 * HIDDEN + 1
X = np.linspace(-1, 1, 64)
SIGMA, RATE = 0.1, 0.1


def evaluate(theta):
    """Return minus the mean squared error of a network with one hidden layer."""
    w1, b1, w2, b2 = np.split(theta, [HIDDEN, 2 * HIDDEN, 3 * HIDDEN])
    fit = np.tanh(np.outer(X, w1) + b1) @ w2 + b2  # (64,) -> (64, HIDDEN) -> (64,)
    return -np.mean((fit - np.sin(4 * X)) ** 2)


def noise(seed):
    return np.random.default_rng(seed).normal(size=SIZE)


class Worker:
    def start(self, seed):
        self.theta = noise(seed)

    def evaluate(self, seeds):
        steps = [SIGMA * noise(seed) for seed in seeds]
        return [(evaluate(self.theta + step), evaluate(self.theta - step)) for step in steps]

    def update(self, seeds, returns):
        ranks = returns.ravel().argsort().argsort().reshape(returns.shape)  # (pairs, 2)
        weights = (ranks[:, 0] - ranks[:, 1]) / (ranks.size - 1)  # (pairs,)
        steps = np.stack([noise(seed) for seed in seeds])  # (pairs, SIZE)
        self.theta += RATE * weights @ steps / len(seeds)
        return evaluate(self.theta)

    def digest(self):
        return mpiml.stable_hash(self.theta.tobytes())


def search(workers, generations, pairs):
    rng = mpiml.context().rng
    workers.start(int(rng.integers(2**31)))
    for generation in range(generations + 1):
        seeds = rng.integers(2**31, size=pairs)
        parts = np.array_split(seeds, len(workers))
        futures = [w.futures.evaluate(part) for w, part in zip(workers, parts, strict=True)]
        returns = np.concatenate([r for r in mpiml.gather(futures) if r])  # (pairs, 2)
        reached = workers.update(seeds, returns)[0]
        if generation % 100 == 0:
            print(f"generation {generation:3d}: return {reached:.4f}")
    assert len(set(workers.digest())) == 1
    print(f"{len(workers)} workers hold the same {SIZE} parameters")


def build(workers: int = mpiml.FILL, generations: int = 300, pairs: int = 32) -> mpiml.Program:
    program = mpiml.Program("evolution")
    handles = program.add_node(mpiml.ServiceNode(Worker), label="worker", replicas=workers)
    program.add_node(mpiml.PyNode(search, handles, generations, pairs), label="search")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
