"""The precision policies of other systems, as data for ``Precision.like``.

Operators have torch's names. Operators that torch's autocast runs in float32 on a GPU are listed,
too, because its list for CPUs is shorter. The source of each policy, and what it omits:

- ``O0``, ``O2``, ``O3``: apex ``apex/amp/frontend.py`` (removed from apex in 2025). With the scale
  of 1 that O0 and O3 have, apex applies an overflowed update; here it is skipped.
- ``O1``: the same file, and the lists in ``apex/amp/lists``. Left out: apex bans
  ``binary_cross_entropy``, as torch's autocast does on a GPU, and promotes operands of different
  dtypes, as torch's operators do.
- ``torch``: pytorch ``torch/amp/autocast_mode.py`` and ``torch/amp/grad_scaler.py``.
- ``paddle-O1``: Paddle ``python/paddle/amp/auto_cast.py`` and ``amp_lists.py``. Left out: pooling,
  embedding and scatter, which do no arithmetic.
- ``paddle-O2``: ``decorate(level="O2")`` in the same file. Not reproduced here: Paddle
  runs interpolation in float32.
- ``fleet``: Paddle ``paddle/fluid/framework/distributed_strategy.proto``, ``AMPConfig``, with the
  lists of ``paddle-O1``. ``custom_white_list`` is ``allow=`` here, ``custom_black_list`` ``deny=``,
  and ``custom_black_varnames`` :func:`ampopt.run_in`.
- ``mindspore-O0``, ``mindspore-O2``, ``mindspore-O3``: MindSpore
  ``python/mindspore/train/amp.py``. MindSpore keeps float32 parameters in the cells, and casts
  them where they are used; here the parameters are cast, and the optimizer keeps float32 masters. A
  scale of 1 skips overflowed updates, as for O0.
- ``nnabla-half``: NNabla ``type_config="half"``, with the schedule of
  ``python/src/nnabla/experimental/mixed_precision_training.py``. That retries an overflowed update
  on new data, up to 100 times: ``TrainStep(on_overflow="next_batch")``.
"""

from typing import Any

from torch import float16, float32

from ampopt._step.torch_private import BatchNorm

__all__ = ["LEVELS", "PADDLE_NAMES"]

_BOTH_FLOAT32 = """acos asin binary_cross_entropy_with_logits cosh cosine_similarity cross_entropy
    cumprod cumsum dist erfinv exp expm1 group_norm interpolate layer_norm log log10 log2
    log_softmax nll_loss norm pow prod reciprocal renorm rsqrt sinh softmax softmin softplus
    sum tan triplet_margin_loss""".split()
_APEX_FLOAT32 = """cosine_embedding_loss hinge_embedding_loss kl_div l1_loss local_response_norm
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss normalize poisson_nll_loss
    multilabel_soft_margin_loss smooth_l1_loss soft_margin_loss std var""".split()

_FLOAT32 = {"keep": (), "scaling": 1.0}
_LISTS = {"keep": (), "compute_dtype": float16}
_PADDLE = {**_LISTS, "deny": _BOTH_FLOAT32 + "atanh huber_loss mean square tanhshrink".split()}
_NNABLA = {**_LISTS, "deny": "cross_entropy mean softmax sum".split(), "scaling": "nnabla"}
_HALF = {**_FLOAT32, "param_dtype": float16, "compute_dtype": float16, "output_dtype": float32}
_MASTERS = {**_HALF, "keep": (BatchNorm,), "master_weights": True}

LEVELS: dict[str, dict[str, Any]] = {
    "O0": _FLOAT32,
    "O1": {**_LISTS, "deny": _BOTH_FLOAT32 + _APEX_FLOAT32, "scaling": "apex"},
    "O2": {**_MASTERS, "scaling": "apex"},
    "O3": _HALF,
    "torch": {**_LISTS, "scaling": "torch"},
    "paddle-O1": {**_PADDLE, "scaling": "paddle"},
    "paddle-O2": {**_MASTERS, "scaling": "paddle"},
    "fleet": {**_PADDLE, "scaling": "paddle-fleet"},
    "mindspore-O0": _FLOAT32,
    "mindspore-O2": {**_MASTERS, "scaling": "mindspore"},
    "mindspore-O3": {**_HALF, "master_weights": True},
    "nnabla-half": _NNABLA,
}

PADDLE_NAMES = {
    "cos_sim": "cosine_similarity",
    "cross_entropy2": "cross_entropy",
    "fc": "linear",
    "log_loss": "binary_cross_entropy",
    "lookup_table": "embedding",
    "lookup_table_v2": "embedding",
    "matmul_v2": "matmul",
    "max_pool2d_with_index": "max_pool2d",
    "pnorm": "norm",
    "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "softmax_with_cross_entropy": "cross_entropy",
    "tanh_shrink": "tanhshrink",
    **{f"elementwise_{name}": name for name in ("add", "sub", "mul", "div", "pow")},
    **{f"reduce_{name}": name for name in ("sum", "mean", "prod", "max", "min")},
    **{
        f"{mode}_interp_v2": "interpolate"
        for mode in ("linear", "nearest", "bilinear", "bicubic", "trilinear")
    },
}
"""By the name of an operator in Paddle's lists: its name in torch, where the two differ."""
