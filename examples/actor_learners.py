"""The actor-learner example with several learners, which reduce their gradients in their role.

Actors send each episode to the next learner. When the learners have their share of eight episodes,
the gradients are summed over the role in a `Bucket`, and every learner makes the same update: so
whichever an actor asks, the policy is the same. `agree_stop` ends all of them after the same round,
so that none waits in a reduction for one that has left.

$ python -m mpiml.run -n 6 examples/actor_learners.py --learners 2
[evaluator/0] ... episodes: mean return ...
...
[evaluator/0] solved after ... episodes: mean return ...
[learner/0] 2 learners hold the same policy

$ python -m mpiml.run --threads 2 examples/actor_learners.py --learners 2
[evaluator/0] ... episodes: mean return ...
...
[evaluator/0] solved after ... episodes: mean return ...
[learner/0] 2 learners hold the same policy
"""

import contextlib
import itertools
import queue

import actor_learner
import numpy as np
from actor_learner import EPISODES_PER_STEP, discounted_returns, evaluate, make_env, play

import mpiml
from mpiml.collectives import Bucket, allreduce


class Learner(actor_learner.Learner):
    def __init__(self):
        super().__init__()
        self.arrived = queue.SimpleQueue()  # from the calls to run()

    def learn(self, features, actions):
        self.arrived.put((features, actions, discounted_returns(len(actions))))

    def collect(self, count):
        """Wait for so many episodes, but not without end: the others wait for this round too."""
        with contextlib.suppress(queue.Empty):
            while len(self.episodes) < count:
                self.episodes.append(self.arrived.get(timeout=0.2))

    def run(self):
        me = mpiml.context()
        share = -(-EPISODES_PER_STEP // me.replicas)
        with Bucket(like={"gradient": np.zeros(5), "steps": np.zeros(())}) as bucket:
            while not me.agree_stop():
                self.collect(share)
                gradient, steps = self.gradient() if self.episodes else (0.0, 0)
                bucket["gradient"][:], bucket["steps"][...] = gradient, steps
                bucket.allreduce("sum")
                if bucket["steps"] > 0:  # the sum of all learners, so they agree
                    self.update(bucket["gradient"] / bucket["steps"])
                    if self.steps == 5:
                        self.compare()

    def compare(self):
        digest = np.array(mpiml.stable_hash(self.weights.tobytes()), np.uint64)
        assert allreduce(digest, "min") == allreduce(digest, "max")
        if mpiml.context().index == 0:
            print(f"{mpiml.context().replicas} learners hold the same policy")


def act(learners):
    env, me = make_env(), mpiml.context()
    for turn in itertools.count(me.index):  # the next episode goes to the next learner
        learner = learners[turn % len(learners)]
        policy, _ = learner.policy()
        learner.futures.learn(*play(env, policy, lambda p: me.rng.random() < p))


def build(actors: int = mpiml.FILL, learners: int = 2) -> mpiml.Program:
    program = mpiml.Program("actor-learners")
    handles = program.add_node(mpiml.ServiceNode(Learner), label="learner", replicas=learners)
    program.add_node(mpiml.PyNode(act, handles), label="actor", replicas=actors)
    program.add_node(mpiml.PyNode(evaluate, handles[0]), label="evaluator")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
