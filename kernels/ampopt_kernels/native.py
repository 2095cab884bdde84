"""The few loops of C++ that the compiled backend runs besides those made from rules."""

import ctypes
import functools
import math

import torch
from torch import Tensor

__all__ = ["all_finite", "are_compiled", "common", "loops", "object_loops", "sum_of_squares"]

_SOURCE = """
#include <Python.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" void gather(char* const* tensors, const int64_t* bytes, int64_t n, char* scratch) {
    for (int64_t i = 0; i < n; scratch += bytes[i++]) std::memcpy(scratch, tensors[i], bytes[i]);
}

extern "C" void scatter(char* const* tensors, const int64_t* bytes, int64_t n, char* scratch) {
    for (int64_t i = 0; i < n; scratch += bytes[i++]) std::memcpy(tensors[i], scratch, bytes[i]);
}

// Whether no element has all bits of the exponent set, which infinities and NaN have.
template <typename T> int finite(const T* x, int64_t n, T exponent) {
    T others = 0;
    for (int64_t i = 0; i < n; ++i) others |= (x[i] & exponent) == exponent;
    return others == 0;
}

#define FINITE(NAME, T, EXPONENT) \\
    extern "C" int NAME(const T* x, int64_t n) { return finite<T>(x, n, EXPONENT); }
FINITE(finite_16, uint16_t, 0x7C00)
FINITE(finite_b16, uint16_t, 0x7F80)
FINITE(finite_32, uint32_t, 0x7F800000)
FINITE(finite_64, uint64_t, 0x7FF0000000000000)

// What all elements are; NaN if they are not all the same.
extern "C" double common(const float* x, int64_t n) {
    int others = 0;
    for (int64_t i = 0; i < n; ++i) others |= x[i] != x[0];
    return others ? NAN : x[0];
}

// Of ampopt_kernels.objects, which calls these three with Python's lock held.

extern "C" int same(PyObject* found, PyObject* known) {
    const Py_ssize_t n = PyList_GET_SIZE(known);
    if (PyList_GET_SIZE(found) != n) return 0;
    for (Py_ssize_t i = 0; i < n; ++i)
        if (PyList_GET_ITEM(found, i) != PyList_GET_ITEM(known, i)) return 0;
    return 1;
}

extern "C" int hold(PyObject* dicts, PyObject* keys, PyObject* values) {
    const Py_ssize_t n = PyList_GET_SIZE(values);
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); ++i) {
        PyObject *key, *value;
        for (Py_ssize_t at = 0; PyDict_Next(PyList_GET_ITEM(dicts, i), &at, &key, &value); ++place)
            if (place == n || key != PyList_GET_ITEM(keys, place) ||
                value != PyList_GET_ITEM(values, place))
                return 0;
    }
    return place == n;
}

// Of torch's stable C interface; its handle is the address of a pointer to the tensor.
extern "C" int32_t aoti_torch_get_data_ptr(void* handle, void** address);

extern "C" int addresses(PyObject* tensors, void** found) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
        char* object = reinterpret_cast<char*>(PyList_GET_ITEM(tensors, i));
        if (aoti_torch_get_data_ptr(object + sizeof(PyObject), found + i)) return 0;
    }
    return 1;
}

// In lanes and chunks whose order is that of the elements, so that the sum does not depend on the
// number of threads.
template <typename T> double sum_of_squares(const T* x, int64_t n, int64_t threads) {
    constexpr int64_t LANES = 32, CHUNK = 1 << 14;  // of 16 and more, threads earn their start
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    std::vector<double> sums(chunks);
    #pragma omp parallel for num_threads(threads) if (chunks >= 16)
    for (int64_t c = 0; c < chunks; ++c) {
        const T* from = x + c * CHUNK;
        const int64_t left = n - c * CHUNK, size = left < CHUNK ? left : CHUNK;
        double lanes[LANES] = {}, sum = 0;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            for (int64_t j = 0; j < LANES; ++j) {
                const double value = from[i + j];
                lanes[j] += value * value;
            }
        for (; i < size; ++i) sum += double(from[i]) * double(from[i]);
        for (int64_t j = 0; j < LANES; ++j) sum += lanes[j];
        sums[c] = sum;
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

extern "C" double sum_of_squares_32(const float* x, int64_t n, int64_t threads) {
    return sum_of_squares(x, n, threads);
}

extern "C" double sum_of_squares_64(const double* x, int64_t n, int64_t threads) {
    return sum_of_squares(x, n, threads);
}
"""


_FINITE = {
    torch.float16: "finite_16",
    torch.bfloat16: "finite_b16",
    torch.float32: "finite_32",
    torch.float64: "finite_64",
}


@functools.cache
def loops() -> ctypes.CDLL:
    """The loops over numbers, compiled in a few seconds, or found in Inductor's cache.

    Raises:
        Exception: of whatever kind torch raises where the compiler fails.
    """
    from torch._inductor.codecache import CppCodeCache  # seconds to import

    library = CppCodeCache.load(_SOURCE)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for loop in (library.gather, library.scatter):
        loop.argtypes, loop.restype = (pointer, pointer, count, pointer), None
    for name in _FINITE.values():
        getattr(library, name).argtypes = (pointer, count)
    library.common.argtypes, library.common.restype = (pointer, count), ctypes.c_double
    for loop in (library.sum_of_squares_32, library.sum_of_squares_64):
        loop.argtypes, loop.restype = (pointer, count, count), ctypes.c_double
    return library


@functools.cache
def _object_loops() -> ctypes.PyDLL:
    library = ctypes.PyDLL(loops()._name, handle=loops()._handle)
    pointer, objects = ctypes.c_void_p, ctypes.py_object
    library.same.argtypes = (objects, objects)
    library.hold.argtypes = (objects, objects, objects)
    library.addresses.argtypes = (objects, pointer)
    return library


def are_compiled() -> bool:
    """Whether :func:`loops` has been called, so that it costs nothing."""
    return loops.cache_info().currsize > 0


def object_loops() -> ctypes.PyDLL | None:
    """The loops over Python objects; ``None`` unless they are compiled."""
    return _object_loops() if are_compiled() else None


def all_finite(tensor: Tensor) -> bool:
    """Of a dense CPU tensor of a dtype that rules take. On one thread, so for small ones."""
    return bool(getattr(loops(), _FINITE[tensor.dtype])(tensor.data_ptr(), tensor.numel()))


def common(tensor: Tensor) -> float | None:
    """What all elements of a dense float32 CPU tensor are, if they are all the same."""
    value = loops().common(tensor.data_ptr(), tensor.numel())
    return None if math.isnan(value) else value


def sum_of_squares(tensor: Tensor) -> float:
    """In float64, of a dense float32 or float64 CPU tensor; the same for any number of threads."""
    library = loops()
    wide = tensor.dtype == torch.float64
    loop = library.sum_of_squares_64 if wide else library.sum_of_squares_32
    return loop(tensor.data_ptr(), tensor.numel(), torch.get_num_threads())
