"""``ampopt.autocast``: the dtype in which each operator runs, however it is called."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampopt
from ampopt.precision.presets import PADDLE_NAMES

LOW, FULL = torch.bfloat16, torch.float32
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)

SOFTMAXES = (
    lambda x: torch.softmax(x, -1),
    lambda x: F.softmax(x, -1),
    lambda x: x.softmax(-1),
    lambda x: torch.nn.Softmax(-1)(x),
)
MATMULS = (lambda x: x @ x.T, lambda x: torch.matmul(x, x.T), lambda x: x.matmul(x.T))


def autocast(**lists: Any) -> ampopt.autocast:
    return ampopt.autocast("cpu", LOW, **lists)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("dtype", [LOW, FULL])
def test_softmax_means_every_softmax(softmax, dtype):
    with autocast(allow=["softmax"]):
        assert softmax(X.to(dtype)).dtype == LOW
    with autocast(deny=["softmax"]):
        assert softmax(X.to(dtype)).dtype == FULL


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_device_may_have_an_index(device):
    with ampopt.autocast(device, LOW, allow=["softmax"]):
        assert X.softmax(-1).dtype == (X @ X.T).dtype == LOW
        assert X.to("meta").softmax(-1).dtype == FULL  # of another device


@pytest.mark.parametrize("matmul", MATMULS)
def test_matmul_is_the_operator_too(matmul):
    with autocast(deny=["matmul"]):
        assert matmul(X.to(LOW)).dtype == FULL
        assert torch.equal(matmul(X), X @ X.T)
    with autocast():
        assert matmul(X).dtype == LOW


def test_operators_with_the_tensor_on_the_right():
    with autocast(allow=["sub", "pow", "add"]):
        assert [(1 - X).dtype, (2**X).dtype, (1 + X).dtype, (X - 1).dtype] == [LOW] * 4


@pytest.mark.parametrize("together", [list, tuple])
def test_lists_of_tensors_are_cast(together):
    with autocast(deny=["cat", "stack"]):
        assert torch.cat(together([X, X.to(LOW)]), dim=0).dtype == FULL
        assert torch.stack(tensors=together([X.to(LOW), X.to(LOW)])).dtype == FULL


def test_operators_that_are_not_listed_run_as_in_torchs_autocast():
    with torch.autocast("cpu", LOW):
        expected = [F.linear(X, X).dtype, F.gelu(X).dtype, F.mse_loss(X.to(LOW), X).dtype]
    with autocast(allow=["softmax"], deny=["exp"]):
        assert [F.linear(X, X).dtype, F.gelu(X).dtype, F.mse_loss(X.to(LOW), X).dtype] == expected


@torch.library.custom_op("systems::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("systems::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


def doubled(x, y, **lists):
    """The results of each way to call the operator, of a float32 ``x`` and ``y`` in ``LOW``."""
    calls = double, torch.ops.systems.double, torch.ops.systems.double.default
    with autocast(**lists):
        return [call(z) for call in calls for z in (x, y)]


def test_operators_of_torch_library_are_named_as_there(fresh_dynamo):
    y = X.to(LOW)
    assert {out.dtype for out in doubled(X, y, allow=["systems::double"])} == {LOW}
    assert {out.dtype for out in doubled(X, y, deny=["systems::double"])} == {FULL}
    # "mul" is in another namespace, and a bare name is that of an operator of torch.
    assert [out.dtype for out in doubled(X, y, deny=["mul"])] == [FULL, LOW] * 3
    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert {out.dtype for out in compiled(X, y, allow=["systems::double"])} == {LOW}


def test_every_name_of_paddles_has_an_operator_of_torch():
    autocast(deny=list(set(PADDLE_NAMES.values())))


@given(dtype=st.sampled_from([torch.float64, torch.int64, torch.bool, torch.complex64]))
def test_other_dtypes_are_left_alone(dtype):
    x = torch.ones(3, 3).to(dtype)
    expected = x.sum().dtype
    with autocast(allow=["sum"]):
        assert x.sum().dtype == expected
    with autocast(deny=["sum"]):
        assert x.sum().dtype == expected


def test_calls_that_write_are_left_alone():
    out = torch.empty(4, 8)
    x = X.clone()
    with autocast(allow=["exp", "relu"]):
        assert torch.exp(X, out=out) is out and out.dtype == FULL
        assert F.relu(x, inplace=True) is x
    assert torch.equal(out, X.exp())


@given(data=st.data())
def test_the_innermost_list_that_names_an_operator_wins(data):
    names = ("softmax", "matmul", "exp")
    depths = data.draw(
        st.lists(st.dictionaries(st.sampled_from(names), st.booleans()), min_size=1, max_size=3)
    )
    expected = {}
    with torch.autocast("cpu", LOW):
        contexts = []
        for low in depths:
            expected |= low
            contexts.append(
                autocast(allow=[n for n in low if low[n]], deny=[n for n in low if not low[n]])
            )
            contexts[-1].__enter__()
        got = {
            "softmax": X.softmax(-1).dtype,
            "matmul": (X.to(LOW) @ X.to(LOW).T).dtype,
            "exp": X.to(LOW).exp().dtype,
        }
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        assert X.softmax(-1).dtype == FULL
    for name, low in expected.items():
        assert got[name] == (LOW if low else FULL), name


@pytest.mark.parametrize("off", [torch.autocast, ampopt.autocast])
def test_switched_off_inside_the_lists_are_off(off):
    with autocast(allow=["softmax"], deny=["matmul"]):
        with off("cpu", enabled=False):
            assert X.softmax(-1).dtype == FULL
            assert (X.to(LOW) @ X.to(LOW).T).dtype == LOW
        assert X.softmax(-1).dtype == LOW


def test_a_torch_autocast_inside_sets_the_dtype():
    with autocast(allow=["softmax"]), torch.autocast("cpu", torch.float16):
        assert X.softmax(-1).dtype == torch.float16


def test_off_after_an_exception():
    with pytest.raises(KeyError), autocast(allow=["softmax"]):
        raise KeyError
    assert X.softmax(-1).dtype == FULL and not torch.is_autocast_enabled("cpu")


def test_entered_again_also_inside_itself():
    context = autocast(allow=["softmax"])
    for _ in range(2):
        with context, context:
            assert X.softmax(-1).dtype == LOW
        assert X.softmax(-1).dtype == FULL and not torch.is_autocast_enabled("cpu")


def test_a_decorator_whose_calls_overlap():
    inside = threading.Barrier(2, timeout=20)

    @autocast(deny=["matmul"])
    def product(first):
        inside.wait()
        if first:
            inside.wait()  # the other has left by then
        return (X @ X.T).dtype

    got = []

    def call():
        got.append(product(True))

    thread = threading.Thread(target=call)
    thread.start()
    got.append(product(False))
    inside.wait()
    thread.join()
    assert got == [FULL, FULL] and not torch.is_autocast_enabled("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-0.5, 0.5, 64).reshape(8, 8))
            self.linear.bias.zero_()

    def forward(self, x):
        return F.softmax(self.linear(x), -1).exp() @ x.T


def gradients(block, call, x=X):
    x = x.clone().requires_grad_()
    with autocast(allow=["softmax"]), autocast(deny=["linear"]):
        y = call(x)
    y.float().square().sum().backward(retain_graph=True)
    y.float().square().sum().backward()  # through what was recomputed, too
    return [y, x.grad, block.linear.weight.grad]


def test_backward_gives_parameters_gradients_of_their_dtype():
    block = Block()
    y, x, weight = gradients(block, block)
    assert (y.dtype, x.dtype, weight.dtype) == (LOW, FULL, FULL)


def test_checkpoints_recompute_under_the_lists():
    block = Block()
    again = copy.deepcopy(block)
    expected = gradients(block, block)
    got = gradients(
        again,
        lambda x: checkpoint(again, x, use_reentrant=False, context_fn=ampopt.autocast.context_fn),
    )
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_part_that_enters_it_by_itself_needs_nothing(use_reentrant):
    block = Block()
    part = autocast(deny=["linear"], allow=["softmax"])(block)
    got = []
    for call in (part, lambda x: checkpoint(part, x, use_reentrant=use_reentrant)):
        block.zero_grad()
        x = X.clone().requires_grad_()
        call(x).float().square().sum().backward()
        got.append([x.grad, block.linear.weight.grad])
    assert all(map(torch.equal, *got))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_operators_within_attention_are_found(need_weights, training):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x = X.reshape(2, 2, 8)
    with torch.set_grad_enabled(training):
        expected = attention(x, x, x, need_weights=need_weights)[0]
        names = ["linear", "matmul", "bmm", "baddbmm", "scaled_dot_product_attention"]
        with autocast(deny=names):
            got = attention(x, x, x, need_weights=need_weights)[0]
    assert got.dtype == FULL
    torch.testing.assert_close(got, expected)


def compiled_alike(function, compiler):
    expected = function(X)
    got = torch.compile(function, fullgraph=True, backend=compiler)(X)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-4)  # two steps of bfloat16 below 8
    torch.stack([t.float().sum() for t in got]).sum().backward()


def attention_from_seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(8, 2)


def example(x, block=Block(), attention=attention_from_seed()):  # noqa: B008
    with autocast(allow=["softmax"], deny=["linear"]):
        first = [block(x), x @ x.T, attention(x, x, x)[0], x.unflatten(-1, (2, 4)) + block(x).sum()]
        with autocast(allow=["exp"], deny=["softmax"]), torch.autocast("cpu", enabled=True):
            first += [x.exp(), x.to(LOW).softmax(-1)]
        with torch.autocast("cpu", enabled=False):
            return [*first, x.softmax(-1)]


# It decomposes operators as Inductor does, and compiles no C++, which takes long.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_made_inside_of_a_compiled_function(fresh_dynamo):
    compiled_alike(example, "aot_eager_decomp_partition")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_made_inside_of_what_inductor_compiles(fresh_dynamo):
    block = Block()

    def function(x):
        with autocast(allow=["softmax"], deny=["linear"]):
            return [block(x), x.softmax(-1)]

    compiled_alike(function, "inductor")


def test_around_a_compiled_function(fresh_dynamo):
    block = Block()
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="eager")
    assert compiled(X).dtype == block(X).dtype == FULL
    with autocast(allow=["exp"]):
        assert compiled(X).dtype == block(X).dtype == LOW
    with autocast(deny=["matmul"]):
        assert compiled(X).dtype == block(X).dtype == FULL


def test_a_compiled_function_that_it_decorates(fresh_dynamo):
    function = autocast(deny=["matmul"])(lambda x: x @ x.T)
    assert torch.compile(function, fullgraph=True, backend="eager")(X).dtype == FULL


BAD = [
    ({"allow": ["sofmax"]}, ValueError, "no operator of torch is called 'sofmax': .*'softmax'"),
    ({"deny": ["iadd"]}, ValueError, "no operator of torch is called 'iadd'"),
    ({"deny": ["zzzzqq"]}, ValueError, "no operator of torch is called 'zzzzqq': .*ampopt.run_in"),
    (
        {"deny": ["softmax_with_cross_entropy"]},
        ValueError,
        "Paddle's operator is 'cross_entropy' in torch",
    ),
    ({"deny": ["reduce_mean"]}, ValueError, "Paddle's operator is 'mean' in torch"),
    ({"allow": ["systems::nothing"]}, ValueError, "import the library that registers it"),
    ({"allow": ["systems::fill"]}, ValueError, "'systems::fill' writes to.*register_autocast"),
    ({"deny": ["__get__"]}, ValueError, "'__get__' writes to"),
    ({"allow": ["exp", "sum"], "deny": ["sum"]}, ValueError, "'sum' is in both allow and deny"),
    ({"allow": ["add_"]}, ValueError, "'add_' writes to its arguments"),
    ({"deny": ["batch_norm"]}, ValueError, "'batch_norm' writes to.*ampopt.cast"),
    ({"allow": "softmax"}, TypeError, "allow must be a list or a tuple of names"),
    ({"allow": True}, TypeError, "allow must be a list or a tuple of names"),
    ({"deny": [torch.softmax]}, TypeError, "deny must be a list or a tuple of names"),
]


@pytest.mark.parametrize("lists, error, message", BAD)
def test_bad_lists_say_what_to_write(lists, error, message):
    with pytest.raises(error, match=message):
        autocast(**lists)
    assert not torch.is_autocast_enabled("cpu")
