"""What is learned: the temperature at any point and time, linear in random features.

A. Rahimi and B. Recht, "Random features for large-scale kernel machines", NeurIPS 2007. That the
field swings with a known period is built in; how it does so at each place is learned.
"""

import numpy as np
from heat_numpy import OMEGA

FEATURES = 100
_rng = np.random.default_rng(2007)
_W, _B = _rng.normal(0, 1.5, (2, FEATURES // 2)), _rng.uniform(-3, 3, FEATURES // 2)


def features(points):
    """Of points x, y, t, each (3,): (n, 3) -> (n, FEATURES)."""
    shape = np.tanh((2 * points[:, :2] - 1) @ _W + _B)
    angle = OMEGA * points[:, 2:]
    return np.concatenate([shape * np.cos(angle), shape * np.sin(angle)], axis=1)


class Surrogate:
    """A service: solvers ask it for values at points, the learner gives it weights."""

    def __init__(self, cells, steps, learn, every):
        self._settings = np.array([cells, steps, learn, every], np.int64)
        self._weights = np.zeros(FEATURES)

    def settings(self):
        """Cells a side, steps, steps with a known boundary, steps between fields: (4,) int64."""
        return self._settings

    def predict(self, points):
        """Temperatures at points x, y, t: (n, 3) -> (n,), both float64."""
        return features(points) @ self._weights

    def learned(self, weights):
        """Take new weights, (FEATURES,)."""
        self._weights = weights


class Fit:
    """Least squares over all batches so far, by the normal equations."""

    def __init__(self):
        self._a = np.zeros((FEATURES, FEATURES))
        self._b = np.zeros(FEATURES)

    def add(self, points, values):
        """Add a batch, (n, 3) and (n,); return the weights, (FEATURES,)."""
        x = features(points)
        self._a += x.T @ x
        self._b += x.T @ values
        ridge = 1e-9 * np.trace(self._a) * np.eye(FEATURES)
        return np.linalg.solve(self._a + ridge, self._b)
