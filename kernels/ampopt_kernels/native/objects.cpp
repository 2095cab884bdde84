// The checks that objects.py declares and calls. Each checks hundreds of Python objects, with
// Python's lock held, and returns 1 for yes.
//
// Of torch's headers, that of TensorImpl is the only one: the others take a compiler five times as
// long.

#include <Python.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

// The tensor of a Python object; CDATA is where objects.py has found the pointer to it.
static c10::TensorImpl* tensor_of(PyObject* object) {
    return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(object) + CDATA);
}

// Whether a dict has n entries: pairs of a key and a value, by identity. It may have others.
static bool has_entries(PyObject* dict, PyObject* const* entries, int64_t n) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    for (; n > 0 && PyDict_Next(dict, &at, &key, &value);) {
        if (key != entries[0]) continue;  // an entry of a user's own
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
// container after another; ``sizes`` how many elements or entries there are, or the complement of
// that for a dict that may have no others. Writes to the bytearray ``changed`` 1 for each container
// that differs; if it is None, stops at the first.
extern "C" int hold(
    PyObject* containers, const int64_t* sizes, PyObject* members, PyObject* changed
) {
    PyObject* const* member = PySequence_Fast_ITEMS(members);
    bool all = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers); ++i) {
        PyObject* container = PyList_GET_ITEM(containers, i);
        bool same = true;
        if (PyList_Check(container)) {
            same = PyList_GET_SIZE(container) == sizes[i];
            for (int64_t j = 0; same && j < sizes[i]; ++j)
                same = PyList_GET_ITEM(container, j) == member[j];
            member += sizes[i];
        } else {
            const int64_t n = sizes[i] < 0 ? ~sizes[i] : sizes[i];
            same = (sizes[i] >= 0 || PyDict_GET_SIZE(container) == n) &&
                   has_entries(container, member, n);
            member += 2 * n;
        }
        if (!same && changed == Py_None) return 0;
        if (!same) PyByteArray_AS_STRING(changed)[i] = 1;
        all = all && same;
    }
    return all;
}

// Calls each(tensor) until it returns false or torch throws; then returns false.
template <typename Each> static bool all_of(PyObject* tensors, Each each) {
    try {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i)
            if (!each(PyList_GET_ITEM(tensors, i))) return false;
        return true;
    } catch (...) {
        return false;
    }
}

extern "C" int addresses(PyObject* tensors, int64_t* numbers) {
    return all_of(tensors, [&](PyObject* tensor) {
        const bool none = tensor == Py_None;
        *numbers++ = none ? 0 : reinterpret_cast<int64_t>(tensor_of(tensor)->mutable_data());
        return true;
    });
}

extern "C" int bump_versions(PyObject* tensors) {
    return all_of(tensors, [](PyObject* tensor) {
        tensor_of(tensor)->bump_version();
        return true;
    });
}

// Calls each(number) for all numbers that make up the layout of a tensor, until it returns false.
template <typename Each> static bool layout(PyObject* tensor, Each each) {
    if (!each(reinterpret_cast<int64_t>(Py_TYPE(tensor)))) return false;
    const c10::TensorImpl* impl = tensor_of(tensor);
    // The key set also shows device type, layout, lazy negation and conjugation.
    if (!each(static_cast<int64_t>(impl->key_set().raw_repr()))) return false;
    const int64_t dtype = static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype()));
    if (!each(dtype) || !each(impl->device().index())) return false;
    const bool was_freed = impl->numel() && !impl->storage().data();
    if (!each(was_freed) || !each(impl->dim())) return false;
    for (const int64_t size : impl->sizes())
        if (!each(size)) return false;
    for (const int64_t stride : impl->strides())
        if (!each(stride)) return false;
    return true;
}

// Writes the numbers of the layouts of tensors, as many as there is ``room`` for, and returns how
// many there are; -1 if one has none.
extern "C" int64_t layouts(PyObject* tensors, int64_t* numbers, int64_t room) {
    int64_t n = 0;
    const bool are_strided = all_of(tensors, [&](PyObject* tensor) {
        return layout(tensor, [&](int64_t number) {
            if (n < room) numbers[n] = number;
            return ++n > 0;
        });
    });
    return are_strided ? n : -1;
}

// Whether ``tensors`` have the known layouts; None fits any. Writes to the bytearray ``present``,
// which has a 2 for each, 0 if it is None, and 1 if it has its known layout.
extern "C" int laid_out(PyObject* tensors, const int64_t* numbers, PyObject* present) {
    char* there = PyByteArray_AS_STRING(present);
    bool same = true;
    const bool read = all_of(tensors, [&](PyObject* tensor) {
        const int64_t* known = numbers;
        const auto is_known = [&](int64_t number) { return number == *known++; };
        *there = tensor == Py_None ? 0 : layout(tensor, is_known) ? 1 : 2;
        same = same && *there < 2;
        ++there;
        numbers += 6 + 2 * numbers[5];  // numbers[5] is the number of dimensions
        return true;
    });
    return same && read;
}
