// The checks that objects.py declares and calls. Each checks hundreds of Python objects, with
// Python's lock held, and returns 1 for yes.
//
// Of torch's headers, those of TensorImpl are the only ones: the others take a compiler five times
// as long.

#include <Python.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

// The tensor of a Python object; CDATA is where objects.py has found the pointer to it.
static c10::TensorImpl* tensor_of(PyObject* object) {
    return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(object) + CDATA);
}

// Whether a dict has n entries: pairs of a key and a value, by identity. Unless it is exact, it may
// have others, and have them in another order.
static bool has_entries(PyObject* dict, PyObject* const* entries, int64_t n, bool exact) {
    if (exact && PyDict_GET_SIZE(dict) != n) return false;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    for (; n > 0 && PyDict_Next(dict, &at, &key, &value);) {
        if (key != entries[0]) {
            if (exact) return false;
            continue;  // an entry of a user's own
        }
        if (value != entries[1]) return false;
        entries += 2;
        --n;
    }
    for (; n > 0; --n, entries += 2)  // they may be in another order
        if (PyDict_GetItemWithError(dict, entries[0]) != entries[1]) {
            PyErr_Clear();
            return false;
        }
    return true;
}

// Whether lists have the same elements, and dicts the same entries, as before: by identity.
// ``members`` has the elements of each list, and key and value of each entry of the dicts, of one
// container after another; the first ``n_lists`` are lists, or tuples. ``sizes`` has how many
// elements or entries there are, or the complement of that for a dict that may have no others, nor
// the same ones in another order. Writes to the bytearray ``changed`` 1 for each container that
// differs; if it is None, stops at the first. A container of another type counts as changed.
extern "C" int hold(
    PyObject* containers, int64_t n_lists, const int64_t* sizes, PyObject* members,
    PyObject* changed
) {
    PyObject* const* member = PySequence_Fast_ITEMS(members);
    bool all = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers); ++i) {
        PyObject* container = PyList_GET_ITEM(containers, i);
        const int64_t n = sizes[i] < 0 ? ~sizes[i] : sizes[i];
        bool same;
        if (i < n_lists) {
            same = (PyList_Check(container) || PyTuple_Check(container)) &&
                   PySequence_Fast_GET_SIZE(container) == n &&
                   std::equal(member, member + n, PySequence_Fast_ITEMS(container));
            member += n;
        } else {
            same = PyDict_Check(container) && has_entries(container, member, n, sizes[i] < 0);
            member += 2 * n;
        }
        if (!same && changed == Py_None) return 0;
        if (!same) PyByteArray_AS_STRING(changed)[i] = 1;
        all = all && same;
    }
    return all;
}

// Starts to load a tensor into the cache. To wait for memory takes longer than most checks.
static void prefetch(PyObject* tensor) {
    if (tensor == Py_None) return;
    const char* impl = reinterpret_cast<const char*>(tensor_of(tensor));
    for (size_t at = 0; at < sizeof(c10::TensorImpl); at += 64) __builtin_prefetch(impl + at);
}

// Calls each(tensor) until it returns false or torch throws; then returns false.
template <typename Each> static bool all_of(PyObject* tensors, Each each) {
    constexpr Py_ssize_t AHEAD = 8;
    const Py_ssize_t n = PyList_GET_SIZE(tensors);
    try {
        for (Py_ssize_t i = 0; i < n; ++i) {
            if (i + AHEAD < n) prefetch(PyList_GET_ITEM(tensors, i + AHEAD));
            if (!each(PyList_GET_ITEM(tensors, i))) return false;
        }
        return true;
    } catch (...) {
        return false;
    }
}

// The gradient of a tensor; null if it has none.
static c10::TensorImpl* gradient_of(const c10::TensorImpl* tensor) {
    // An at::Tensor, whose header takes long to compile, is one pointer; objects.py tries it out.
    auto* gradient = *reinterpret_cast<c10::TensorImpl* const*>(&tensor->grad());
    return gradient == c10::UndefinedTensorImpl::singleton() ? nullptr : gradient;
}

extern "C" int bump_versions(PyObject* tensors) {
    return all_of(tensors, [](PyObject* tensor) {
        tensor_of(tensor)->bump_version();
        return true;
    });
}

// Elements from the first to the last place in memory of a strided tensor that is not empty.
static int64_t span(const c10::TensorImpl* impl) {
    int64_t n = 1;
    for (int64_t i = 0; i < impl->dim(); ++i) n += (impl->size(i) - 1) * impl->stride(i);
    return n;
}

// Whether the storages of tensors hold all of their elements.
extern "C" int all_have_memory(PyObject* tensors) {
    return all_of(tensors, [](PyObject* tensor) {
        const c10::TensorImpl* impl = tensor_of(tensor);
        const int64_t n = impl->numel() ? impl->storage_offset() + span(impl) : 0;
        return n * impl->itemsize() <= impl->storage().nbytes();
    });
}

// Whether no address ranges of two tensors overlap.
extern "C" int are_apart(PyObject* tensors) {
    std::vector<std::pair<int64_t, int64_t>> ranges;
    const bool were_read = all_of(tensors, [&](PyObject* tensor) {
        c10::TensorImpl* impl = tensor_of(tensor);
        const auto start = reinterpret_cast<int64_t>(impl->mutable_data());
        if (start && impl->numel()) ranges.emplace_back(start, start + span(impl) * impl->itemsize());
        return true;
    });
    std::sort(ranges.begin(), ranges.end());
    bool apart = true;
    for (size_t i = 1; i < ranges.size(); ++i)
        apart = apart && ranges[i - 1].second <= ranges[i].first;
    return were_read && apart;
}

// Calls each(number) for all numbers that make up the layout of a tensor, until it returns false.
template <typename Each> static bool layout(const c10::TensorImpl* impl, Each each) {
    // The key set also shows device type, layout, lazy negation and conjugation.
    if (!each(static_cast<int64_t>(impl->key_set().raw_repr()))) return false;
    const bool was_freed = impl->numel() && !impl->storage().data();
    const int64_t dtype = static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype()));
    if (!each(dtype << 1 | was_freed)) return false;
    if (!each(impl->dim() << 8 | (impl->device().index() & 255))) return false;
    for (const int64_t size : impl->sizes())
        if (!each(size)) return false;
    for (const int64_t stride : impl->strides())
        if (!each(stride)) return false;
    return true;
}

// Describes the layouts of tensors: writes to ``begins`` where in ``numbers`` each begins, those
// that are equal at one place, as many numbers as there is ``room`` for. Returns how many there are,
// and -1 if a tensor has no layout.
extern "C" int64_t describe(PyObject* tensors, int64_t* begins, int64_t* numbers, int64_t room) {
    std::map<std::vector<int64_t>, int64_t> known;
    int64_t n = 0;
    const bool are_strided = all_of(tensors, [&](PyObject* tensor) {
        std::vector<int64_t> own;
        layout(tensor_of(tensor), [&](int64_t number) { return own.push_back(number), true; });
        const auto [at, is_new] = known.emplace(own, n);
        *begins++ = at->second;
        if (is_new)
            for (const int64_t number : own) {
                if (n < room) numbers[n] = number;
                ++n;
            }
        return true;
    });
    return are_strided ? n : -1;
}

// Reads tensors, or their gradients: writes the address of the first element of each, 0 for None or
// no gradient, EMPTY for one without elements; and to the bytearray ``fits`` 0 for None or no
// gradient, 1 for a tensor that has the layout that describe has described (any, if ``numbers`` is
// null), and 2, without its address, for another. Returns whether there is no other.
extern "C" int read_tensors(
    PyObject* tensors, int of_gradients, const int64_t* begins, const int64_t* numbers,
    int64_t* addresses, PyObject* fits
) {
    char* fit = PyByteArray_AS_STRING(fits);
    bool all_fit = true;
    const bool were_read = all_of(tensors, [&](PyObject* tensor) {
        c10::TensorImpl* impl = tensor == Py_None ? nullptr : tensor_of(tensor);
        if (impl && of_gradients) impl = gradient_of(impl);
        bool fits_here = true;
        if (impl && numbers) {
            const int64_t* number = numbers + *begins++;
            fits_here = layout(impl, [&](int64_t own) { return own == *number++; });
        } else if (numbers) {
            ++begins;
        }
        if (impl && fits_here)
            *addresses = impl->numel() ? reinterpret_cast<int64_t>(impl->mutable_data()) : EMPTY;
        *fit++ = impl ? (fits_here ? 1 : 2) : 0;
        ++addresses;
        all_fit = all_fit && fits_here;
        return true;
    });
    return were_read && all_fit;
}
