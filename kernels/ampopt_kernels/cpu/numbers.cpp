// Loops over the elements of tensors, which numbers.py loads and numbers.py and watch.py call. They
// include no header of Python or torch, so they compile in half a second.

// Without this, g++ uses vectors of half the width of the processor's.
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

// The copies of NativeCopies, of the tensors for which ``present`` is not null. gather writes
// zeros for a tensor that is null itself.
extern "C" void gather(
    char* const* tensors, const int64_t* bytes, int64_t n, char* scratch, char* const* present
) {
    for (int64_t i = 0; i < n; scratch += bytes[i++])
        if (!tensors[i]) std::memset(scratch, 0, bytes[i]);
        else if (present[i]) std::memcpy(scratch, tensors[i], bytes[i]);
}

extern "C" void scatter(
    char* const* tensors, const int64_t* bytes, int64_t n, char* scratch, char* const* present
) {
    for (int64_t i = 0; i < n; scratch += bytes[i++])
        if (present[i]) std::memcpy(tensors[i], scratch, bytes[i]);
}

// Functions below take tensors as arrays of addresses, dtypes (their indices in dtypes.py) and
// numbers of elements. Tensors are divided into parts, each processed by one thread. The bounds and
// the order of parts do not depend on the number of threads, so results do not either.

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

constexpr int64_t WORTH_THREADS = 64;  // fewer parts take less time than starting threads does

// Whether all elements are finite. As integers, the bits of magnitudes are in the order of the
// magnitudes, with infinity and the NaNs above all others.
template <typename T> bool all_below(const void* tensor, const Part& part, T infinity) {
    const T* x = static_cast<const T*>(tensor) + part.start;
    T largest = 0;
    for (int64_t i = 0; i < part.size; ++i)
        largest = std::max<T>(largest, x[i] & std::numeric_limits<T>::max());  // without the sign
    return largest < infinity;
}

static bool all_finite(const void* tensor, const Part& part, int64_t dtype) {
    switch (dtype) {
        case 0: return all_below<int16_t>(tensor, part, 0x7C00);
        case 1: return all_below<int16_t>(tensor, part, 0x7F80);
        case 2: return all_below<int32_t>(tensor, part, 0x7F800000);
        default: return all_below<int64_t>(tensor, part, 0x7FF0000000000000);
    }
}

extern "C" int all_finite(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    int finite = 1;
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS) reduction(& : finite)
    for (int64_t p = 0; p < count; ++p)
        finite &= all_finite(tensors[parts[p].tensor], parts[p], dtypes[parts[p].tensor]);
    return finite;
}

// Each converts the bits of an element to a number, or to its magnitude.
static inline float float32(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
static inline float bfloat16(int16_t bits) { return float32(int32_t(bits) << 16); }
static inline float float16(int16_t bits) {
    bits &= 0x7FFF;
    const int32_t from_infinity_on = (0x7BFF - bits) >> 31;  // vectorized, unlike a branch
    return float32(int32_t(bits) << 13 | (from_infinity_on & 0x7F800000)) * 0x1p112f;
}
static inline double float64(int64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

// Converts elements by ``number``; those of float16 by the processor's own instruction, if it has
// one.
#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
typedef short Halves __attribute__((vector_size(32)));
#define WIDENED(halves) __builtin_ia32_vcvtph2ps512_mask(halves, Floats{}, -1, 4)
#elif defined(__F16C__)
typedef float Floats __attribute__((vector_size(32)));
typedef short Halves __attribute__((vector_size(16)));
#define WIDENED(halves) __builtin_ia32_vcvtph2ps256(halves)
#endif
template <typename T, auto number, typename Vector, typename N, int64_t lanes>
static inline void convert(const Vector& values, N (&numbers)[lanes]) {
#if defined(WIDENED)
    if constexpr (std::is_same_v<T, int16_t>) {
        if constexpr (number == float16) {
            Halves halves;
            for (int64_t lane = 0; lane < lanes; lane += sizeof(Halves) / sizeof(T)) {
                std::memcpy(&halves, (const T*)&values + lane, sizeof(Halves));
                const Floats floats = WIDENED(halves);
                std::memcpy(numbers + lane, &floats, sizeof(Floats));
            }
            return;
        }
    }
#endif
    for (int64_t lane = 0; lane < lanes; ++lane) numbers[lane] = number(values[lane]);
}

// Bytes of a vector. Vectors wider than the processor's may be processed number by number.
#if defined(__AVX512BW__)
constexpr int64_t VECTOR = 64;
#elif defined(__AVX2__)
constexpr int64_t VECTOR = 32;
#else
constexpr int64_t VECTOR = 16;
#endif
template <typename T> struct Vectors {
    static constexpr int64_t LANES = VECTOR / sizeof(T);
    typedef T Vector __attribute__((vector_size(VECTOR)));
};

// x * x + y, rounded twice, or once where that is faster and the same: the square of a float has at
// most 48 bits.
static inline double square_and(double x, double y, bool of_float) {
#if defined(FP_FAST_FMA)
    if (of_float) return std::fma(x, x, y);
#endif
    return x * x + y;
}

// Three halvings of eight numbers, of which ``pair(k)`` is the sum of two: number k and k + 4.
template <typename Pair> static inline double halved(const Pair& pair) {
    return (pair(0) + pair(2)) + (pair(1) + pair(3));
}

// The sum of the squares of one part, whose elements ``each`` is given in vectors.
//
// Squares are added as the eager backend adds them: the second half is added to the first half
// until one number is left; a part that is too short is padded with zeros. Vectors are written out,
// three halvings are done at a time, and the next part is prefetched, so that only memory bandwidth
// limits the loop.
template <typename T, auto number, typename Each>
static inline double squares(const T* x, int64_t size, const Each& each) {
    using Vector = typename Vectors<T>::Vector;
    constexpr int64_t LANES = Vectors<T>::LANES;
    int64_t eighth = LANES;
    while (8 * eighth < size) eighth *= 2;
    T padded[PART];
    if (size < 8 * eighth) {
        std::fill(std::copy_n(x, size, padded), padded + 8 * eighth, 0);
        x = padded;
    }
    double sums[PART / 8];
    for (int64_t i = 0; i < eighth; i += LANES) {
        decltype(number(0)) numbers[8][LANES];
        for (int64_t k = 0; k < 8; ++k) {
            const T* from = x + k * eighth + i;
            __builtin_prefetch(from + PART);
            Vector values;
            std::memcpy(&values, from, VECTOR);
            each(values);
            convert<T, number>(values, numbers[k]);
        }
        for (int64_t lane = 0; lane < LANES; ++lane) {
            constexpr bool of_float = sizeof(T) < sizeof(double);
            const auto pair = [&](int k) {
                const double a = numbers[k][lane], b = numbers[k + 4][lane];
                return square_and(a, b * b, of_float);
            };
            sums[i + lane] = halved(pair);
        }
    }
    while (eighth >= 8) {
        const int64_t n = eighth /= 8;
        #pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            sums[i] = halved([&](int k) { return sums[i + k * n] + sums[i + (k + 4) * n]; });
    }
    while (eighth /= 2)
        for (int64_t i = 0; i < eighth; ++i) sums[i] += sums[eighth + i];
    return sums[0];
}

struct Measures {
    int64_t overflows, nonzero, not_flushed;
    double largest, squares;
};

// Measures one part. Unscaled, magnitudes of at least bounds[0] are not 0, those of at least
// bounds[1] would not flush to 0 in float16, and those of at least bounds[2] are not finite. The
// sum of squares includes the magnitudes that are not finite.
template <typename T, auto number>
Measures measures(const void* tensor, const Part& part, const int64_t* bounds) {
    using Vector = typename Vectors<T>::Vector;
    const T smallest = bounds[0], smallest_not_flushed = bounds[1], infinite = bounds[2];
    const T* x = static_cast<const T*>(tensor) + part.start;
    Vector largest = {}, nonzero = {}, above = {};  // a part has too few for 16 bits
    Measures result = {};
    result.squares = squares<T, number>(x, part.size, [&](Vector values) {
        values &= std::numeric_limits<T>::max();  // without the sign
        largest = values > largest ? values : largest;
        nonzero = values >= smallest ? nonzero + 1 : nonzero;
        above = values >= smallest_not_flushed ? above + 1 : above;
    });
    T most = 0;
    for (int64_t lane = 0; lane < Vectors<T>::LANES; ++lane) {
        most = std::max<T>(most, largest[lane]);
        result.nonzero += nonzero[lane];
        result.not_flushed += above[lane];
    }
    result.overflows = most >= infinite;
    if (result.overflows) {  // seldom, so the largest finite magnitude is searched for only then
        most = 0;
        for (int64_t i = 0; i < part.size; ++i) {
            const T magnitude = x[i] & std::numeric_limits<T>::max();
            const bool finite = magnitude < infinite;
            most = std::max<T>(most, finite ? magnitude : 0);
            result.nonzero -= !finite;
            result.not_flushed -= !finite;
        }
    }
    result.largest = number(most);
    return result;
}

template <typename T, auto number> double squares(const void* tensor, const Part& part) {
    const T* x = static_cast<const T*>(tensor) + part.start;
    return squares<T, number>(x, part.size, [](const auto&) {});
}

static double squares(const void* tensor, const Part& part, int64_t dtype) {
    switch (dtype) {
        case 0: return squares<int16_t, float16>(tensor, part);
        case 1: return squares<int16_t, bfloat16>(tensor, part);
        case 2: return squares<int32_t, float32>(tensor, part);
        default: return squares<int64_t, float64>(tensor, part);
    }
}

// The sum of squares of each tensor.
extern "C" void sums_of_squares(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads, double* sums
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    std::vector<double> partial(count);
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS)
    for (int64_t p = 0; p < count; ++p)
        partial[p] = squares(tensors[parts[p].tensor], parts[p], dtypes[parts[p].tensor]);
    std::fill_n(sums, n, 0.0);
    for (int64_t p = 0; p < count; ++p) sums[parts[p].tensor] += partial[p];
}

static Measures measures(const void* tensor, const Part& part, int64_t dtype, const int64_t* b) {
    switch (dtype) {
        case 0: return measures<int16_t, float16>(tensor, part, b);
        case 1: return measures<int16_t, bfloat16>(tensor, part, b);
        case 2: return measures<int32_t, float32>(tensor, part, b);
        default: return measures<int64_t, float64>(tensor, part, b);
    }
}

// For each tensor, writes whether it overflows, and four columns: the largest finite magnitude,
// unscaled; how many elements are not 0; how many of these would flush to 0; and the sum of squares
// before unscaling. The fourth of its ``bounds`` is 1 if its arithmetic is float64.
extern "C" void measure(
    const void* const* tensors, const int64_t* dtypes, const int64_t* sizes, int64_t n,
    int64_t threads, const int64_t (*bounds)[4], double inverse, bool* flags, double (*columns)[4]
) {
    const std::vector<Part> parts = parts_of(sizes, n);
    const int64_t count = parts.size();
    std::vector<Measures> partial(count);
    #pragma omp parallel for num_threads(threads) if (count >= WORTH_THREADS)
    for (int64_t p = 0; p < count; ++p) {
        const int64_t t = parts[p].tensor;
        partial[p] = measures(tensors[t], parts[p], dtypes[t], bounds[t]);
    }
    std::fill(flags, flags + n, false);
    std::fill(columns[0], columns[n], 0.0);
    for (int64_t p = 0; p < count; ++p) {
        const int64_t t = parts[p].tensor;
        double* of = columns[t];
        flags[t] = flags[t] || partial[p].overflows;
        of[0] = std::max(of[0], partial[p].largest);
        of[1] += partial[p].nonzero;
        of[2] += partial[p].nonzero - partial[p].not_flushed;
        of[3] += partial[p].squares;
    }
    for (int64_t t = 0; t < n; ++t) {
        double& largest = columns[t][0];
        largest = std::abs(bounds[t][3] ? largest * inverse : float(largest) * float(inverse));
        if (bounds[t][2] == 0)  // 1 / scale is infinite: even 0 becomes NaN
            std::fill(columns[t], columns[t] + 3, 0.0);
    }
}

// Does what watch_statistics.note does. ``parts`` has three numbers for each parameter: its first
// chunk, the number of its chunks, and its row in the statistics. Without ``flags``, no chunk has
// overflowed.
extern "C" void note(
    const double (*measures)[4], const float* flags, const int64_t (*parts)[3], int64_t n,
    const double (&attempt)[5], double* statistics, int64_t size, int64_t places, bool notes_step
) {
    const auto [number, cause, scale, norm, loss] = attempt;
    double squares = n > 0 ? 0.0 : NOT_GIVEN;
    bool finite = true;
    for (int64_t i = 0; i < n; ++i) {
        const auto [first, count, place] = parts[i];
        double* row = statistics + COLUMNS * place;
        bool overflowed = false;
        for (int64_t part = first; part < first + count; ++part) {
            const auto [largest, used, flushed, square] = measures[part];
            row[0] = std::max(row[0], largest);
            row[2] += cause > 0 ? 0.0 : used;
            row[3] += cause > 0 ? 0.0 : flushed;
            squares += square;
            overflowed = overflowed || (flags && flags[part] > 0);
        }
        if (overflowed) {
            row[COUNTS + int64_t(row[1]) % (COLUMNS - COUNTS)] = number;
            row[1] += 1;
            finite = false;
        }
    }
    if (!notes_step) return;
    double* totals = statistics + COLUMNS * places;
    double* ring = totals + 1 + CAUSES;
    const int64_t last = (statistics + size - ring) / RING;
    totals[0] = cause > 0 ? totals[0] + 1 : 0.0;
    if (cause > 0) totals[int64_t(cause)] += 1;
    const double entry[RING] = {cause, scale, norm, finite ? squares : INFINITY, loss};
    std::copy_n(entry, RING, ring + RING * ((int64_t(number) - 1) % last));
}

// The value of all elements; NaN if they differ.
extern "C" double common(const float* x, int64_t n) {
    int others = 0;
    for (int64_t i = 0; i < n; ++i) others |= x[i] != x[0];
    return others ? NAN : x[0];
}
