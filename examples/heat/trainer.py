"""A surrogate is learned from a simulation while it runs, which then calls it for its boundary.

$ mpirun -n 2 ./heat_c : -n 2 python -m mpiml.run trainer.py
$ python -m mpiml.run -n 6 trainer.py --solver numpy --plot heat.png

fields of the solver -> intake -> reservoir -> learner -> surrogate <- boundary of the solver.
Nothing is written to disk but the plot, at the end.
"""

import importlib.util
import os
from typing import Literal

import numpy as np
from heat_numpy import RATIO, exact, solve
from surrogate import Fit, Surrogate

import mpiml

POINTS = 200  # of each field, that are put into the reservoir
BATCH = 256
REUSE = 2.0  # samples of an item, at most
MOST_STEPS = 10**9  # the solvers count in 32 bits


def take_in(fields, reservoir, surrogate, plot):
    """Put points of each field into the reservoir; tell how good the last field is."""
    rng = mpiml.context().rng
    cells, steps, learn, every = (int(n) for n in surrogate.settings())
    h = 1 / (cells + 1)
    x, y = np.meshgrid(*2 * [np.arange(cells + 2) * h], indexing="ij")
    errors = []
    for step in range(every, steps + 1, every):
        field = np.concatenate([part.get() for part in fields])  # (cells + 2, cells + 2)
        t = step * RATIO * h * h
        errors.append(np.abs(field - exact(x, y, t)).max())
        if step <= learn:
            i, j = rng.integers(0, cells + 2, (2, POINTS))
            points = np.stack([x[i, j], y[i, j], np.full(POINTS, t)], axis=1)
            reservoir.extend(points, field[i, j])  # waits while the learner is behind
        if step == learn:
            reservoir.close()  # nobody has to wait for more
            print(f"boundary given:  error {errors[-1]:.1e}, sum {float(np.sum(field**2))!r}")
    points = np.stack([x.ravel(), y.ravel(), np.full(x.size, t)], axis=1)
    guess = surrogate.predict(points).reshape(x.shape)
    off = [np.abs(guess - exact(x, y, t)), np.abs(field - exact(x, y, t))]
    print(f"boundary called: error {errors[-1]:.1e}, of the surrogate {off[0].max():.1e}")
    if plot:
        draw(plot, field, off, np.arange(1, len(errors) + 1) * every, errors, learn)
    return errors


def learn_from(reservoir, surrogate, rounds):
    """Fit the surrogate to samples of all that has been put so far, again and again."""
    fit = Fit()
    for _ in range(rounds):
        points, values = reservoir.sample(BATCH)  # (BATCH, 3), (BATCH,)
        surrogate.learned(fit.add(points, values))
    reservoir.close()  # no more samples: nobody has to wait for them


def draw(path, field, off, steps, errors, learn):
    """Plot the field, the surrogate's error and the field's, and the latter over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14.5, 3.5), layout="constrained")
    for ax, image, title in zip(
        axes, [field, *off], ["field", "surrogate's error", "field's error"], strict=False
    ):
        shown = ax.imshow(image.T, origin="lower", extent=(0, 1, 0, 1))
        ax.set(title=f"{title}, step {steps[-1]}", xlabel="x", ylabel="y")
        figure.colorbar(shown, ax=ax)
    axes[3].semilogy(steps, errors)
    axes[3].axvline(learn, color="grey", linestyle=":", label="boundary by the surrogate")
    axes[3].set(title="largest error of the field", xlabel="step")
    axes[3].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=70)


def check(solver, solvers, cells, steps, learn, every, plot):
    """Refuse what the solvers cannot compute, before anybody has started."""
    for name, value, least, most, unit, why in (
        ("cells", cells, 4, 10_000, 1, "fewer show too little of the waves"),
        ("solvers", solvers, 1, cells, 1, "each rank of the solver has a row of --cells"),
        ("every", every, 1, MOST_STEPS, 1, "a field is sent after each --every steps"),
        ("steps", steps, every, MOST_STEPS, every, "a field is sent after each --every"),
        ("learn", learn, every, steps, every, "so many of --steps know the boundary"),
    ):
        if not least <= value <= most or value % unit:
            multiple = f", a multiple of {unit} (--every)" if unit > 1 else ""
            raise mpiml.UsageError(
                f"heat: --{name}: expected {least} to {most}{multiple}, got {value}. "
                f"Give another --{name}: {why}."
            )
    if solver not in ("external", "numpy"):
        raise mpiml.UsageError(
            f"heat: --solver: expected external or numpy, got {solver!r}. Give external for "
            "heat_c and heat_f, which mpirun starts beside this program."
        )
    if plot is not None:
        check_plot(plot)


def check_plot(plot):
    """Refuse a plot that could not be written: it is, when all is done."""
    folder = os.path.dirname(os.path.abspath(plot))
    if not plot.endswith((".png", ".pdf", ".svg")) or not os.path.isdir(folder):
        raise mpiml.UsageError(
            "heat: --plot: expected a file that ends in .png, .pdf or .svg, in a folder that is "
            f"there, got {plot!r}. Name another, or make the folder."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise mpiml.UsageError(
            "heat: --plot: expected Matplotlib, got an environment without it. Call "
            "`python -m pip install matplotlib`, or leave --plot out."
        )


def build(
    solver: Literal["external", "numpy"] = "external",
    solvers: int = 2,
    cells: int = 24,
    steps: int = 2400,
    learn: int = 1600,
    every: int = 8,
    trained: bool = True,
    plot: str | None = None,
) -> mpiml.Program:
    """`solver`: external, ranks of heat_c or heat_f; or numpy, those of heat_numpy.py.

    They know the boundary for `learn` of the `steps` steps, and send a field after each `every`.
    """
    check(solver, solvers, cells, steps, learn, every, plot)
    program = mpiml.Program("heat")
    fields = program.topic("fields", mpiml.Keep(2))  # a solver is at most 2 fields ahead
    model = mpiml.ServiceNode(Surrogate, cells, steps, learn, every)
    surrogate = program.add_node(model, label="surrogate")
    items = learn // every * POINTS
    buffer = mpiml.ServiceNode(
        mpiml.roles.Reservoir, 5000, low=10 * POINTS, high=5 * POINTS, reuse=REUSE
    )
    reservoir = program.add_node(buffer, label="reservoir")
    if solver == "numpy":
        node = mpiml.PyNode(solve, fields.publisher(), surrogate)
    else:
        array = mpiml.Array("float64", (None, cells + 2))
        node = mpiml.ExternalNode(publishes={fields: array}, calls=[surrogate])
    program.add_node(node, label="solver", replicas=solvers)
    parts = [fields.subscriber(source=rank) for rank in range(solvers)]
    program.add_node(mpiml.PyNode(take_in, parts, reservoir, surrogate, plot), label="intake")
    rounds = int(items * REUSE) // BATCH if trained else 0
    learner = mpiml.PyNode(learn_from, reservoir, surrogate, rounds)
    program.add_node(learner, label="learner")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
