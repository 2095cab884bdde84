// A card: runs the instructions of a launch on the memory of this process, and checks each access.
//
// A warp is 32 lanes. Those of the smallest program counter run, so that lanes that took different
// branches meet again. The warps of a program run in turn, each to its next barrier or its end, and
// so do programs; both in the order that the caller chooses. An error is the text of a Fault.
#include <climits>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "operations.h"

struct Instruction {
    i32 operation, predicate, negated, target, n_results, n_operands, width, line;
    i32 results[8], operands[8];
    i64 offset;
};
struct Span { u64 begin, end; };  // of live memory
struct Access { u64 begin, end; i32 program, line; };
struct Fault { std::string what; };

enum Special { BRANCH, RETURN, BARRIER, NOTHING, LOAD_GLOBAL, STORE_GLOBAL, LOAD_SHARED, STORE_SHARED, LOAD_LOCAL,
               STORE_LOCAL, PACK, UNPACK, SHUFFLE_BFLY, SHUFFLE_IDX, SHUFFLE_UP, SHUFFLE_DOWN, VOTE_ANY, VOTE_ALL,
               VOTE_BALLOT, REDUX_ADD, REDUX_MIN_S, REDUX_MAX_S, REDUX_MIN_U, REDUX_MAX_U, REDUX_AND, REDUX_OR, N_SPECIAL };
const std::map<std::string, i32> SPECIAL = {
    {"bra", BRANCH}, {"ret", RETURN}, {"exit", RETURN}, {"bar.sync", BARRIER}, {"barrier.sync", BARRIER},
    {"bar.warp.sync", NOTHING}, {"ld.global", LOAD_GLOBAL}, {"st.global", STORE_GLOBAL}, {"ld.shared", LOAD_SHARED},
    {"st.shared", STORE_SHARED}, {"ld.local", LOAD_LOCAL}, {"st.local", STORE_LOCAL}, {"pack", PACK}, {"unpack", UNPACK},
    {"shfl.sync.bfly.b32", SHUFFLE_BFLY}, {"shfl.sync.idx.b32", SHUFFLE_IDX}, {"shfl.sync.up.b32", SHUFFLE_UP},
    {"shfl.sync.down.b32", SHUFFLE_DOWN}, {"vote.sync.any.pred", VOTE_ANY}, {"vote.sync.all.pred", VOTE_ALL},
    {"vote.sync.ballot.b32", VOTE_BALLOT}, {"redux.sync.add.s32", REDUX_ADD}, {"redux.sync.add.u32", REDUX_ADD},
    {"redux.sync.min.s32", REDUX_MIN_S}, {"redux.sync.max.s32", REDUX_MAX_S}, {"redux.sync.min.u32", REDUX_MIN_U},
    {"redux.sync.max.u32", REDUX_MAX_U}, {"redux.sync.and.b32", REDUX_AND}, {"redux.sync.or.b32", REDUX_OR}};

struct Named { std::map<std::string, i32> number; std::vector<Operation> of; };
const Named& named() {
    static const Named all = [] {
        Named n{SPECIAL, std::vector<Operation>(N_SPECIAL)};
        for (auto& [name, operation] : operations().found) {
            n.number[name] = (i32)n.of.size();
            n.of.push_back(operation);
        }
        return n;
    }();
    return all;
}

struct Warp { std::vector<u64> registers; i32 at[32]; u32 live; };

class Card {
  public:
    const Instruction* code; i32 n_code, n_registers; const u64* initial; const i32* special;
    i32 programs, threads, shared_bytes, local_bytes; const Span* spans; i32 n_spans; bool backwards_warps, backwards_programs, races;

    void launch() {
        for (i32 i = 0; i < programs; i++) run_program(backwards_programs ? programs - 1 - i : i);
        if (races) find_races();
    }

  private:
    i32 program, warp_number;
    Warp* warp;
    std::vector<Warp> warps;
    std::vector<u8> shared, local;
    std::vector<i32> shared_writer, shared_reader;  // by byte, since the last barrier: a warp, or one of these
    enum { NOBODY = -1, SEVERAL = -2 };
    std::vector<Access> reads, writes;
    const Span* last_span = nullptr;

    [[noreturn]] void fault(const Instruction& i, i32 lane, const char* format, u64 x = 0, u64 y = 0) {
        char what[200], text[300];
        snprintf(what, sizeof what, format, (unsigned long long)x, (unsigned long long)y);
        snprintf(text, sizeof text, "line %d of the PTX, program %d, thread %d: %s", i.line, program, warp_number * 32 + lane, what);
        throw Fault{text};
    }
    u64* lanes(i32 reg) { return warp->registers.data() + (size_t)reg * 32; }

    void run_program(i32 number) {
        program = number;
        i32 n_warps = threads / 32;
        shared.assign(shared_bytes, 0xA5);  // memory that nobody wrote is odd, and in local memory NaN
        local.assign((size_t)threads * local_bytes, 0xFF);
        shared_writer.assign(shared_bytes, NOBODY), shared_reader.assign(shared_bytes, NOBODY);
        warps.resize(n_warps);
        for (i32 w = 0; w < n_warps; w++) {
            warp = &warps[w];
            warp->registers.resize((size_t)n_registers * 32);
            for (i32 r = 0; r < n_registers; r++) std::fill_n(lanes(r), 32, initial[r]);
            for (i32 lane = 0; lane < 32; lane++) {
                u64 values[] = {(u64)(w * 32 + lane), (u64)program, (u64)lane, (u64)threads, (u64)programs};
                for (i32 s = 0; s < 5; s++) if (special[s] >= 0) lanes(special[s])[lane] = values[s];
                warp->at[lane] = 0;
            }
            warp->live = ~0u;
        }
        while (true) {
            i32 waiting = 0, alive = 0;
            for (i32 w = 0; w < n_warps; w++) {
                warp_number = backwards_warps ? n_warps - 1 - w : w;
                warp = &warps[warp_number];
                if (warp->live) waiting += run_warp();
                alive += warp->live != 0;
            }
            if (!alive) return;
            if (waiting != n_warps) throw Fault{"program " + std::to_string(program) + ": some warps wait at a barrier that others never reach"};
            std::fill(shared_writer.begin(), shared_writer.end(), NOBODY);
            std::fill(shared_reader.begin(), shared_reader.end(), NOBODY);
        }
    }

    // Run the warp to its next barrier (true), or to its end (false).
    bool run_warp() {
        while (warp->live) {
            i32 at = INT_MAX, next = INT_MAX;  // where the lanes run that run, and where the first others wait
            u32 group = 0;
            for (i32 l = 0; l < 32; l++) if (warp->live >> l & 1) at = std::min(at, warp->at[l]);
            for (i32 l = 0; l < 32; l++) if (warp->live >> l & 1) {
                if (warp->at[l] == at) group |= 1u << l; else next = std::min(next, warp->at[l]);
            }
            bool apart = false;
            while (!apart && at < next) {
                if (at >= n_code) throw Fault{"ran past the end of the kernel"};
                const Instruction& i = code[at];
                u32 active = group;
                if (i.predicate >= 0) {
                    const u64* holds = lanes(i.predicate);
                    for (i32 l = 0; l < 32; l++) if ((holds[l] != 0) == (i.negated != 0)) active &= ~(1u << l);
                }
                if (i.operation == BRANCH) {
                    apart = active != group && active;
                    for (i32 l = 0; l < 32; l++) if (group >> l & 1) warp->at[l] = active >> l & 1 ? i.target : at + 1;
                    at = active ? i.target : at + 1;
                } else if (i.operation == RETURN) {
                    warp->live &= ~active, group &= ~active;
                    apart = !group, at++;
                } else if (i.operation == BARRIER) {
                    if (active != warp->live) fault(i, 0, "a barrier that the lanes %llx of %llx reach", active, warp->live);
                    std::fill_n(warp->at, 32, at + 1);
                    return true;
                } else {
                    execute(i, active);
                    at++;
                }
            }
            if (!apart) for (i32 l = 0; l < 32; l++) if (group >> l & 1) warp->at[l] = at;
        }
        return false;
    }

    void execute(const Instruction& i, u32 active) {
        if (i.operation >= N_SPECIAL) {
            Lanes operands[4];
            for (i32 k = 0; k < 4; k++) operands[k] = lanes(i.operands[k]);
            named().of[i.operation](lanes(i.results[0]), operands, active);
        } else if (i.operation >= LOAD_GLOBAL && i.operation <= STORE_LOCAL) {
            for (i32 l = 0; l < 32; l++) if (active >> l & 1) access(i, l);
        } else if (i.operation == PACK || i.operation == UNPACK) {
            i32 bits = 8 * i.width;
            for (i32 l = 0; l < 32; l++) if (active >> l & 1) {
                u64 whole = i.operation == UNPACK ? lanes(i.operands[0])[l] : 0;
                if (i.operation == PACK) {
                    for (i32 k = 0; k < i.n_operands; k++) whole |= (lanes(i.operands[k])[l] & ((1ull << bits) - 1)) << bits * k;
                    lanes(i.results[0])[l] = whole;
                } else {
                    for (i32 k = 0; k < i.n_results; k++) lanes(i.results[k])[l] = whole >> bits * k & ((1ull << bits) - 1);
                }
            }
        } else if (i.operation >= SHUFFLE_BFLY) {
            exchange(i, active);
        }
    }

    // --- memory -----------------------------------------------------------------------------------

    void access(const Instruction& i, i32 lane) {
        bool loads = i.operation == LOAD_GLOBAL || i.operation == LOAD_SHARED || i.operation == LOAD_LOCAL;
        i32 n = loads ? i.n_results : i.n_operands - 1;
        const i32* values = loads ? i.results : i.operands + 1;
        u64 address = lanes(i.operands[0])[lane] + i.offset, bytes = (u64)i.width * n;
        u8* memory;
        if (i.operation == LOAD_GLOBAL || i.operation == STORE_GLOBAL) {
            check_global(i, lane, address, bytes);
            if (races) note(loads ? reads : writes, {address, address + bytes, program, i.line});
            memory = (u8*)address;
        } else {
            bool is_shared = i.operation == LOAD_SHARED || i.operation == STORE_SHARED;
            u64 room = is_shared ? shared_bytes : local_bytes;
            address = (u32)address;
            if (address % bytes || address + bytes > room)
                fault(i, lane, is_shared ? "shared memory at %llu of %llu" : "local memory at %llu of %llu", address, room);
            memory = is_shared ? &shared[address] : &local[(size_t)(warp_number * 32 + lane) * local_bytes + address];
            if (is_shared) check_shared(i, lane, address, bytes, loads, values);
        }
        for (i32 k = 0; k < n; k++) {
            u64& value = lanes(values[k])[lane];
            if (loads) value = 0, memcpy(&value, memory + k * i.width, i.width);
            else memcpy(memory + k * i.width, &value, i.width);
        }
    }

    void check_global(const Instruction& i, i32 lane, u64 address, u64 bytes) {
        if (address % bytes) fault(i, lane, "an access of %llu bytes is not aligned: %llx", bytes, address);
        if (last_span && address >= last_span->begin && address + bytes <= last_span->end) return;
        const Span* after = std::upper_bound(spans, spans + n_spans, address, [](u64 a, const Span& s) { return a < s.begin; });
        if (after == spans || address + bytes > after[-1].end) fault(i, lane, "%llu bytes at %llx are in no live tensor", bytes, address);
        last_span = after - 1;
    }

    // A warp may not use what another wrote, nor write what another used, since the last barrier.
    void check_shared(const Instruction& i, i32 lane, u64 address, u64 bytes, bool loads, const i32* values) {
        for (u64 at = address; at < address + bytes; at++) {
            i32 &writer = shared_writer[at], &reader = shared_reader[at];
            bool others = (writer != NOBODY && writer != warp_number) || (!loads && reader != NOBODY && reader != warp_number);
            u64 word = (at - address) / i.width, byte = (at - address) % i.width;
            bool same = !loads && shared[at] == (u8)(lanes(values[word])[lane] >> 8 * byte);  // which does no harm
            if (others && !same) fault(i, lane, loads ? "reads shared %llu that another warp wrote since the last barrier"
                                                     : "writes shared %llu that another warp used since the last barrier", at);
            if (loads) reader = reader == NOBODY || reader == warp_number ? warp_number : SEVERAL;
            else writer = warp_number;
        }
    }

    static void note(std::vector<Access>& log, Access a) {
        if (!log.empty() && log.back().program == a.program && log.back().end == a.begin) log.back().end = a.end;
        else log.push_back(a);
    }

    // A program may not use what another program of the launch writes.
    void find_races() {
        auto first = [](const Access& a, const Access& b) { return a.begin < b.begin; };
        std::sort(writes.begin(), writes.end(), first);
        std::sort(reads.begin(), reads.end(), first);
        const Access* furthest = nullptr;
        for (auto& a : writes) {
            if (furthest && a.begin < furthest->end && a.program != furthest->program) race(*furthest, a, "both write");
            if (!furthest || a.end > furthest->end) furthest = &a;
        }
        size_t past = 0;
        for (auto& a : reads) {
            while (past < writes.size() && writes[past].end <= a.begin) past++;
            for (size_t k = past; k < writes.size() && writes[k].begin < a.end; k++)
                if (writes[k].program != a.program && writes[k].end > a.begin) race(writes[k], a, "write and read");
        }
    }
    [[noreturn]] void race(const Access& a, const Access& b, const char* what) {
        char text[200];
        snprintf(text, sizeof text, "programs %d and %d %s %llx (lines %d and %d of the PTX)", a.program, b.program, what, (unsigned long long)b.begin, a.line, b.line);
        throw Fault{text};
    }

    // --- between lanes ----------------------------------------------------------------------------

    void exchange(const Instruction& i, u32 active) {
        u64 given[32];
        memcpy(given, lanes(i.operands[0]), sizeof given);
        u64 all = 0;
        bool first = true;
        for (i32 l = 0; l < 32; l++) if (active >> l & 1) {
            u32 members = lanes(i.operands[i.n_operands - 1])[l];
            if (members & warp->live & ~active) fault(i, l, "lanes %llx are to take part, and only %llx do", members, active);
            all = first ? combined(i.operation, given[l], given[l], l, true) : combined(i.operation, all, given[l], l, false);
            first = false;
        }
        for (i32 l = 0; l < 32; l++) if (active >> l & 1)
            lanes(i.results[0])[l] = i.operation <= SHUFFLE_DOWN ? shuffled(i, l, active, given) : all;
    }
    u64 combined(i32 operation, u64 a, u64 b, i32 lane, bool first) {
        switch (operation) {
            case VOTE_ANY: return a || b;
            case VOTE_ALL: return a && b;
            case VOTE_BALLOT: return (first ? 0 : a) | (u64)(b != 0) << lane;
            case REDUX_ADD: return first ? b : (u32)(a + b);
            case REDUX_MIN_S: return (u32)std::min((i32)a, (i32)b);
            case REDUX_MAX_S: return (u32)std::max((i32)a, (i32)b);
            case REDUX_MIN_U: return std::min((u32)a, (u32)b);
            case REDUX_MAX_U: return std::max((u32)a, (u32)b);
            case REDUX_AND: return a & b;
            default: return a | b;
        }
    }
    u64 shuffled(const Instruction& i, i32 lane, u32 active, const u64* given) {
        i32 by = (i32)(u32)lanes(i.operands[1])[lane], c = (i32)(u32)lanes(i.operands[2])[lane];
        i32 segment = c >> 8 & 31, clamp = c & 31, low = lane & segment, top = low | (clamp & ~segment);
        i32 from = i.operation == SHUFFLE_BFLY ? lane ^ by : i.operation == SHUFFLE_IDX ? low | (by & ~segment & 31)
                 : i.operation == SHUFFLE_UP ? lane - by : lane + by;
        if (i.operation == SHUFFLE_UP ? from < top : from > top) from = lane;
        if (!(active >> (from & 31) & 1)) fault(i, lane, "a shuffle from lane %llu, which takes no part", from);
        return (u32)given[from & 31];
    }
};

extern "C" int card_operation(const char* name) {
    auto found = named().number.find(name);
    return found == named().number.end() ? -1 : found->second;
}

extern "C" int card_launch(const Instruction* code, i32 n_code, i32 n_registers, const u64* initial, const i32* special,
                           i32 programs, i32 threads, i32 shared_bytes, i32 local_bytes, const Span* spans, i32 n_spans,
                           i32 order, i32 races, char* error, i32 room) {
    auto card = std::make_unique<Card>();
    card->code = code, card->n_code = n_code, card->n_registers = n_registers, card->initial = initial, card->special = special;
    card->programs = programs, card->threads = threads, card->shared_bytes = shared_bytes, card->local_bytes = local_bytes;
    card->spans = spans, card->n_spans = n_spans;
    card->backwards_warps = order & 1, card->backwards_programs = order & 2, card->races = races;
    try {
        card->launch();
    } catch (const Fault& fault) {
        snprintf(error, room, "%s", fault.what.c_str());
        return 1;
    }
    return 0;
}
