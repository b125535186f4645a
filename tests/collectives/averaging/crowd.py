"""Members, their parameters and gradients, for tests of averaging."""

import numpy as np

from tests.collectives.together import together

SHAPES = {"w": (5, 3), "b": (4,), "s": ()}


def weights(seed, dtype="f8"):
    """A tree of three arrays, in a list and a dict."""
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    return [made["w"], {"b": made["b"], "s": made["s"]}]


def flat(tree):
    """The values of such a tree, of one dtype, as one array."""
    return np.concatenate([tree[0].reshape(-1), tree[1]["b"], tree[1]["s"].reshape(-1)])


def grads(member, step, dtype="f8"):
    return weights([7, member, step], dtype)


def all_grads(size, step, dtype="f8"):
    """The gradients of all members. (members, n)."""
    return np.stack([flat(grads(i, step, dtype)) for i in range(size)])


def rough(dtype):
    return {"rtol": 2e-5, "atol": 2e-6} if dtype == "f4" else {"rtol": 1e-12, "atol": 1e-13}


def run(size, make, steps, dtype="f8", see=lambda model: flat(model.params)):
    """Train; return what `see` showed after each step. (steps, members, n)."""

    def body(team):
        model = make(weights(team.index, dtype), team)
        seen = []
        for step in range(1, steps + 1):
            model.step(grads(team.index, step, dtype))
            seen.append(np.copy(see(model)))
        return seen

    return np.stack(together(size, body), axis=1)
