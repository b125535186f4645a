import numpy as np
import pytest

from mpiml.collectives.optimizers.mirror import Mirror, mirror_of
from mpiml.collectives.regions import Leaf, Regions
from mpiml.errors import UsageError


def leaves(*named):
    return [Leaf(f"['{name}']", shape, dtype) for name, shape, dtype in named]


GRADIENTS = leaves(
    ("a", (3,), "float16"),
    ("b", (2, 5), "float64"),
    ("c", (7,), "float16"),
    ("d", (), "float16"),
)
PARAMETERS = leaves(
    ("a", (3,), "float32"),
    ("b", (2, 5), "float64"),
    ("c", (7,), "float32"),
    ("d", (), "float32"),
)


def test_elements_stand_where_their_gradients_do():
    regions = Regions(GRADIENTS)
    mirror = mirror_of(regions, PARAMETERS, "here")
    gradients, parameters = bytearray(regions.nbytes), bytearray(mirror.nbytes)
    for flat, beside in zip(regions.flat(gradients), mirror.flat(parameters), strict=True):
        assert flat.shape == beside.shape
        flat[:] = beside[:] = np.arange(flat.size)
    views = zip(regions.views(gradients), mirror.views(parameters), PARAMETERS, strict=True)
    for gradient, parameter, leaf in views:
        assert gradient.shape == parameter.shape == leaf.shape
        assert parameter.dtype == leaf.dtype_name
        assert np.array_equal(gradient, parameter)


def test_views_are_read_only_where_the_memory_is():
    regions = Regions(PARAMETERS)
    mirror = Mirror(regions, [r.dtype_name for r in regions.regions])
    assert mirror.nbytes == regions.nbytes
    view = mirror.views(bytes(mirror.nbytes))[0]
    assert not view.flags.writeable


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p[:3], r"leaf 3 is none of the parameters and \['d'\] \(\) float16 of the"),
        (
            lambda p: [*p, Leaf("['e']", (1,), "float32")],
            r"leaf 4 is \['e'\] .* and none of the",
        ),
        (
            lambda p: [Leaf("['a']", (4,), "float32"), *p[1:]],
            r"leaf 0 is \['a'\] \(4,\) float32",
        ),
        (lambda p: [Leaf("['x']", (3,), "float32"), *p[1:]], r"leaf 0 is \['x'\]"),
        (
            lambda p: [Leaf("['a']", (3,), "float64"), *p[1:]],
            r"one dtype for all gradients of float16, got \['a'\] .*float64 and \['c'\]",
        ),
        (
            lambda p: [Leaf("['a']", (3,), "float16"), *p[1:]],
            r"expected float32 or float64 .*parameter \['a'\] \(3,\) float16 has a gradient of",
        ),
        (
            lambda p: [p[0], Leaf("['b']", (2, 5), "float32"), *p[2:]],
            r"parameter \['b'\] \(2, 5\) float32 has a gradient of float64",
        ),
    ],
)
def test_what_does_not_go_together(change, text):
    with pytest.raises(UsageError, match=f"^here: .*{text}"):
        mirror_of(Regions(GRADIENTS), change(PARAMETERS), "here")
