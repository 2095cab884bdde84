import inspect
import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from ampopt.loss_scale.arguments import check_scale_number
from ampopt.loss_scale.dynamic import DynamicLossScale
from ampopt.loss_scale.outputs import scale_outputs
from ampopt.loss_scale.static import StaticLossScale

Pair = namedtuple("Pair", "loss extra")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
exponents = st.integers(-126, 127)
shapes = st.lists(st.integers(0, 3), max_size=3)


class Output:
    def __init__(self, loss):
        self.loss = loss


pytree.register_pytree_node(Output, lambda o: ([o.loss], None), lambda leaves, _: Output(*leaves))


def forms(number):
    """All kinds of scales that ``scale_outputs`` accepts, with the value ``number``."""
    return [
        number,
        torch.tensor(number, dtype=torch.float32),
        torch.tensor([[number]], dtype=torch.float32),
        torch.tensor([number], dtype=torch.float64),
        StaticLossScale(number),
        DynamicLossScale(init_scale=number),
    ]


@st.composite
def tensors(draw):
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    values = st.floats(width=16, allow_nan=False)
    flat = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(flat, dtype=dtype).reshape(shape)


@given(output=tensors(), exponent=exponents)
def test_multiplies_in_float32_at_least(output, exponent):
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    expected = output.to(wide) * torch.tensor(2.0**exponent, dtype=wide)
    for scale in forms(2.0**exponent):
        got = scale_outputs(output, scale)
        assert got.dtype == wide
        assert torch.equal(got, expected)


@given(number=st.floats(2.0**-126, 3.4028234663852886e38))
def test_every_form_of_a_scale_is_the_same_number(number):
    """Also for float64 outputs, where 0.1 differs from the nearest float32."""
    rounded = check_scale_number(number)
    for scale in (number, StaticLossScale(number), DynamicLossScale(init_scale=number)):
        assert scale_outputs(torch.ones((), dtype=torch.float64), scale).item() == rounded


def test_nothing_is_scaled_by_none():
    for outputs in (torch.ones(2), [torch.ones(1)], "anything", None):
        assert scale_outputs(outputs, None) is outputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_half_precision_loss_does_not_overflow(dtype, shape):
    loss = torch.full(shape, 1.5, dtype=dtype)
    for scale in forms(2.0**16):
        got = scale_outputs(loss, scale)
        assert got.shape == shape and got.eq(1.5 * 2**16).all()


@given(exponent=st.integers(-10, 15), dtype=st.sampled_from(DTYPES))
def test_gradients_are_scaled(exponent, dtype):
    for scale in forms(2.0**exponent):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        scale_outputs(x, scale).sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype
        assert x.grad.eq(2.0**exponent).all()


def test_no_gradient_reaches_the_scale():
    scale = torch.tensor(2.0, requires_grad=True)
    x = torch.ones((), requires_grad=True)
    scale_outputs(x, scale).backward()
    assert scale.grad is None and x.grad == 2.0


def test_outputs_and_scale_are_not_written_to():
    x, scale = torch.ones(2), DynamicLossScale()
    scale_outputs([x, x], scale)
    assert x.eq(1).all() and scale.item() == 2**16 and scale.device is None


@given(st.recursive(tensors(), lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(), t)))
def test_nested_structures_keep_their_shape(outputs):
    got = scale_outputs(outputs, 4.0)
    before, spec = pytree.tree_flatten(outputs)
    after, got_spec = pytree.tree_flatten(got)
    assert spec == got_spec
    for x, y in zip(before, after, strict=True):
        assert torch.equal(y, scale_outputs(x, 4.0))


def test_classes_of_structures():
    one = torch.ones(())
    outputs = Pair((one, [one]), OrderedDict(a=Output(one), b={"c": one}))
    got = scale_outputs(outputs, 3.0)
    assert type(got) is Pair and type(got.extra) is OrderedDict
    assert type(got.extra["a"]) is Output and got.extra["a"].loss == 3.0
    assert got.loss == (3.0, [3.0]) and got.extra["b"] == {"c": 3.0}


def test_outputs_on_several_devices():
    """Meta tensors stand for another device: their values cannot be read."""
    outputs = {"here": torch.ones(2), "there": torch.ones(2, device="meta")}
    for scale in forms(2.0):
        got = scale_outputs(outputs, scale)
        assert got["here"].eq(2).all()
        assert got["there"].device.type == "meta" and got["there"].dtype == torch.float32
    assert scale_outputs(torch.ones(2, device="meta"), DynamicLossScale(device="meta")).is_meta


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, dtype=torch.int64), "torch.int64"),
        (torch.ones(2, dtype=torch.bool), "torch.bool"),
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (1.0, "float"),
        ("loss", "str"),
        (None, "NoneType"),
        ([torch.ones(1), 2], "int"),
        ({"loss": torch.ones(1), "logits": None}, "NoneType"),
        ((torch.ones(1), torch.ones(1, dtype=torch.int32)), "torch.int32"),
        ([StaticLossScale(1.0)], "StaticLossScale"),
    ],
)
def test_bad_outputs(bad, message):
    with pytest.raises(TypeError, match=f"outputs holds a .*{message}"):
        scale_outputs(bad, 2.0)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0.0, ValueError, "scale must be positive, finite.*got 0.0"),
        (-1, ValueError, "got -1"),
        (math.nan, ValueError, "nan"),
        (math.inf, ValueError, "inf"),
        (2.0**-127, ValueError, "2\\*\\*-126"),
        (1e39, ValueError, "1e\\+39"),
        (torch.ones(2), ValueError, r"got shape \(2,\) of torch.float32"),
        (torch.ones(0), ValueError, r"got shape \(0,\)"),
        (torch.ones((), dtype=torch.int32), ValueError, "torch.int32"),
        ("8", TypeError, "LossScale, got str"),
        (True, TypeError, "got bool"),
        ([2.0], TypeError, "list"),
    ],
)
def test_bad_scales(bad, error, message):
    with pytest.raises(error, match=message):
        scale_outputs(torch.ones(1), bad)


def test_a_scale_in_the_place_of_the_loss_is_refused():
    with pytest.raises(TypeError, match=r"the loss comes first: scale_outputs\(loss, scale\)"):
        scale_outputs(DynamicLossScale(), torch.ones(()))


def test_the_scale_may_be_passed_by_its_name_and_by_the_former_one():
    assert list(inspect.signature(scale_outputs).parameters) == ["outputs", "scale"]
    former: dict[str, Any] = {"S": 4.0}
    assert torch.equal(scale_outputs(torch.ones(1), **former), torch.full((1,), 4.0))
    assert torch.equal(scale_outputs(outputs=torch.ones(1), scale=4.0), torch.full((1,), 4.0))
    for wrong in ({"scale": 2.0, **former}, {}):
        with pytest.raises(TypeError, match="scale_outputs"):
            scale_outputs(torch.ones(1), **wrong)


# --- loss * scale ---------------------------------------------------------------------------------


@given(output=tensors(), exponent=exponents, static=st.booleans())
def test_a_tensor_times_a_loss_scale_is_what_scale_outputs_gives(output, exponent, static):
    number = 2.0**exponent
    scale: Any = StaticLossScale(number) if static else DynamicLossScale(init_scale=number)
    expected = scale_outputs(output, scale)
    rebound = output
    rebound *= scale
    products = output * scale, scale * output, torch.mul(output, scale), torch.mul(scale, output)
    for got in (*products, rebound):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert scale.device is None


def test_the_backward_pass_of_a_float16_loss_times_a_scale():
    loss = torch.tensor([1.5], dtype=torch.float16, requires_grad=True)
    (loss * DynamicLossScale(init_scale=2.0**14)).backward()
    assert loss.grad is not None and loss.grad.item() == 2.0**14


@pytest.mark.parametrize("other", [2.0, [torch.ones(1)], torch.ones(1, dtype=torch.int64), "x"])
@pytest.mark.parametrize("product", [lambda x, s: x * s, lambda x, s: s * x])
def test_a_loss_scale_multiplies_floating_tensors_alone(other, product):
    for scale in (StaticLossScale(2.0), DynamicLossScale()):
        with pytest.raises(TypeError, match="a LossScale is multiplied by.*floating-point tensors"):
            product(other, scale)


def test_other_operations_on_a_scale_raise_and_name_value():
    scale: Any = StaticLossScale(2.0)
    with pytest.raises(TypeError, match=r"div_\(\) of a StaticLossScale.*scale\.value"):
        torch.ones(1).div_(scale)
    with pytest.raises(TypeError, match=r"mul\(\) of a StaticLossScale.*scale\.value"):
        torch.mul(torch.ones(1), scale, out=torch.ones(1))
    with pytest.raises(TypeError):
        torch.ones(1) / scale  # pyright: ignore[reportUnusedExpression]
    assert (torch.ones(1) == scale) is False


@pytest.mark.parametrize("product", [lambda x, s: x * s, lambda x, s: s * x])
def test_a_product_is_compiled(product):
    torch.compiler.reset()
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    x = torch.tensor([1.5], dtype=torch.float16)
    for scale in (StaticLossScale(2.0**16), DynamicLossScale()):
        assert compiled(x, scale).tolist() == [98304.0]
    torch.compiler.reset()
