"""``ampopt.cast`` and ``ampopt.run_in``: the dtypes of parameters, operations and results."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ampopt

HALVES = (torch.float16, torch.bfloat16)
LOW, FULL = torch.bfloat16, torch.float32


class Net(nn.Module):
    """A model with tied weights, buffers, norms and attention."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(10, 8)
            self.batch_norm = nn.BatchNorm1d(8)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(0.0, 1.0, 4)[:, None])

    def forward(self, ids: torch.Tensor, shift: Any = 0.0) -> Any:
        x = self.embedding(ids) + self.positions + shift
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(self.encoder(x)), "ids": ids}


IDS = torch.arange(8).reshape(2, 4)
NORM_NAMES = {"batch_norm", "encoder.norm1", "encoder.norm2"}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_stay_in_float32_and_all_else_does_not(dtype):
    model = Net()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    assert ampopt.cast(model, dtype) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embedding.weight
    for name, its in dtypes(model).items():
        if name.endswith("num_batches_tracked"):
            assert its == torch.int64
        else:
            assert its == (FULL if name.rpartition(".")[0] in NORM_NAMES else dtype), name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_float32_does_within_rounding(dtype, training):
    model = Net().train(training)
    with torch.set_grad_enabled(training):
        expected = model(IDS)["logits"]
        got = ampopt.cast(model, dtype)(IDS)
    assert got["logits"].dtype == dtype and got["ids"].dtype == torch.int64
    torch.testing.assert_close(got["logits"].float(), expected, atol=0.1, rtol=0.1)


def test_kept_modules_are_fed_float32_and_return_the_models_dtype():
    model = ampopt.cast(Net(), LOW)
    seen = []
    model.encoder.norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.encoder.norm1.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    model(IDS)
    assert seen == [FULL, LOW]


def test_inputs_and_keyword_arguments_are_cast_and_outputs_where_asked():
    model = ampopt.cast(Net(), LOW, outputs=FULL)
    seen = []
    model.batch_norm.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    assert model(IDS, shift=torch.ones(8, dtype=torch.float64))["logits"].dtype == FULL
    assert seen == [LOW]
    assert ampopt.cast(model, LOW)(IDS)["logits"].dtype == LOW
    x = torch.ones(1, 2)
    assert ampopt.cast(nn.Bilinear(2, 2, 1), LOW)(x.to(LOW), input2=x).dtype == LOW


@given(dtypes_=st.lists(st.sampled_from([*HALVES, FULL]), min_size=2, max_size=4))
def test_casting_again_is_casting_once(dtypes_):
    once, again = Net(), Net()
    for dtype in dtypes_:
        ampopt.cast(again, dtype, outputs=FULL)
    ampopt.cast(once, dtypes_[-1], outputs=FULL)
    assert dtypes(once) == dtypes(again)
    assert again(IDS)["logits"].dtype == FULL
    for a, b in zip(once.modules(), again.modules(), strict=True):
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks)
        assert len(a._forward_hooks) == len(b._forward_hooks)


def test_a_model_cast_back_to_float32_casts_only_what_goes_in_and_comes_out():
    model = ampopt.cast(ampopt.cast(Net(), LOW), FULL, outputs=LOW)
    assert model(IDS, shift=torch.ones((), dtype=LOW))["logits"].dtype == LOW
    with pytest.raises(RuntimeError, match="dtype"):  # as in a model that was never cast
        model.head(torch.ones(1, 8, dtype=LOW))


def test_twice_to_the_same_dtype_gives_the_same_bits():
    once = ampopt.cast(Net(), LOW)
    twice = ampopt.cast(ampopt.cast(Net(), LOW), LOW)
    assert torch.equal(once(IDS)["logits"], twice(IDS)["logits"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("change", ["cast", "run_in"])
def test_copies_and_pickles_are_independent_and_alike(copied, change):
    model = Net().eval()
    if change == "cast":
        ampopt.cast(model, LOW)
    else:
        ampopt.run_in(model, LOW)
    twin = copied(model)
    expected = model(IDS)["logits"]
    assert torch.equal(twin(IDS)["logits"], expected)
    with torch.no_grad():
        twin.embedding.weight.zero_()
    assert torch.equal(model(IDS)["logits"], expected)
    assert not torch.equal(twin(IDS)["logits"], expected)
    assert ampopt.cast(twin, LOW, outputs=FULL)(IDS)["logits"].dtype == FULL


# Dynamo looks at each tensor's gradient, and says so where it compiles the hooks by themselves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize(
    ("change", "compiler"),
    [
        (change, compiler)
        for change in (ampopt.cast, ampopt.run_in)
        for compiler in ("eager", "aot_eager_decomp_partition")  # as Inductor, without its C++
    ],
)
def test_compiled_with_hooks_and_backward(change, compiler, fresh_dynamo):
    torch.manual_seed(0)
    model = change(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), LOW)
    x = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
    expected = copy.deepcopy(model)(x)
    got = torch.compile(model, fullgraph=True, backend=compiler)(x)
    assert got.dtype == LOW
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)
    got.sum().backward()
    assert model[0].weight.grad.dtype == model[0].weight.dtype
    assert model[1].running_mean.abs().sum() > 0


def test_existing_gradients_are_cast_too():
    model: Any = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    expected = model.weight.grad.to(LOW)
    ampopt.cast(model, LOW)
    assert torch.equal(model.weight.grad, expected) and model.weight.grad.dtype == LOW
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, 2 * expected)


class Manual(nn.Module):
    """A model like those of MindSpore's scripts: float16 convolutions, and casts in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.low = ampopt.run_in(nn.Conv2d(1, 4, 3), torch.float16)
            self.norm = nn.BatchNorm2d(4)
            self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, bias=False))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.low(x).float()).relu()
        x = self.conv(x.float()).float().flatten(2).transpose(1, 2)
        x = self.attention(x, x, value=x, need_weights=False)[0].float()
        return self.head(x.mean(1).double())


@pytest.mark.parametrize("dtype", HALVES)
def test_modules_cast_what_a_forward_with_casts_by_hand_feeds_them(dtype):
    x = torch.linspace(-1.0, 1.0, 72).reshape(2, 1, 6, 6)
    expected = ampopt.cast(Manual(), torch.float64)(x)
    model = ampopt.cast(Manual(), dtype)
    got = model(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=0.05, rtol=0.05)
    got.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_names_types_and_modules_to_keep():
    model = Net()
    ampopt.cast(model, LOW, keep=["encoder.lin*", nn.BatchNorm1d, model.encoder.norm2])
    kept = {name.rpartition(".")[0] for name, d in dtypes(model).items() if d == FULL}
    assert kept == {"encoder.linear1", "encoder.linear2", "batch_norm", "encoder.norm2"}
    model(IDS)["logits"].sum().backward()


def test_a_module_that_is_in_two_places_is_kept_by_either_name():
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["c"] = model["b"]
    assert dtypes(ampopt.cast(model, LOW, keep=["c"]))["b.weight"] == FULL


@pytest.mark.parametrize("keep", [["*"], [nn.Linear]])
@pytest.mark.parametrize("outputs", [None, FULL])
def test_the_model_itself_may_be_kept(keep, outputs):
    model = ampopt.cast(nn.Linear(8, 2), LOW, keep=keep, outputs=outputs)
    x = torch.ones(1, 8)
    expected = nn.functional.linear(x, model.weight, model.bias)
    got = model(x.to(LOW))
    assert model.weight.dtype == FULL and torch.equal(got, expected.to(outputs or LOW))


def test_modules_inside_a_kept_module_are_kept():
    model = ampopt.cast(Net(), LOW, keep=["encoder", nn.LayerNorm, "batch_norm"])
    assert {d for n, d in dtypes(model).items() if n.startswith("encoder")} == {FULL}
    seen = []
    model.encoder.linear1.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    assert model(IDS)["logits"].dtype == LOW and seen == [FULL]


def test_masters_and_a_step_after_it():
    model = ampopt.cast(Net(), torch.float16, outputs=FULL)
    optimizer = ampopt.AdamW(model.parameters(), lr=1e-2, master_weights=True)
    step = ampopt.TrainStep(
        model,
        lambda out, ids: nn.functional.cross_entropy(out["logits"].flatten(0, 1), ids.flatten()),
        optimizer,
        ampopt.DynamicLossScale(),
        autocast=None,
    )
    losses = [step(IDS, IDS).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_run_in_keeps_its_dtype_inside_any_model():
    model = ampopt.cast(Net(), LOW)
    ampopt.run_in(model.head, FULL)
    seen = []
    model.head.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    with ampopt.autocast("cpu", torch.float16, allow=["linear"]):
        assert model(IDS)["logits"].dtype == FULL
    assert model(IDS)["logits"].dtype == FULL and seen == [FULL, FULL]
    assert model.head.weight.dtype == LOW and model.head.weight is model.embedding.weight


@given(dtype=st.sampled_from([*HALVES, torch.float64]))
def test_run_in_leaves_parameters_and_gives_them_gradients(dtype):
    model: Any = Net()
    before, keys = dtypes(model), list(model.state_dict())
    ampopt.run_in(ampopt.run_in(model, FULL), dtype)
    seen: list[Any] = []
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    out = model(IDS)["logits"]
    out.float().square().sum().backward()
    assert [out.dtype] == seen == [dtype]
    assert dtypes(model) == before and list(model.state_dict()) == keys
    assert all(p.grad is not None and p.grad.dtype == FULL for p in model.parameters())
    assert model.batch_norm.running_mean.abs().sum() > 0
    assert torch.equal(
        model.positions, torch.linspace(0.0, 1.0, 4)[:, None]
    )  # not rounded on the way


def test_run_in_of_a_module_with_two_names_leaves_its_parameters():
    """A layer that is used twice, under a name for each use, as models that share layers have."""
    model: Any = nn.Module()
    model.first = model.second = nn.BatchNorm1d(2)
    model.forward = lambda x: model.second(model.first(x))
    params, x = list(model.parameters()), torch.arange(8.0).reshape(4, 2)
    expected = copy.deepcopy(model.first).double()
    ampopt.run_in(model, torch.float64)
    for _ in range(2):
        out = model(x)
        torch.testing.assert_close(out, expected(expected(x.double())))
        out.square().sum().backward()
    assert list(map(id, model.parameters())) == list(map(id, params))
    assert all(p.grad is not None and p.dtype == FULL for p in params)
    mean = model.first.running_mean
    torch.testing.assert_close(mean, expected.running_mean, check_dtype=False)


def test_run_in_keeps_buffers_tied_and_what_either_module_writes_to_them():
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    other.running_mean = one.running_mean
    model = ampopt.run_in(nn.Sequential(one, nn.Identity(), other), torch.float64)
    model(torch.full((4, 2), 10.0))  # one sees a mean of 10, and other, after it, one of 0
    assert one.running_mean is other.running_mean
    torch.testing.assert_close(one.running_mean, torch.full((2,), 0.9))


def test_run_in_around_kept_modules_in_whichever_order():
    one, other = Net(), Net()
    ampopt.cast(one, LOW)
    ampopt.run_in(one.encoder, FULL)
    ampopt.run_in(other.encoder, FULL)
    ampopt.cast(other, LOW)
    for model in (one, other):
        ampopt.run_in(model.head, FULL)
        seen = []
        inside: list[Any] = [model.encoder.linear1, model.encoder.norm1]
        for inner in inside:
            inner.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.dtype))
        model(IDS)
        assert seen == [FULL, FULL]
    assert torch.equal(one(IDS)["logits"], other(IDS)["logits"])


def test_run_in_inside_of_run_in_uses_parameters_as_they_are():
    inner = nn.Linear(8, 8)
    x = torch.ones(1, 8)
    model = ampopt.run_in(nn.Sequential(ampopt.run_in(inner, FULL)), LOW)
    expected = nn.functional.linear(x, inner.weight, inner.bias).to(LOW)
    assert torch.equal(model(x), expected)


def times_100(module: nn.Module) -> Any:
    """Replace the forward of ``module`` itself, as hooks of Accelerate and patches do."""
    before = module.forward
    module.forward = lambda x: before(x) * 100
    return module.forward


def test_run_in_runs_the_forward_of_the_instance():
    model, x = nn.Linear(8, 2), torch.ones(1, 8)
    times_100(model)
    ampopt.run_in(ampopt.run_in(model, FULL), LOW)
    low = nn.functional.linear(x.to(LOW), model.weight.to(LOW), model.bias.to(LOW))
    assert torch.equal(model(x), low * 100)


def test_a_model_with_a_dtype_of_its_own_is_cast_around_it():
    for inputs in HALVES:
        model = ampopt.cast(ampopt.run_in(nn.Linear(8, 2), FULL), LOW)
        assert model.weight.dtype == LOW and model(torch.ones(1, 8, dtype=inputs)).dtype == FULL
        assert ampopt.cast(model, LOW, outputs=LOW)(torch.ones(1, 8)).dtype == LOW


@pytest.mark.parametrize("change", [ampopt.cast, ampopt.run_in])
def test_parametrized_and_recurrent_modules(change):
    norm = nn.utils.parametrizations.spectral_norm
    x = torch.linspace(-1.0, 1.0, 48).reshape(2, 3, 8)
    for make in (lambda: norm(nn.Linear(8, 4)), lambda: nn.LSTM(8, 4, batch_first=True)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: Any = make()
        expected = copy.deepcopy(model)(x)
        got = change(model, LOW)(x)
        for a, b in zip(got, expected, strict=True):  # a batch, or outputs and states
            for c, d in zip(a, b, strict=True):
                assert c.dtype == LOW
                torch.testing.assert_close(c.float(), d, atol=0.02, rtol=0.02)
        (got if isinstance(got, torch.Tensor) else got[0]).float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        copy.deepcopy(model)(x)


def test_run_in_without_parameters():
    softmax: Any = ampopt.run_in(nn.Softmax(-1), FULL)
    assert softmax(torch.ones(2, 2, dtype=LOW)).dtype == FULL


def on_ranks() -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1.0, 0.75, p.numel()).reshape(p.shape))
    ampopt.run_in(model[2], FULL)
    ampopt.cast(model, LOW, outputs=FULL)
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    expected = model(x).detach()
    fully_shard(model[1])
    fully_shard(model)
    got = model(x)
    got.square().sum().backward()
    optimizer: Any = ampopt.AdamW(model.parameters(), master_weights=True)
    optimizer.unscale_and_step(grads_scaled_by=1.0)
    return [str(p.dtype) for p in model.parameters()] + [torch.equal(got, expected)]


def test_sharded_afterwards(two_ranks):
    half, full = str(LOW), str(FULL)
    assert two_ranks.run(on_ranks) == [[half, half, full, full, half, half, True]] * 2


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    return model


def tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    return model


def quantized() -> nn.Module:
    model = nn.Linear(2, 2)
    values = torch.ones(2).to(torch.float32)
    model.register_buffer("codes", torch.quantize_per_tensor(values, 0.1, 0, torch.qint8))
    return model


BAD = [
    (Net, {"keep": ["encodr*"]}, ValueError, r"no module matches 'encodr\*'.*'encoder'"),
    (Net, {"keep": [nn.Linear(2, 2)]}, ValueError, "no module matches Linear"),
    (Net, {"keep": [3]}, TypeError, r"keep must be .* of types, names and modules, got \[3\]"),
    (Net, {"keep": "encoder"}, TypeError, "keep must be a list or a tuple .* got 'encoder'"),
    (Net, {"keep": nn.LayerNorm}, TypeError, "keep must be a list or a tuple .* got <class"),
    (Net, {"dtype": torch.int8}, ValueError, "dtype must be one of .* got torch.int8"),
    (Net, {"outputs": "half"}, ValueError, "outputs must be one of .* got 'half'"),
    (Net, {"outputs": False}, ValueError, "outputs must be one of .* got False"),
    (tied, {"keep": ["a"]}, ValueError, "b.weight is tied to .* keep both, or neither"),
    (sparse, {}, ValueError, "mask cannot be cast: it is torch.sparse_coo"),
    (quantized, {}, ValueError, "codes cannot be cast: .*torch.qint8"),
    (torch.ao.nn.quantized.ReLU6, {}, ValueError, "ReLU6 cannot be cast: it is quantized"),
    (lambda: nn.LazyLinear(2), {}, ValueError, "weight cannot be cast: it is not initialized"),
    (dict, {}, TypeError, "expected a torch.nn.Module.*, got dict"),
]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("make, options, error, message", BAD)
def test_tensors_that_cannot_be_cast_are_named_and_nothing_changes(make, options, error, message):
    model = make()
    with pytest.raises(error, match=message):
        ampopt.cast(model, **{"dtype": LOW, **options})
    if isinstance(model, nn.Module) and not isinstance(model, nn.LazyLinear):
        assert LOW not in dtypes(model).values()
        assert not any(m._forward_pre_hooks for m in model.modules())
    if not options.keys() & {"keep", "outputs"}:
        with pytest.raises(error, match=message):
            ampopt.run_in(model, options.get("dtype", LOW))


class Scores(nn.Module):
    @ampopt.run_in(torch.float32)
    def similarity(self, a, b=None):
        """Of two matrices."""
        assert not torch.is_autocast_enabled("cpu")
        return a @ (a if b is None else b).T, {"sum": a.sum()}

    def forward(self, x):
        return self.similarity(x.bfloat16(), b=x.bfloat16())


def test_run_in_takes_a_function_also_as_a_decorator(fresh_dynamo):
    x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    model = Scores()
    forward = torch.compile(model, fullgraph=True, backend="eager")
    low = x.bfloat16().float()
    expected = low @ low.T
    with torch.autocast("cpu", torch.bfloat16):
        for scores, sums in (model(x), forward(x)):
            assert torch.equal(scores, expected) and sums["sum"].dtype == torch.float32
        assert ampopt.run_in(torch.matmul, torch.float64)(x, x.T).dtype == torch.float64
        assert torch.matmul(x, x.T).dtype == torch.bfloat16
    assert Scores.similarity.__doc__ == "Of two matrices."


@pytest.mark.parametrize(
    ("what", "named"), [(nn.Linear, "a class"), (3, "int"), (None, "NoneType"), ("linear", "str")]
)
def test_run_in_refuses_what_cannot_be_called(what, named):
    with pytest.raises(TypeError, match=f"expected a torch.nn.Module or a function, got {named}"):
        ampopt.run_in(what, torch.float32)
    with pytest.raises(ValueError, match="dtype must be one of"):
        ampopt.run_in(torch.matmul)  # pyright: ignore
    with pytest.raises(ValueError, match="dtype must be one of"):
        ampopt.run_in(torch.float32, nn.Linear(1, 1))  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_in_keeps_the_buffers_that_a_module_replaces(dtype):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * self.mean  # whose backward needs the mean as it is now
            self.mean = self.mean * 0.5 + x.detach()
            self.cache = torch.cat((self.cache, x.detach()))
            return out

    model: Any = nn.Sequential(Growing())
    ampopt.run_in(model, dtype)
    for _ in range(2):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert (model[0].mean.tolist(), model[0].cache.tolist()) == ([1.5, 1.5], [0, 1, 1, 1, 1])
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
