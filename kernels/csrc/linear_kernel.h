// Included once per instruction set: everything here has internal linkage.
//
// Rows are quantized once for all layers of a call, then panels of NR output channels are shared out among the threads. Many rows: a panel's
// weights are packed so that one vector holds a few inputs of many channels, and blocks of MR rows run over it. Few
// rows: the weights are read once as they lie. Both leave int32 sums of MR x NR in a tile; scales, native columns and
// bias are applied to it while it is in the first cache.
#pragma once

#include "linear_products.h"

namespace quantsink {
namespace {

struct Work {
    int64_t kp;
    Code* codes;       // [M, KP]
    float* scale;      // [M]
    int32_t* sum;      // [M]: sum of a row's codes
    float* gathered;   // [M, C]: inputs at the native columns
    float* unquantized;  // [S or M, KP]: rows that are multiplied as they are
    uint8_t* is_sink;  // [M], null without sink rows
    uintptr_t threads;   // `thread_bytes` for each
    int64_t thread_bytes;
};

#pragma GCC diagnostic ignored "-Wpsabi"  // nothing here is called from other translation units
// Vectors of any machine; the compiler splits them where its registers are shorter.
constexpr int LANES = 16, NV = NR / LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Signed __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Halves to_bf16(const Floats& values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
}

// One thread's own.
struct Local {
    Packed* panel;
    float* row;      // [KP]
    float* columns;  // [C, NR]
    float* flat;     // [NR, C]
    float *weight_scale, *bias;  // [NR]
    int32_t* tile;               // [MR or FEW, NR]
};

template <typename T>
T* take(uintptr_t& at, int64_t count) {
    T* found = (T*)at;
    at += round_up(count * (int64_t)sizeof(T), 64);
    return found;
}

void lay_out_thread(const LinearArgs& a, int64_t kp, uintptr_t& at, Local& l) {
    l.panel = take<Packed>(at, NR * kp);
    l.row = take<float>(at, kp);
    l.columns = take<float>(at, NR * a.c);
    l.flat = take<float>(at, NR * a.c);
    l.weight_scale = take<float>(at, NR);
    l.bias = take<float>(at, NR);
    l.tile = take<int32_t>(at, (FEW > MR ? FEW : MR) * NR);
}

// Shares out the memory from `base` on; returns how many bytes that takes.
int64_t lay_out(const LinearArgs& a, uintptr_t base, Work& w) {
    const bool quantized = a.inputs != Inputs::native;
    const int64_t as_they_are = !quantized ? a.m : a.sink_scale ? 0 : a.s;
    uintptr_t at = base;
    w.kp = round_up(a.k, KPAD);
    w.codes = take<Code>(at, quantized ? a.m * w.kp : 0);
    w.scale = take<float>(at, a.m);
    w.sum = take<int32_t>(at, a.m);
    w.gathered = take<float>(at, a.m * a.c);
    w.unquantized = take<float>(at, as_they_are * w.kp);
    w.is_sink = a.s ? take<uint8_t>(at, a.m) : nullptr;
    w.threads = at;
    Local unused;
    lay_out_thread(a, w.kp, at, unused);
    w.thread_bytes = at - w.threads;
    return w.threads - base + a.threads * w.thread_bytes;
}

void read_row(const LinearArgs& a, const Work& w, int64_t m, float* row) {
    load(a.type, a.x, m * a.x_stride, a.k, row);
    for (int64_t i = 0; i < a.c; ++i) {
        w.gathered[m * a.c + i] = row[a.column_index[i]];
        row[a.column_index[i]] = 0;
    }
    std::memset(row + a.k, 0, (w.kp - a.k) * 4);
}

void quantize_row(const LinearArgs& a, const Work& w, int64_t m, float* row) {
    read_row(a, w, m, row);
    const uint32_t largest = largest_bits(row, a.k);
    const bool own = a.inputs == Inputs::per_token;
    const float fixed = own ? 1 : w.is_sink && w.is_sink[m] && a.sink_scale ? *a.sink_scale : *a.input_scale;
    const float scale = own ? per_token_scale(largest) : fixed;
    if (finite(largest)) {
        w.scale[m] = scale;
        w.sum[m] = round_codes(row, w.kp, scale, w.codes + m * w.kp);
    } else {  // nothing of the row is right: NaN everywhere
        w.scale[m] = bits_float(0x7fc00000);
        w.sum[m] = 0;
        std::memset(w.codes + m * w.kp, 0, w.kp * sizeof(Code));
    }
}

inline float short_dot(const float* x, const float* y, int64_t count) {
    float even = 0, odd = 0;
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
        even += x[i] * y[i];
        odd += x[i + 1] * y[i + 1];
    }
    return even + odd + (i < count ? x[i] * y[i] : 0.0f);
}

// Up to NR output channels of one layer, from n0 on.
struct Panel {
    const LinearLayer& layer;
    int64_t n0, count;
};

int64_t panels_of(const LinearLayer& layer) { return (layer.n + NR - 1) / NR; }

Panel panel_at(const LinearArgs& a, int64_t index) {
    const LinearLayer* layer = a.layers;
    while (index >= panels_of(*layer)) index -= panels_of(*layer++);
    return {*layer, index * NR, smaller(layer->n - index * NR, NR)};
}

// Native columns, bias and the output type, for the panel's channels of row m.
void finish(const LinearArgs& a, const Work& w, const Local& l, int64_t m, const Panel& p, const Floats* sums) {
    const int64_t count = p.count;
    const float* x = w.gathered + m * a.c;
    Floats y[NV];
    for (int v = 0; v < NV; ++v) y[v] = sums[v];
    if (a.m <= FEW) {
        alignas(64) float dots[NR] = {};
        for (int64_t j = 0; a.c && j < count; ++j) dots[j] = short_dot(x, l.flat + j * a.c, a.c);
        for (int v = 0; v < NV; ++v) y[v] += ((const Floats*)dots)[v];
    } else {
        for (int64_t c = 0; c < a.c; ++c) {
            const Floats* column = (const Floats*)(l.columns + c * NR);
            for (int v = 0; v < NV; ++v) y[v] += x[c] * column[v];
        }
    }
    if (p.layer.bias) {
        for (int v = 0; v < NV; ++v) y[v] += ((const Floats*)l.bias)[v];
    }
    const int64_t at = m * p.layer.n + p.n0;
    if (a.type == Type::bf16 && count == NR) {
        for (int v = 0; v < NV; ++v) {
            const Halves rounded = to_bf16(y[v]);
            std::memcpy((uint16_t*)p.layer.out + at + v * LANES, &rounded, sizeof rounded);
        }
        return;
    }
    float flat[NR];
    std::memcpy(flat, y, sizeof flat);
    store(a.type, flat, count, p.layer.out, at);
}

int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// What a panel will read beside its weights.
void prefetch_panel(const LinearArgs& a, const Panel& p) {
    const int64_t n0 = p.n0, count = p.count, size = size_of(p.layer.native_type);
    prefetch(p.layer.weight_scale + n0, count * 4);
    if (p.layer.bias) prefetch((const char*)p.layer.bias + n0 * size, count * size);
    prefetch((const char*)p.layer.columns + n0 * a.c * size, count * a.c * size);
}

void read_panel(const LinearArgs& a, const Panel& p, Local& l) {
    const int64_t n0 = p.n0, count = p.count;
    std::memset(l.weight_scale, 0, NR * 4);
    std::memcpy(l.weight_scale, p.layer.weight_scale + n0, count * 4);
    std::memset(l.bias, 0, NR * 4);
    if (p.layer.bias) load(p.layer.native_type, p.layer.bias, n0, count, l.bias);
    if (a.c == 0) return;
    load(p.layer.native_type, p.layer.columns, n0 * a.c, count * a.c, l.flat);
    if (a.m <= FEW) return;
    if (count < NR) std::memset(l.columns, 0, NR * a.c * 4);
    for (int64_t j = 0; j < count; ++j) {
        for (int64_t c = 0; c < a.c; ++c) l.columns[c * NR + j] = l.flat[j * a.c + c];
    }
}

void quantized_rows(const LinearArgs& a, const Work& w, Local& l, const Panel& p, int64_t from, int64_t to) {
    const int8_t* weight = p.layer.weight + p.n0 * a.k;
    const int64_t count = p.count;
    const bool few = a.m <= FEW;
    const int64_t step = few ? FEW : MR;
    if (!few) pack(weight, count, a.k, l.panel);
    for (int64_t m0 = from; m0 < to; m0 += step) {
        const int64_t real = smaller(to - m0, step);
        const Code* rows[FEW > MR ? FEW : MR];
        for (int64_t i = 0; i < step; ++i) rows[i] = w.codes + (m0 + smaller(i, real - 1)) * w.kp;
        if (few) {
            few_rows(rows, real, weight, count, a.k, l.tile);
        } else {
            many_rows(rows, l.panel, w.kp, l.tile);
        }
        for (int64_t i = 0; i < real; ++i) {
            const uint32_t offset = (uint32_t)OFFSET * (uint32_t)w.sum[m0 + i];
            const Words* tile = (const Words*)(l.tile + i * NR);
            Floats y[NV];
            for (int v = 0; v < NV; ++v) {
                const Signed sums = (Signed)(tile[v] - offset);
                y[v] = __builtin_convertvector(sums, Floats) * w.scale[m0 + i] * ((const Floats*)l.weight_scale)[v];
            }
            finish(a, w, l, m0 + i, p, y);
        }
    }
}

void unquantized_rows(const LinearArgs& a, const Work& w, const Local& l, const Panel& p) {
    const bool all = a.inputs == Inputs::native;
    const int64_t rows = all ? a.m : a.s;
    for (int64_t i = 0; i < rows; ++i) {
        Floats y[NV] = {};
        for (int64_t j = 0; j < p.count; ++j) {
            y[j / LANES][j % LANES] = float_dot(w.unquantized + i * w.kp, p.layer.weight + (p.n0 + j) * a.k, a.k);
        }
        for (int v = 0; v < NV; ++v) y[v] *= ((const Floats*)l.weight_scale)[v];
        finish(a, w, l, all ? i : a.sinks[i], p, y);
    }
}

int useful_threads(int64_t m, int64_t n, int64_t k, int threads) {
    const int64_t us = n * k / 20000 + m * n * k / 200000;
    return us < SERIAL_US ? 1 : threads;
}

bool linear(const LinearArgs& given) {
    LinearArgs a = given;
    int64_t n = 0, panels = 0;
    for (int64_t i = 0; i < a.count; ++i) n += a.layers[i].n, panels += panels_of(a.layers[i]);
    a.threads = useful_threads(a.m, n, a.k, a.threads);
    Work w;
    void* memory = std::malloc(lay_out(a, 0, w) + 64);
    if (!memory) return false;
    lay_out(a, round_up((uintptr_t)memory, 64), w);
    if (w.is_sink) std::memset(w.is_sink, 0, a.m);
    for (int64_t i = 0; i < a.s; ++i) w.is_sink[a.sinks[i]] = 1;
    const bool quantized = a.inputs != Inputs::native;
    // Few panels: their rows are divided too, so that every thread has work.
    const int64_t parts = panels >= 4 * a.threads || a.m < 16 * MR ? 1 : a.threads;
    const int64_t rows = round_up((a.m + parts - 1) / parts, MR);
    const int64_t as_they_are = !quantized ? a.m : a.sink_scale ? 0 : a.s;
    const auto quantize = [&](int64_t m, float* row) { quantize_row(a, w, m, row); };
    const auto keep = [&](int64_t i) { read_row(a, w, quantized ? a.sinks[i] : i, w.unquantized + i * w.kp); };
    // Few rows are read before there are other threads: to wake one at a barrier takes longer.
    const bool few = a.m <= FEW;
    if (few) {
        Local l;
        uintptr_t at = w.threads;
        lay_out_thread(a, w.kp, at, l);
        for (int64_t m = 0; quantized && m < a.m; ++m) quantize(m, l.row);
        for (int64_t i = 0; i < as_they_are; ++i) keep(i);
    }
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
    {
        Local l;
        uintptr_t at = w.threads + this_thread() * w.thread_bytes;
        lay_out_thread(a, w.kp, at, l);
        if (quantized && !few) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < a.m; ++m) quantize(m, l.row);
        }
        if (as_they_are && !few) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < as_they_are; ++i) keep(i);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < panels * parts; ++task) {
            const int64_t index = task / parts, from = task % parts * rows;
            const Panel p = panel_at(a, index);
            if (index + 1 < panels) prefetch_panel(a, panel_at(a, index + 1));
            read_panel(a, p, l);
            if (quantized) quantized_rows(a, w, l, p, from, smaller(from + rows, a.m));
        }
        // After the sink rows' INT8 results, which these replace.
        if (as_they_are) {
#pragma omp barrier
#pragma omp for schedule(dynamic) nowait
            for (int64_t index = 0; index < panels; ++index) {
                const Panel p = panel_at(a, index);
                read_panel(a, p, l);
                unquantized_rows(a, w, l, p);
            }
        }
    }
    std::free(memory);
    return true;
}

bool quantize(const QuantizeArgs& a) {
    const int threads = a.m * a.k < 1000 * SERIAL_US ? 1 : a.threads;
    float* rows = (float*)std::malloc(threads * a.k * sizeof(float));
    if (!rows) return false;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < a.m; ++m) {
        float* row = rows + this_thread() * a.k;
        load(a.type, a.x, m * a.x_stride, a.k, row);
        const uint32_t largest = largest_bits(row, a.k);
        a.scale[m] = per_token_scale(largest);
        if (finite(largest)) {
            round_codes(row, a.k, a.scale[m], a.codes + m * a.k);
        } else {
            std::memset(a.codes + m * a.k, 0, a.k);
        }
    }
    std::free(rows);
    return true;
}

}  // namespace
}  // namespace quantsink
