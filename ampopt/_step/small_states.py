"""States that are kept in 8 or 16 bits: which states are, how they are stored, and conversions.

A state of 8 bits is two tensors of ``optimizer.state[p]``: codes, with the name of the state and in
the shape of the parameter, and float32 scales of its blocks, under :func:`scale_key`. Blocks follow
the order of a contiguous parameter.

In a state dict, codes have a name of their own, :func:`codes_key`. Else a loader that copies by
name, as ``torch.distributed.checkpoint`` does, would take them for the values of the state.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt._step.sharding import dtensor
from ampopt._step.sharding.shards import Run, indices_in, runs_at, runs_of
from ampopt.options import STATE_BITS, rounds_stochastically
from ampopt_kernels.codecs import BFLOAT16, NON_NEGATIVE, SIGNED, Codec, decoded, encoded
from ampopt_kernels.rule import MASTER, Rule, State
from ampopt_kernels.state import codes_key, scale_key

__all__ = [
    "CODES",
    "RANDOM_KEY",
    "add",
    "check_codes",
    "check_whole_blocks",
    "codecs_of",
    "convert_to_codec",
    "decode",
    "has_codes",
    "is_large",
    "restore_names",
    "with_saved_names",
]

RANDOM_KEY = "rounding_key"
"""Key of ``optimizer.state[p]`` for the random key of ``p``; see ``ampopt_kernels.stochastic``."""

LEAST = 1 << 13
"""Elements of the smallest parameter whose states are kept in fewer bits."""

CODES = (torch.int8, torch.uint8)
"""The dtypes of codes whose blocks have scales."""

_MASTER = State(MASTER)
_PARAMS = (torch.float32, torch.float16, torch.bfloat16)


def is_large(param: Tensor) -> bool:
    """Whether states of ``param`` may be kept in fewer bits: from 8192 elements, over all ranks."""
    return param.numel() >= LEAST


def with_saved_names(state: Mapping[str, Any], parts: Iterable[State]) -> dict[str, Any]:
    """A copy of ``state`` in which codes, and the low bits of a master, have the names to save.

    Args:
        state: the state of a parameter.
        parts: the states that rules declare.
    """
    coded_names = {
        part.name
        for part in (_MASTER, *parts)
        if isinstance(state.get(part.name), Tensor) and has_codes(state, part)
    }
    return {codes_key(name) if name in coded_names else name: x for name, x in state.items()}


def restore_names(state: dict[str, Any], parts: Iterable[State] = ()) -> None:
    """Undo :func:`with_saved_names` in place, for the states ``parts`` and the master."""
    for name in (MASTER, *(part.name for part in parts)):
        if (codes := state.pop(codes_key(name), None)) is not None:
            state[name] = codes


def codecs_of(
    rule: Rule, flags: tuple[bool, ...], group: Mapping[str, Any], param: Tensor
) -> tuple[Codec | None, ...]:
    """The codec of each elementwise state of ``param``; ``None`` for full precision.

    Small parameters (see :func:`is_large`), float64 and complex ones have no codecs. One exception:
    a parameter of any size that is rounded stochastically has states of 16 bits at most, which are
    rounded stochastically too.
    """
    bits = STATE_BITS.of(group)
    if not is_large(param) or param.dtype not in _PARAMS:
        bits = 32
    if rounds_stochastically(group, param):
        bits = min(bits, 16)
    return rule.codecs_for(flags, bits)


def stored_codec(part: State, codes: Tensor) -> Codec:
    """The codec of ``codes`` that are in the state of a parameter."""
    if part.codec is not None and part.codec.dtype == codes.dtype:
        return part.codec
    return SIGNED if codes.dtype == SIGNED.dtype else NON_NEGATIVE


def has_codes(state: Mapping[str, Any], part: State) -> bool:
    """Whether ``part`` in ``state``, which exists, has codes and not values."""
    # Only an author's codec keeps codes, with scales, in a dtype that values may have too.
    is_coded = part.codec is not None and scale_key(part.name) in state
    return is_coded or state[part.name].dtype in CODES


def _makes_codes(codec: Codec) -> bool:
    """Whether what ``codec`` stores has to be decoded: yes, except floats without scales."""
    return codec.has_scales or codec.dtype in CODES


def scale_shape(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """The shape of the scales of a parameter of ``shape``.

    There is one scale for each block. Where blocks fit the last dimension, only that dimension is
    shorter than the parameter's; where they fit a row of several dimensions, the shape is (rows,
    blocks of a row). So scales are sharded as the parameter is. Otherwise the shape is (blocks,).
    """
    if shape and shape[-1] % block == 0:
        return (*shape[:-1], shape[-1] // block)
    if len(shape) > 1 and (rest := math.prod(shape[1:])) % block == 0:
        return (shape[0], rest // block)
    return (-(-math.prod(shape) // block),)


def add(state: dict[str, Any], part: State, param: Tensor, codec: Codec, initial: Any) -> None:
    """Add ``part``, with all elements ``initial``, a number or 0-d tensor, to ``state``."""
    own = dtensor.local(param)
    values = torch.empty(own.numel(), dtype=torch.float32, device=own.device).fill_(initial)
    _store(state, part, values, param, codec)


def convert_to_codec(
    state: dict[str, Any], part: State, param: Tensor, codec: Codec | None
) -> bool:
    """Convert ``part`` in ``state``, which exists, to what ``codec`` stores, rounded to nearest.

    Args:
        state: the state of ``param``; changed in place.
        part: the declaration of the state.
        param: the parameter.
        codec: the codec; ``None`` for full precision.

    Returns:
        Whether the state is complete. If not, its dtype may still have to be converted.
    """
    value, is_coded = state[part.name], has_codes(state, part)
    if codec is not None and value.dtype == codec.dtype and is_coded == _makes_codes(codec):
        if not dtensor.local(value).is_contiguous():
            state[part.name] = value.contiguous()
        return True
    if is_coded:
        decode(state, part)
    if codec is None:
        of_16_bits = value.dtype == BFLOAT16.dtype and param.dtype == torch.float32
        if is_coded or (of_16_bits and RANDOM_KEY in state):
            state[part.name] = state[part.name].to(param.dtype)
        return False
    values = dtensor.local(state[part.name]).reshape(-1)
    _store(state, part, values, param, codec)
    return True


def decode(state: dict[str, Any], part: State) -> None:
    """Replace the codes of ``part`` in ``state``, and their scales, by float32 values."""
    codes, scales = state[part.name], state.pop(scale_key(part.name), None)
    own, of_blocks = dtensor.local(codes), None
    if scales is not None:
        of_blocks = dtensor.local(scales).reshape(-1)
    values = decoded(own.reshape(-1), stored_codec(part, codes), of_blocks)
    state[part.name] = dtensor.from_local_like(values.view(own.shape), codes)


def _store(state: dict[str, Any], part: State, values: Tensor, param: Tensor, codec: Codec) -> None:
    """Put codes and scales of ``values``, the elements of this rank, into ``state``."""
    own, (codes, scales) = dtensor.local(param), encoded(values, codec, 0.5)
    state[part.name] = dtensor.from_local_like(codes.view(own.shape), param)
    if scales is not None:
        shape = scale_shape(param.shape, codec.block)
        local = [*map(_length, runs_of(param, shape))] if dtensor.is_dtensor(param) else shape
        state[scale_key(part.name)] = dtensor.from_local_like(scales.view(local), param, shape)


def check_codes(what: str, state: Mapping[str, Any], part: State, param: Tensor) -> None:
    """Raise unless ``part`` in ``state`` has codes with scales that fit them, or only values.

    Raises:
        TypeError: codes without float32 scales, or scales of something else than codes.
        ValueError: the scales have another shape than the blocks of ``param``.
    """
    codes, scales = state[part.name], state.get(scale_key(part.name))
    if not has_codes(state, part):
        if scales is not None:  # codes became floats, as by torch.cat with float zeros
            raise TypeError(
                f"{what} is {codes.dtype} beside {scale_key(part.name)!r}, the scales of its 8-bit "
                "codes, so it may have been computed from the codes as if they were values. If it "
                f"has values, delete {scale_key(part.name)!r} from the state of the parameter; to "
                "edit states, use state_bits=32 or 16"
            )
        return
    codec = stored_codec(part, codes)
    if not codec.has_scales:
        return
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        raise TypeError(
            f"{what} has 8-bit codes, {codes.dtype}, but {scale_key(part.name)!r} is "
            f"{scales.dtype if isinstance(scales, Tensor) else repr(scales)}, and must be their "
            "float32 scales: load both, or delete the state to start with a new one"
        )
    expected_shape = scale_shape(param.shape, codec.block)
    if tuple(scales.shape) != expected_shape:
        raise ValueError(
            f"{what} has scales of shape {tuple(scales.shape)}, and must have {expected_shape}, "
            f"since the parameter has shape {tuple(param.shape)}: load a checkpoint of this model, "
            "or delete the state to start with a new one"
        )


def check_whole_blocks(name: str, param: Any, codecs: Sequence[Codec | None]) -> None:
    """Raise if a shard of ``param`` on any rank would cut a block that has a scale.

    Raises:
        ValueError: it would. The same on all ranks.
    """
    if not dtensor.is_dtensor(param):
        return
    mesh, placements = tuple(param.device_mesh.shape), tuple(param.placements)
    for block in {codec.block for codec in codecs if codec is not None and codec.has_scales}:
        if not _has_whole_blocks(tuple(param.shape), mesh, placements, block):
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} is placed as {placements} on a mesh of "
                f"{mesh}, which would cut a block of {block} elements that share a scale under "
                f"state_bits=8: choose a placement whose shards are multiples of {block} elements, "
                "or put the parameter into a param group with state_bits=16 or 32"
            )


@functools.lru_cache(maxsize=1024)
def _has_whole_blocks(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...], block: int
) -> bool:
    """Whether each rank has whole blocks of the codes, and exactly the scales of these blocks."""
    of_scales = scale_shape(shape, block)
    dims = [dim for p in placements if (dim := getattr(p, "dim", None)) is not None]
    if any(dim >= len(of_scales) for dim in dims):
        return False
    for here in itertools.product(*map(range, mesh)):
        runs = runs_at(shape, mesh, here, placements)
        scale_runs = runs_at(of_scales, mesh, here, placements)
        n, n_scales = (math.prod(map(_length, each)) for each in (runs, scale_runs))
        if not n and not n_scales:
            continue
        indices, of_blocks = indices_in(shape, runs), indices_in(of_scales, scale_runs)
        ends = indices.first + n == math.prod(shape) and not indices.jumps
        if not (
            -(-n // block) == n_scales
            and (n % block == 0 or ends)
            and indices.first == of_blocks.first * block
            and all(number % block == 0 for jump in indices.jumps for number in jump)
        ):
            return False
    return True


def _length(of_dim: Sequence[Run]) -> int:
    """The length of a shard in one dimension."""
    return sum(run.length for run in of_dim)
