"""Actors, a learner and an evaluator: policy gradient on CartPole, until it is solved.

Each actor plays episodes with the newest policy and sends them to the learner without waiting;
the learner makes a step for every eight. The evaluator plays the policy without its noise, and
ends the program when the pole stays up for 475 of 500 steps on average.

$ python -m mpiml.run -n 4 examples/actor_learner.py
[evaluator/0] ... episodes: mean return ...
...
[evaluator/0] solved after ... episodes: mean return ...

$ python -m mpiml.run examples/actor_learner.py --actors 1
...
[evaluator/0] solved after ... episodes: mean return ...
"""

import gymnasium as gym
import numpy as np

import mpiml

SCALE = np.array([2.4, 3.0, 0.21, 3.0])  # about the largest values of an observation
SOLVED, DISCOUNT, RATE, EPISODES_PER_STEP = 475.0, 0.98, 0.1, 8


def probability(policy, features):
    """Return how likely the push is to the right, (steps, 5) -> (steps,)."""
    return 1 / (1 + np.exp(-features @ policy))


def play(env, policy, choose):
    """Play an episode; return its features, (steps, 5), and actions, (steps,)."""
    features, actions = [], []
    observation, _ = env.reset()
    over = False
    while not over:
        features.append(np.append(observation / SCALE, 1.0))
        actions.append(int(choose(probability(policy, features[-1]))))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    return np.array(features), np.array(actions)


def discounted_returns(steps):
    returns = np.empty(steps)
    total = 0.0
    for i in reversed(range(steps)):
        returns[i] = total = 1.0 + DISCOUNT * total  # the reward of each step is 1
    return returns


def make_env():
    env = gym.make("CartPole-v1")
    env.reset(seed=mpiml.context().seed % 2**31)
    return env


class Learner:
    def __init__(self):
        self.weights = np.zeros(5)
        self.mean = np.zeros(5)  # moments of Adam
        self.square = np.zeros(5)
        self.steps = 0
        self.episodes = []

    def policy(self):
        return self.weights, self.steps * EPISODES_PER_STEP

    def learn(self, features, actions):
        self.episodes.append((features, actions, discounted_returns(len(actions))))
        if len(self.episodes) == EPISODES_PER_STEP:
            gradient, steps = self.gradient()
            self.update(gradient / steps)

    def gradient(self):
        """Return the gradient summed over all steps of the episodes, and how many these are."""
        features, actions, returns = map(np.concatenate, zip(*self.episodes, strict=True))
        self.episodes.clear()
        advantage = (returns - returns.mean()) / (returns.std() + 1e-8)  # (steps,)
        slope = actions - probability(self.weights, features)  # of the log-likelihood
        return (advantage * slope) @ features, len(actions)  # (steps,) -> (5,)

    def update(self, gradient):
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.99 * self.square + 0.01 * gradient**2
        mean = self.mean / (1 - 0.9**self.steps)
        square = self.square / (1 - 0.99**self.steps)
        self.weights = self.weights + RATE * mean / (np.sqrt(square) + 1e-8)


def act(learner):
    env, rng = make_env(), mpiml.context().rng
    while True:  # until the evaluator stops the program
        policy, _ = learner.policy()
        learner.futures.learn(*play(env, policy, lambda p: rng.random() < p))


def evaluate(learner):
    env, me = make_env(), mpiml.context()
    while not me.wait_for_stop(0.1):
        policy, episodes = learner.policy()
        mean = np.mean([len(play(env, policy, lambda p: p > 0.5)[1]) for _ in range(10)])
        if mean >= SOLVED:
            print(f"solved after {episodes} episodes: mean return {mean:.1f}")
            me.stop()
        else:
            print(f"{episodes} episodes: mean return {mean:.1f}")


def build(actors: int = mpiml.FILL) -> mpiml.Program:
    program = mpiml.Program("actor-learner")
    learner = program.add_node(mpiml.ServiceNode(Learner), label="learner")
    program.add_node(mpiml.PyNode(act, learner), label="actor", replicas=actors)
    program.add_node(mpiml.PyNode(evaluate, learner), label="evaluator")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
