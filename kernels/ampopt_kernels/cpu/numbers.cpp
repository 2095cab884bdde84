// What native.py declares, and reductions.py and gather_scatter.py call: loops over numbers in
// memory, which need neither Python nor torch to compile.

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

// Of reductions.py: tensors by address, dtype (as there) and number of elements, in parts for one
// thread each, whose bounds and order do not depend on the number of threads.

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
