"""The few loops of C++ that backends run besides those made from rules."""

import contextlib
import ctypes
import functools
import sysconfig
from pathlib import Path

import torch

from ampopt_kernels.cpu.build import Library

__all__ = ["PART", "are_compiled", "compile_if_possible", "library", "loops", "object_loops"]

PART = 1 << 14
"""Elements of which a thread takes the sum of squares."""

_SOURCE = """
#include <Python.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

extern "C" void gather(char* const* tensors, const int64_t* bytes, int64_t n, char* scratch) {
    for (int64_t i = 0; i < n; scratch += bytes[i++]) std::memcpy(scratch, tensors[i], bytes[i]);
}

extern "C" void scatter(char* const* tensors, const int64_t* bytes, int64_t n, char* scratch) {
    for (int64_t i = 0; i < n; scratch += bytes[i++]) std::memcpy(tensors[i], scratch, bytes[i]);
}

// Of ``scans``: tensors by address, dtype (as there) and number of elements, in parts
// for one thread each, whose bounds and order do not depend on the number of threads.

struct Part {
    int64_t tensor, start, size;
};

static std::vector<Part> parts_of(const int64_t* sizes, int64_t n) {
    constexpr int64_t SIZE = PART;
    std::vector<Part> parts;
    for (int64_t t = 0; t < n; ++t)
        for (int64_t start = 0; start < sizes[t]; start += SIZE)
            parts.push_back({t, start, std::min(SIZE, sizes[t] - start)});
    return parts;
}

constexpr int64_t WORTH_THREADS = 16;  // parts, which take longer than threads take to start

// Vectors are spelled out below, for compilers make none of sums, whose order they must keep.

// Whether the bits of an element, but for the sign, are those of infinity, or of a NaN, above it.
template <typename T> bool overflowed(const void* tensor, const Part& part, T infinity) {
    constexpr int64_t LANES = 256 / sizeof(T);
    constexpr T BUT_SIGN = std::numeric_limits<T>::max();
    typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
    const T* x = static_cast<const T*>(tensor) + part.start;
    Vector largest = {};
    bool found = false;
    int64_t i = 0;
    for (; i + LANES <= part.size; i += LANES) {
        Vector values;
        std::memcpy(&values, x + i, sizeof(values));
        values &= BUT_SIGN;
        largest = values > largest ? values : largest;
    }
    for (; i < part.size; ++i) found |= (x[i] & BUT_SIGN) >= infinity;
    for (int64_t lane = 0; lane < LANES; ++lane) found |= largest[lane] >= infinity;
    return found;
}

static bool overflowed(const void* tensor, const Part& part, int64_t dtype) {
    switch (dtype) {
        case 0: return overflowed<int16_t>(tensor, part, 0x7C00);
        case 1: return overflowed<int16_t>(tensor, part, 0x7F80);
        case 2: return overflowed<int32_t>(tensor, part, 0x7F800000);
        default: return overflowed<int64_t>(tensor, part, 0x7FF0000000000000);
    }
}

extern "C" int all_finite(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    int found = 0;
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS) reduction(| : found)
    for (int64_t p = 0; p < count; ++p)
        found |= overflowed(tensors[parts[p].tensor], parts[p], dtypes[parts[p].tensor]);
    return !found;
}

// Half is added to half until one number is left, as the eager backend has torch do it; what
// is missing of a power of two are zeros.
template <typename T> double square(const void* tensor, const Part& part) {
    double sums[PART / 2];
    const T* x = static_cast<const T*>(tensor) + part.start;
    int64_t half = 1;
    while (2 * half < part.size) half *= 2;
    const int64_t rest = std::max<int64_t>(part.size - half, 0), first = part.size - rest;
    for (int64_t i = 0; i < rest; ++i)
        sums[i] = double(x[i]) * double(x[i]) + double(x[half + i]) * double(x[half + i]);
    for (int64_t i = rest; i < first; ++i) sums[i] = double(x[i]) * double(x[i]);
    while (half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    return sums[0];
}

extern "C" void sums_of_squares(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads, double* sums
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    std::vector<double> found(count);
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS)
    for (int64_t p = 0; p < count; ++p) {
        const void* tensor = tensors[parts[p].tensor];
        found[p] = dtypes[parts[p].tensor] == 2 ? square<float>(tensor, parts[p])
                                                : square<double>(tensor, parts[p]);
    }
    for (int64_t t = 0; t < n; ++t) sums[t] = 0;
    for (int64_t p = 0; p < count; ++p) sums[parts[p].tensor] += found[p];
}

// What all elements are; NaN if they are not all the same.
extern "C" double common(const float* x, int64_t n) {
    int others = 0;
    for (int64_t i = 0; i < n; ++i) others |= x[i] != x[0];
    return others ? NAN : x[0];
}

// Of ampopt_kernels.cpu.objects, which calls what follows with Python's lock held. 1 is for yes.

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

static c10::TensorImpl* impl_of(PyObject* tensor) {
    return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(tensor) + sizeof(PyObject));
}

// Calls each(tensor) until it says no, or torch that it cannot.
template <typename Each> bool all_of(PyObject* tensors, Each each) {
    try {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i)
            if (!each(PyList_GET_ITEM(tensors, i))) return false;
        return true;
    } catch (...) {
        return false;
    }
}

// Of torch's stable C interface; its handle is the address of a pointer to the tensor. It has the
// linker keep libtorch_cpu, through which libc10 is found.
extern "C" int32_t aoti_torch_get_data_ptr(void* handle, void** address);

extern "C" int addresses(PyObject* tensors, void** found) {
    return all_of(tensors, [&](PyObject* tensor) {
        void* handle = reinterpret_cast<char*>(tensor) + sizeof(PyObject);
        return aoti_torch_get_data_ptr(handle, found++) == 0;
    });
}

extern "C" int bump_versions(PyObject* tensors) {
    return all_of(tensors, [](PyObject* tensor) {
        impl_of(tensor)->bump_version();
        return true;
    });
}

// Calls each(number) for all that a kernel takes for granted of a tensor, until it says no. The
// class is first: another object, such as None, is looked into no further.
template <typename Each> bool layout(PyObject* tensor, Each each) {
    if (!each(reinterpret_cast<int64_t>(Py_TYPE(tensor)))) return false;
    const c10::TensorImpl* impl = impl_of(tensor);
    // Which tells layout, lazy negation and conjugation besides.
    if (!each(static_cast<int64_t>(impl->key_set().raw_repr()))) return false;
    const c10::Device device = impl->device();
    const int64_t dtype = static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype()));
    if (!each(dtype) || !each(int64_t(device.type())) || !each(device.index())) return false;
    if (!each(impl->dim())) return false;
    for (const int64_t size : impl->sizes())
        if (!each(size)) return false;
    for (const int64_t stride : impl->strides())
        if (!each(stride)) return false;
    return true;
}

extern "C" int64_t layouts(PyObject* tensors, int64_t* found, int64_t room) {
    int64_t n = 0;
    const bool known = all_of(tensors, [&](PyObject* tensor) {
        return layout(tensor, [&](int64_t number) {
            if (n < room) found[n] = number;
            return ++n > 0;
        });
    });
    return known ? n : -1;
}

extern "C" int laid_out(PyObject* tensors, const int64_t* known) {
    return all_of(tensors, [&](PyObject* tensor) {
        return layout(tensor, [&](int64_t number) { return number == *known++; });
    });
}
"""


_numbers: ctypes.CDLL | None = None
_objects: ctypes.PyDLL | None = None


@functools.cache
def library() -> Library:
    """What holds the loops.

    Raises:
        OSError: there is no compiler.
    """
    root = Path(torch.__file__).parent
    options = (
        f"-I{root / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-DPART={PART}",
        f"-DTORCH_VERSION={torch.__version__}",  # whose headers they are
    )
    return Library(_SOURCE, options)


def loops() -> ctypes.CDLL:
    """The loops over numbers, compiled in a few seconds, or found among those compiled before.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it failed.
    """
    global _numbers, _objects
    if _numbers is None:
        made = library().load()
        _objects = _of_objects(ctypes.PyDLL(made._name, handle=made._handle))
        _numbers = _of_numbers(made)
    return _numbers


def _of_numbers(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for loop in (library.gather, library.scatter):
        loop.argtypes, loop.restype = (pointer, pointer, count, pointer), None
    library.all_finite.argtypes = (pointer, pointer, pointer, count, count)
    library.sums_of_squares.argtypes = (pointer, pointer, pointer, count, count, pointer)
    library.sums_of_squares.restype = None
    library.common.argtypes, library.common.restype = (pointer, count), ctypes.c_double
    return library


def _of_objects(library: ctypes.PyDLL) -> ctypes.PyDLL:
    pointer, count, objects = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    library.same.argtypes = (objects, objects)
    library.hold.argtypes = (objects, objects, objects)
    library.addresses.argtypes = library.laid_out.argtypes = (objects, pointer)
    library.bump_versions.argtypes = (objects,)
    library.layouts.argtypes, library.layouts.restype = (objects, pointer, count), count
    return library


@functools.cache
def compile_if_possible() -> None:
    """Have :func:`loops` compiled, for whoever can do without: once, whether it succeeds or not."""
    with contextlib.suppress(Exception):  # there may be no compiler, or none of Python's headers
        loops()


def are_compiled() -> bool:
    """Whether :func:`loops` has been called, so that it costs nothing."""
    return _numbers is not None


def object_loops() -> ctypes.PyDLL | None:
    """The loops over Python objects; ``None`` unless they are compiled."""
    return _objects
