// The operations of PTX that compute, by name: each is a function of typed operands, run for 32 lanes.
//
// A register holds 64 bits. `get` and `put` say how a type lies in it; an operation is found by the
// name that the PTX has, without modifiers that mean nothing here (see ptx.py).
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

using u64 = uint64_t; using u32 = uint32_t; using u16 = uint16_t; using u8 = uint8_t;
using i64 = int64_t; using i32 = int32_t; using i16 = int16_t; using i8 = int8_t;
using f16 = _Float16;

struct bf16 {  // rounded to nearest, ties to even
    u16 bits;
    bf16() = default;
    bf16(float x) {
        u32 i = std::bit_cast<u32>(x);
        bits = x != x ? 0x7fff : (i + 0x7fff + (i >> 16 & 1)) >> 16;
    }
    operator float() const { return std::bit_cast<float>((u32)bits << 16); }
};
struct ftz {  // float32 whose subnormal numbers are 0
    float value;
    ftz(float x) : value(std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x) {}
    operator float() const { return value; }
};
template <class T> struct high { T value; operator float() const { return value; } };  // of a pair

template <class T> T get(u64 x) {
    if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>((u32)x);
    else if constexpr (std::is_same_v<T, ftz>) return ftz(std::bit_cast<float>((u32)x));
    else if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(x);
    else if constexpr (std::is_same_v<T, f16>) return std::bit_cast<f16>((u16)x);
    else if constexpr (std::is_same_v<T, bf16>) return std::bit_cast<bf16>((u16)x);
    else if constexpr (std::is_same_v<T, high<f16>> || std::is_same_v<T, high<bf16>>)
        return {get<decltype(T::value)>(x >> 16)};
    else return (T)x;
}
template <class T> u64 put(T x) {  // a NaN of an operation has one pattern
    if constexpr (std::is_same_v<T, bool>) return x;
    else if constexpr (std::is_same_v<T, float>) return x != x ? 0x7fffffffu : std::bit_cast<u32>(x);
    else if constexpr (std::is_same_v<T, ftz>) return put(ftz(x.value).value);
    else if constexpr (std::is_same_v<T, double>) return x != x ? 0x7ff8ull << 48 : std::bit_cast<u64>(x);
    else if constexpr (std::is_same_v<T, f16>) return x != x ? 0x7fff : std::bit_cast<u16>(x);
    else if constexpr (std::is_same_v<T, bf16>) return x.bits;
    else if constexpr (sizeof(T) == 1) return (u16)x;  // registers have 16 bits at least
    else return (std::make_unsigned_t<T>)x;
}

using Lanes = u64*;
using Operation = void (*)(Lanes result, const Lanes* operands, u32 active);

template <class F, class R, class... A, size_t... k>
void each_lane(R (F::*)(A...) const, std::index_sequence<k...>, Lanes result, const Lanes* operands, u32 active) {
    for (int lane = 0; lane < 32; lane++) {
        u64 value = put<R>(F{}(get<A>(operands[k][lane])...));
        result[lane] = active >> lane & 1 ? value : result[lane];
    }
}
template <class F, class R, class... A> constexpr size_t count(R (F::*)(A...) const) { return sizeof...(A); }
template <class F> void run(Lanes result, const Lanes* operands, u32 active) {
    each_lane<F>(&F::operator(), std::make_index_sequence<count(&F::operator())>(), result, operands, active);
}

struct Table {
    std::unordered_map<std::string, Operation> found;
    template <class F> void add(const std::string& name, F) { found[name] = &run<F>; }
};

// --- numbers ----------------------------------------------------------------------------------------

template <class T> T larger(T a, T b) {  // of a number and a NaN the number; 0 above -0
    return a != a ? b : b != b ? a : a == b ? (std::signbit((double)a) ? b : a) : a > b ? a : b;
}
template <class T> T smaller(T a, T b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit((double)a) ? a : b) : a < b ? a : b;
}
template <class I, class X> I to_integer(X x) {  // the nearest one there is; what a NaN gives is odd
    using U = std::make_unsigned_t<I>;
    if (x != x) return sizeof(I) == 8 || sizeof(X) == 8 ? (I)((U)1 << (8 * sizeof(I) - 1)) : 0;
    if ((double)x <= (double)std::numeric_limits<I>::min()) return std::numeric_limits<I>::min();
    if ((double)x >= (double)std::numeric_limits<I>::max()) return std::numeric_limits<I>::max();
    return (I)x;
}

template <class T> void comparisons(Table& t, const std::string& type) {
    t.add("setp.lt." + type, [](T a, T b) { return a < b; });
    t.add("setp.le." + type, [](T a, T b) { return a <= b; });
    t.add("setp.gt." + type, [](T a, T b) { return a > b; });
    t.add("setp.ge." + type, [](T a, T b) { return a >= b; });
    t.add("setp.eq." + type, [](T a, T b) { return a == b; });
    if constexpr (std::is_integral_v<T>) {
        t.add("setp.ne." + type, [](T a, T b) { return a != b; });
    } else {  // "u": also where one is a NaN
        t.add("setp.ne." + type, [](T a, T b) { return a < b || a > b; });
        t.add("setp.ltu." + type, [](T a, T b) { return !(a >= b); });
        t.add("setp.leu." + type, [](T a, T b) { return !(a > b); });
        t.add("setp.gtu." + type, [](T a, T b) { return !(a <= b); });
        t.add("setp.geu." + type, [](T a, T b) { return !(a < b); });
        t.add("setp.equ." + type, [](T a, T b) { return !(a < b || a > b); });
        t.add("setp.neu." + type, [](T a, T b) { return a != b; });
        t.add("setp.num." + type, [](T a, T b) { return a == a && b == b; });
        t.add("setp.nan." + type, [](T a, T b) { return a != a || b != b; });
    }
}

template <class T, class X> void arithmetic(Table& t, const std::string& type) {  // X computes T
    for (std::string round : {"", ".rn"}) {
        t.add("add" + round + type, [](T a, T b) { return T((X)a + (X)b); });
        t.add("sub" + round + type, [](T a, T b) { return T((X)a - (X)b); });
        t.add("mul" + round + type, [](T a, T b) { return T((X)a * (X)b); });
    }
    t.add("fma.rn" + type, [](T a, T b, T c) { return T(std::fma((X)a, (X)b, (X)c)); });
    for (std::string how : {".rn", ".full", ".approx"})
        t.add("div" + how + type, [](T a, T b) { return T((X)a / (X)b); });
    for (std::string how : {".rn", ".approx"}) {
        t.add("sqrt" + how + type, [](T a) { return T(std::sqrt((X)a)); });
        t.add("rcp" + how + type, [](T a) { return T(1 / (X)a); });
    }
    t.add("rsqrt.approx" + type, [](T a) { return T((X)(1 / std::sqrt((double)(X)a))); });
    t.add("ex2.approx" + type, [](T a) { return T(std::exp2((X)a)); });
    t.add("lg2.approx" + type, [](T a) { return T(std::log2((X)a)); });
    t.add("sin.approx" + type, [](T a) { return T(std::sin((X)a)); });
    t.add("cos.approx" + type, [](T a) { return T(std::cos((X)a)); });
    t.add("tanh.approx" + type, [](T a) { return T(std::tanh((X)a)); });
    t.add("max" + type, [](T a, T b) { return T(larger((X)a, (X)b)); });
    t.add("min" + type, [](T a, T b) { return T(smaller((X)a, (X)b)); });
    t.add("max.NaN" + type, [](T a, T b) { return (X)a != (X)a ? a : (X)b != (X)b ? b : T(larger((X)a, (X)b)); });
    t.add("min.NaN" + type, [](T a, T b) { return (X)a != (X)a ? a : (X)b != (X)b ? b : T(smaller((X)a, (X)b)); });
    std::string twice = type.substr(type.rfind('.'));
    std::string pair = type.substr(0, type.rfind('.')) + twice + twice;
    t.add("cvt.rni" + pair, [](T a) { return T(std::nearbyint((X)a)); });
    t.add("cvt.rmi" + pair, [](T a) { return T(std::floor((X)a)); });
    t.add("cvt.rpi" + pair, [](T a) { return T(std::ceil((X)a)); });
    t.add("cvt.rzi" + pair, [](T a) { return T(std::trunc((X)a)); });
}

template <class U> void sign_bits(Table& t, const std::string& type) {  // also of a NaN
    constexpr U sign = (U)1 << (8 * sizeof(U) - 1);
    t.add("neg" + type, [](U a) { return (U)(a ^ sign); });
    t.add("abs" + type, [](U a) { return (U)(a & ~sign); });
    t.add("copysign" + type, [](U a, U b) { return (U)((b & ~sign) | (a & sign)); });
}

template <class I> bool is_minus_one(I x) { return std::is_signed_v<I> && x == (I)-1; }

template <class S> void integers(Table& t, const std::string& bits) {
    using U = std::make_unsigned_t<S>;
    constexpr u32 width = 8 * sizeof(S);
    auto both = [&](const std::string& name, auto f) { t.add(name + ".s" + bits, f); t.add(name + ".u" + bits, f); };
    both("add", [](U a, U b) { return (U)(a + b); });
    both("sub", [](U a, U b) { return (U)(a - b); });
    both("mul.lo", [](U a, U b) { return (U)((u64)a * b); });
    both("mad.lo", [](U a, U b, U c) { return (U)((u64)a * b + c); });
    t.add("neg.s" + bits, [](U a) { return (U)(0 - a); });
    t.add("abs.s" + bits, [](S a) { return (U)(a < 0 ? 0 - (U)a : (U)a); });
    auto signed_or_not = [&]<class I>(const std::string& type, I) {
        t.add("min." + type, [](I a, I b) { return std::min(a, b); });
        t.add("max." + type, [](I a, I b) { return std::max(a, b); });
        t.add("shr." + type, [](I a, u32 n) { return (I)(n < width ? a >> n : a < 0 ? -1 : 0); });
        t.add("div." + type, [](I a, I b) { return b == 0 ? (I)-1 : is_minus_one(b) ? (I)(0 - (U)a) : (I)(a / b); });
        t.add("rem." + type, [](I a, I b) { return b == 0 ? a : is_minus_one(b) ? (I)0 : (I)(a % b); });
        comparisons<I>(t, type);
    };
    signed_or_not("s" + bits, S{});
    signed_or_not("u" + bits, U{});
    comparisons<U>(t, "b" + bits);
    t.add("and.b" + bits, [](U a, U b) { return (U)(a & b); });
    t.add("or.b" + bits, [](U a, U b) { return (U)(a | b); });
    t.add("xor.b" + bits, [](U a, U b) { return (U)(a ^ b); });
    t.add("not.b" + bits, [](U a) { return (U)~a; });
    t.add("shl.b" + bits, [](U a, u32 n) { return (U)(n < width ? (u64)a << n : 0); });
    for (std::string type : {"b", "s", "u", "f"}) {
        t.add("mov." + type + bits, [](U a) { return a; });
        t.add("cvta." + type + bits, [](U a) { return a; });
        t.add("selp." + type + bits, [](U a, U b, bool first) { return first ? a : b; });
    }
}

template <class A, class B> void conversion(Table& t, const std::string& to, const std::string& from) {
    t.add("cvt." + to + "." + from, [](B b) { return (A)b; });
}
template <class A> void conversions(Table& t, const std::string& type) {
    conversion<A, i8>(t, type, "s8"); conversion<A, u8>(t, type, "u8");
    conversion<A, i16>(t, type, "s16"); conversion<A, u16>(t, type, "u16");
    conversion<A, i32>(t, type, "s32"); conversion<A, u32>(t, type, "u32");
    conversion<A, i64>(t, type, "s64"); conversion<A, u64>(t, type, "u64");
    if constexpr (std::is_integral_v<A>) {
        t.add("cvt.rzi." + type + ".f32", [](float a) { return to_integer<A>(std::trunc(a)); });
        t.add("cvt.rzi.ftz." + type + ".f32", [](ftz a) { return to_integer<A>(std::trunc((float)a)); });
        t.add("cvt.rzi." + type + ".f64", [](double a) { return to_integer<A>(std::trunc(a)); });
        t.add("cvt.rni." + type + ".f32", [](float a) { return to_integer<A>(std::nearbyint(a)); });
        t.add("cvt.rni.ftz." + type + ".f32", [](ftz a) { return to_integer<A>(std::nearbyint((float)a)); });
        t.add("cvt.rni." + type + ".f64", [](double a) { return to_integer<A>(std::nearbyint(a)); });
        t.add("cvt.rmi." + type + ".f32", [](float a) { return to_integer<A>(std::floor(a)); });
        t.add("cvt.rmi." + type + ".f64", [](double a) { return to_integer<A>(std::floor(a)); });
    }
}

template <class T> void halves(Table& t, const std::string& type) {
    comparisons<T>(t, type);
    comparisons<T>(t, type + "x2.lo");
    comparisons<high<T>>(t, type + "x2.hi");
    t.add("cvt.f32." + type, [](T a) { return (float)a; });
    t.add("cvt.f64." + type, [](T a) { return (double)(float)a; });
    t.add("cvt.rn." + type + ".f32", [](float a) { return (T)a; });
    t.add("cvt.rn." + type + "x2.f32", [](float a, float b) { return (u32)(put((T)a) << 16 | put((T)b)); });
    sign_bits<u16>(t, "." + type);
    t.add("neg." + type + "x2", [](u32 a) { return a ^ 0x80008000u; });
    t.add("abs." + type + "x2", [](u32 a) { return a & 0x7fff7fffu; });
}

// Bits of two words, of which `b` is the upper.
inline u32 picked_bytes(u32 a, u32 b, u32 picks) {
    u64 both = (u64)b << 32 | a;
    u32 word = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = picks >> 4 * i & 15, byte = both >> 8 * (pick & 7) & 255;
        word |= (pick & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return word;
}

inline Table operations() {
    Table t;
    arithmetic<float, float>(t, ".f32");
    arithmetic<ftz, float>(t, ".ftz.f32");
    arithmetic<double, double>(t, ".f64");
    comparisons<float>(t, "f32"); comparisons<ftz>(t, "ftz.f32"); comparisons<double>(t, "f64");
    sign_bits<u32>(t, ".f32"); sign_bits<u64>(t, ".f64");
    t.add("abs.ftz.f32", [](ftz a) { return ftz(std::fabs((float)a)); });
    t.add("neg.ftz.f32", [](ftz a) { return ftz(-(float)a); });
    // What Newton's steps make 1/x of: the upper half.
    t.add("rcp.approx.ftz.f64", [](u64 a) { return std::bit_cast<u64>(1 / std::bit_cast<double>(a >> 32 << 32)) >> 32 << 32; });
    integers<i16>(t, "16"); integers<i32>(t, "32"); integers<i64>(t, "64");
    t.add("mul.wide.s16", [](i16 a, i16 b) { return (i32)a * b; });
    t.add("mul.wide.u16", [](u16 a, u16 b) { return (u32)a * b; });
    t.add("mul.wide.s32", [](i32 a, i32 b) { return (i64)a * b; });
    t.add("mul.wide.u32", [](u32 a, u32 b) { return (u64)a * b; });
    t.add("mad.wide.s16", [](i16 a, i16 b, u32 c) { return (u32)((i32)a * b) + c; });
    t.add("mad.wide.u16", [](u16 a, u16 b, u32 c) { return (u32)a * b + c; });
    t.add("mad.wide.s32", [](i32 a, i32 b, u64 c) { return (u64)((i64)a * b) + c; });
    t.add("mad.wide.u32", [](u32 a, u32 b, u64 c) { return (u64)a * b + c; });
    t.add("mul.hi.s32", [](i32 a, i32 b) { return (i32)((i64)a * b >> 32); });
    t.add("mul.hi.u32", [](u32 a, u32 b) { return (u32)((u64)a * b >> 32); });
    t.add("mul.hi.s64", [](i64 a, i64 b) { return (i64)((__int128)a * b >> 64); });
    t.add("mul.hi.u64", [](u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); });
    // The carry of mad.lo.cc is an operand more of what reads it: see ptx.py.
    t.add("carry.u32", [](u32 a, u32 b, u32 c) { return (u32)((((u64)a * b & ~0u) + c) >> 32); });
    t.add("madc.hi.u32", [](u32 a, u32 b, u32 c, u32 carry) { return (u32)(((u64)a * b >> 32) + c + carry); });
    conversions<i8>(t, "s8"); conversions<u8>(t, "u8"); conversions<i16>(t, "s16"); conversions<u16>(t, "u16");
    conversions<i32>(t, "s32"); conversions<u32>(t, "u32"); conversions<i64>(t, "s64"); conversions<u64>(t, "u64");
    conversions<float>(t, "rn.f32"); conversions<double>(t, "rn.f64");
    halves<f16>(t, "f16"); halves<bf16>(t, "bf16");
    t.add("cvt.rn.f16.f64", [](double a) { return (f16)a; });
    t.add("cvt.f64.f32", [](float a) { return (double)a; });
    t.add("cvt.rn.f32.f64", [](double a) { return (float)a; });
    t.add("and.pred", [](bool a, bool b) { return a && b; });
    t.add("or.pred", [](bool a, bool b) { return a || b; });
    t.add("xor.pred", [](bool a, bool b) { return a != b; });
    t.add("not.pred", [](bool a) { return !a; });
    t.add("mov.pred", [](bool a) { return a; });
    t.add("popc.b32", [](u32 a) { return (u32)std::popcount(a); });
    t.add("popc.b64", [](u64 a) { return (u32)std::popcount(a); });
    t.add("clz.b32", [](u32 a) { return (u32)std::countl_zero(a); });
    t.add("clz.b64", [](u64 a) { return (u32)std::countl_zero(a); });
    t.add("prmt.b32", [](u32 a, u32 b, u32 picks) { return picked_bytes(a, b, picks); });
    t.add("bfe.u32", [](u32 a, u32 at, u32 n) {
        at &= 255, n &= 255;
        return at > 31 || n == 0 ? 0 : a >> at & (n > 31 ? ~0u : (1u << n) - 1);
    });
    t.add("shf.l.wrap.b32", [](u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) << (n & 31) >> 32); });
    t.add("shf.r.wrap.b32", [](u32 a, u32 b, u32 n) { return (u32)(((u64)b << 32 | a) >> (n & 31)); });
    return t;
}
