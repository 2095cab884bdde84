// The checks that objects.py declares and calls. Each checks hundreds of Python objects, with
// Python's lock held, and returns 1 for yes.

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>

// Whether lists and dicts have the given sizes and contain the very same objects. ``members`` has
// the elements of each list and the keys of each dict, one container after another; ``values`` has
// the values of the dicts. Writes to the bytearray ``changed`` 1 for each container that differs;
// if it is None, stops at the first.
extern "C" int hold(
    PyObject* containers, const int64_t* sizes, PyObject* members, PyObject* values, PyObject* changed
) {
    Py_ssize_t member = 0, value_index = 0;
    bool all = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers); ++i) {
        PyObject* container = PyList_GET_ITEM(containers, i);
        const bool is_list = PyList_Check(container);
        bool same = PyObject_Size(container) == sizes[i];
        if (same && is_list) {
            for (Py_ssize_t j = 0; same && j < sizes[i]; ++j)
                same = PyList_GET_ITEM(container, j) == PyList_GET_ITEM(members, member + j);
        } else if (same) {
            PyObject *key, *value;
            for (Py_ssize_t at = 0, j = 0; same && PyDict_Next(container, &at, &key, &value); ++j)
                same = key == PyList_GET_ITEM(members, member + j) &&
                       value == PyList_GET_ITEM(values, value_index + j);
        }
        if (!same && changed == Py_None) return 0;
        if (!same) PyByteArray_AS_STRING(changed)[i] = 1;
        all = all && same;
        member += sizes[i];
        value_index += is_list ? 0 : sizes[i];
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
        *numbers++ = none ? 0 : reinterpret_cast<int64_t>(THPVariable_Unpack(tensor).data_ptr());
        return true;
    });
}

extern "C" int bump_versions(PyObject* tensors) {
    return all_of(tensors, [](PyObject* tensor) {
        THPVariable_Unpack(tensor).unsafeGetTensorImpl()->bump_version();
        return true;
    });
}

// Calls each(number) for all numbers that make up the layout of a tensor, until it returns false.
// The class comes first, so that an object which is no tensor, such as None, is not unpacked.
template <typename Each> static bool layout(PyObject* tensor, Each each) {
    if (!each(reinterpret_cast<int64_t>(Py_TYPE(tensor)))) return false;
    const c10::TensorImpl* impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
    // The key set also shows layout, lazy negation and conjugation.
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

// Writes the numbers of the layouts of tensors, as many as there is ``room`` for, and returns how
// many there are; -1 if an object is no tensor.
extern "C" int64_t layouts(PyObject* tensors, int64_t* numbers, int64_t room) {
    int64_t n = 0;
    const bool are_tensors = all_of(tensors, [&](PyObject* tensor) {
        return layout(tensor, [&](int64_t number) {
            if (n < room) numbers[n] = number;
            return ++n > 0;
        });
    });
    return are_tensors ? n : -1;
}

// Whether ``tensors`` have the known layouts; None fits any. Writes to the bytearray ``present`` for
// each 0 if it is None, 1 if it has its known layout, and 2 if it has another.
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
