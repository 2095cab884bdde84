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

// Magnitudes by their bits, which are in their order: those from bounds[0] on are not 0 once they
// are unscaled, those from bounds[1] on would not flush, and those from bounds[2] on are not finite.
struct Measures {
    int64_t overflowed, used, kept;
    double largest, squares;
};

template <typename T, int64_t LANES>
using Lanes __attribute__((vector_size(LANES * sizeof(T)))) = T;

// The numbers that magnitudes stand for; of half precision by float's bits in their place.
template <typename T, int64_t LANES>
Lanes<double, LANES> numbers(const Lanes<T, LANES>& bits, bool brain) {
    if constexpr (sizeof(T) == sizeof(double)) {
        Lanes<double, LANES> values;
        std::memcpy(&values, &bits, sizeof(values));
        return values;
    } else {
        Lanes<int32_t, LANES> wide = __builtin_convertvector(bits, Lanes<int32_t, LANES>);
        if (sizeof(T) == 2) wide <<= brain ? 16 : 13;
        Lanes<float, LANES> values;
        std::memcpy(&values, &wide, sizeof(values));
        if (sizeof(T) == 2 && !brain) values *= 0x1p112f;
        return __builtin_convertvector(values, Lanes<double, LANES>);
    }
}

template <typename T>
Measures measures(const void* tensor, const Part& part, const int64_t* bounds, bool brain) {
    constexpr int64_t LANES = 64 / sizeof(T);
    constexpr T BUT_SIGN = std::numeric_limits<T>::max();
    typedef Lanes<T, LANES> Vector;
    const T* x = static_cast<const T*>(tensor) + part.start;
    const T used = bounds[0], kept = bounds[1], infinite = bounds[2];
    Vector largest = {}, over = {}, nonzero = {}, above = {};  // a part has too few for 16 bits
    Lanes<double, LANES> squares = {};
    const auto add = [&](Vector values) {
        values &= BUT_SIGN;
        over |= values >= infinite;
        values &= values < infinite;
        largest = values > largest ? values : largest;
        nonzero -= values >= used;
        above -= values >= kept;
        const Lanes<double, LANES> each = numbers<T, LANES>(values, brain);
        squares += each * each;
    };
    int64_t i = 0;
    for (; i + LANES <= part.size; i += LANES) {
        Vector values;
        std::memcpy(&values, x + i, sizeof(values));
        add(values);
    }
    Vector rest = {};
    std::memcpy(&rest, x + i, (part.size - i) * sizeof(T));
    add(rest);
    Measures found = {};
    Vector most = {};
    for (int64_t lane = 0; lane < LANES; ++lane) {
        found.overflowed |= over[lane] != 0;
        most[0] = std::max(most[0], largest[lane]);
        found.used += nonzero[lane];
        found.kept += above[lane];
        found.squares += squares[lane];
    }
    found.largest = numbers<T, LANES>(most, brain)[0];
    return found;
}

static Measures measures(const void* tensor, const Part& part, int64_t dtype, const int64_t* b) {
    switch (dtype) {
        case 0: return measures<int16_t>(tensor, part, b, false);
        case 1: return measures<int16_t>(tensor, part, b, true);
        case 2: return measures<int32_t>(tensor, part, b, false);
        default: return measures<int64_t>(tensor, part, b, false);
    }
}

// Of each tensor, in five columns: whether it overflows, the largest finite magnitude, how many are
// not 0, how many of these flush, and the sum of squares; scaled as they are.
extern "C" void measure(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads, const int64_t* bounds, double* columns
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    std::vector<Measures> found(count);
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS)
    for (int64_t p = 0; p < count; ++p) {
        const int64_t t = parts[p].tensor;
        found[p] = measures(tensors[t], parts[p], dtypes[t], bounds + 3 * t);
    }
    std::fill(columns, columns + 5 * n, 0.0);
    for (int64_t p = 0; p < count; ++p) {
        const int64_t t = parts[p].tensor;
        double* of = columns + 5 * t;
        of[0] = std::max<double>(of[0], found[p].overflowed);
        of[1] = std::max(of[1], found[p].largest);
        of[2] += found[p].used;
        of[3] += found[p].used - found[p].kept;
        of[4] += found[p].squares;
    }
}

// What all elements are; NaN if they are not all the same.
extern "C" double common(const float* x, int64_t n) {
    int others = 0;
    for (int64_t i = 0; i < n; ++i) others |= x[i] != x[0];
    return others ? NAN : x[0];
}
