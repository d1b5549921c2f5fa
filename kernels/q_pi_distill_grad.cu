// q_pi_distill_grad: for each row of logits the gradient, and the loss, that pull π toward softmax(Q/τ) with entropy α;
// q_pi_distill_grad.py states the mathematics and is what the tests compare with. Arithmetic is float32.
//
//   slots     float      [≥ SLOT_TAU + 1]         a row of the bus; α and τ are read when the kernel runs
//   logits    logit_t    [n, N_ACTIONS]           rows `…_stride` elements apart, so all four
//   q         q_t        [n, N_ACTIONS]
//   mask      byte       [n, N_ACTIONS]           if MASKED; 0: the action is not legal, as with a logit of −inf
//   gradient  gradient_t [n, N_ACTIONS]           may be `logits` itself: a row is read whole, then written
//   loss      float      [n] or null
//
// Injected: N_ACTIONS; the three types; MASKED; VECTOR, the elements of one access; LANES, the threads of one row (a
// power of two; above 32 they are the block); STAGED, and then DENSE: no gaps between the rows of any array.
//
// Idea: a row is read once and stays in registers, LANES · PER_LANE elements of it. With d = z − max z the ln Σ exp
// cancels in ln π + H = d − Σ π d, so a row needs two reductions (two maxima; four sums), no pass more, and no
// logarithm unless the loss is asked for. A short row that 16-byte accesses do not fit is one thread's (STAGED): its
// warp moves 32 rows through shared memory, so that global accesses stay coalesced. No order depends on timing.

#define FULL_WARP 0xffffffffu
#define NOTHING __int_as_float(0xff800000)  // −inf
#define LEAST (-1e30f)  // no ln π is below it
#define SMALLEST_NORMAL 1.175494351e-38f
#define LOG2_E 1.442695041f
#define MAX_WARPS 4

#if STAGED
#define PER_LANE N_ACTIONS
#else
#define VECTORS ((N_ACTIONS + LANES * VECTOR - 1) / (LANES * VECTOR))  // of one lane
#define PER_LANE (VECTORS * VECTOR)
#endif

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

__device__ __forceinline__ float widened(float value) { return value; }
__device__ __forceinline__ float widened(bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ __forceinline__ float widened(float16 value)
{
    float single;
    asm("cvt.f32.f16 %0, %1;" : "=f"(single) : "h"(value.bits));
    return single;
}

__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(float value, float16& to)
{
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, bfloat16& to)
{
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
#else
    const unsigned bits = __float_as_uint(value);  // to nearest, ties to even
    to.bits = value == value ? (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16) : (unsigned short)0x7fff;
#endif
}

struct Max { __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ __forceinline__ float operator()(float a, float b) const { return a + b; } };

// Every lane of a row gets the combined values, the same bits in each.
template <typename Combine, int N>
__device__ __forceinline__ void across_row(float (&values)[N])
{
    const Combine combine;
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = combine(values[i], __shfl_xor_sync(FULL_WARP, values[i], offset));
#if LANES > 32
    __shared__ float of_warp[LANES / 32][N];  // one array a Combine: the other's barrier keeps rows apart
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < N; ++i) of_warp[threadIdx.x / 32][i] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = of_warp[0][i];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; ++warp) values[i] = combine(values[i], of_warp[warp][i]);
    }
#endif
}

struct Tuning { float alpha, tau; };

// From this lane's logits, −inf where an action is not legal, and Q to its gradient, in the place of the logits.
__device__ __forceinline__ float distill(float (&z)[PER_LANE], float (&q)[PER_LANE], const Tuning& tuning,
                                         bool with_loss)
{
    float top[2] = {NOTHING, NOTHING};
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        if (z[i] == NOTHING) q[i] = NOTHING;
        top[0] = fmaxf(top[0], z[i]);
        top[1] = fmaxf(top[1], q[i]);
    }
    across_row<Max>(top);
    if (top[0] == NOTHING) top[0] = top[1] = 0.0f;  // no legal action: everything becomes 0
    const float inverse = 1.0f / (tuning.tau < SMALLEST_NORMAL ? SMALLEST_NORMAL : tuning.tau);  // NaN stays NaN
    const float scale = LOG2_E * (inverse < SMALLEST_NORMAL ? SMALLEST_NORMAL : inverse);
    float e[PER_LANE];
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const float d = z[i] - top[0];
        e[i] = exp2f(LOG2_E * d);
        z[i] = fmaxf(d, LEAST);  // 0 · d shall be 0; where d is NaN, e is
        q[i] = exp2f(scale * (q[i] - top[1]));
        sums[0] += e[i];
        sums[1] += e[i] * z[i];
        sums[2] += q[i];
        sums[3] += q[i] * z[i];
    }
    across_row<Sum>(sums);
    const float per_e = sums[0] == 0.0f ? 0.0f : 1.0f / sums[0];
    const float per_q = sums[2] == 0.0f ? 0.0f : 1.0f / sums[2];
    const float mean = sums[1] * per_e;  // Σ π d
    float loss = 0.0f;
    if (with_loss && sums[0] != 0.0f) {
        const float log_sum = logf(sums[0]);
        loss = log_sum - sums[3] * per_q - tuning.alpha * (log_sum - mean);
    }
    // π − π* + α π (d − mean) = e · (α d + 1 − α mean) / Σ e − π*
    const float slope = tuning.alpha * per_e, level = per_e - slope * mean;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) z[i] = e[i] * (slope * z[i] + level) - q[i] * per_q;
    const float total = sums[0] + sums[2];
    if (!(total == total))
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (e[i] == 0.0f && q[i] == 0.0f) z[i] = 0.0f;  // what is not legal is 0 even beside NaN
    return loss;
}

#define PARAMETERS                                                                                                  \
    const float *slots, const logit_t *logits, long long logits_stride, const q_t *q, long long q_stride,           \
        const unsigned char *mask, long long mask_stride, gradient_t *gradient, long long gradient_stride,          \
        float *loss, long long n

#if STAGED

// Rows of shared memory have an odd number of words: 32 threads that read a column each of their own row meet no bank
// twice.
#define PITCH (N_ACTIONS | 1)

// Element `at` of a tile of 32 rows, in its array and in shared memory.
__device__ __forceinline__ long long offset(int at, long long stride)
{
    return DENSE ? at : (long long)(at / N_ACTIONS) * (int)stride + at % N_ACTIONS;
}
__device__ __forceinline__ int cell_of(int at)
{
    return PITCH == N_ACTIONS ? at : at / N_ACTIONS * PITCH + at % N_ACTIONS;
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS) q_pi_distill_grad(PARAMETERS)
{
    __shared__ float tiles[MAX_WARPS][2][32 * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *z_tile = tiles[warp][0], *q_tile = tiles[warp][1];
    const Tuning tuning = {slots[SLOT_ALPHA], slots[SLOT_TAU]};
    for (long long first = ((long long)blockIdx.x * warps + warp) * 32; first < n; first += 32ll * gridDim.x * warps) {
        const int rows = n - first < 32 ? (int)(n - first) : 32, last = rows * N_ACTIONS - 1;
        logit_t z_raw[N_ACTIONS];
        q_t q_raw[N_ACTIONS];
        unsigned char legal[N_ACTIONS];
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) {  // what is not there: the last again, so no load waits for a branch
            const int at = min(i * 32 + lane, last);
            z_raw[i] = logits[first * logits_stride + offset(at, logits_stride)];
            q_raw[i] = q[first * q_stride + offset(at, q_stride)];
            if (MASKED) legal[i] = mask[first * mask_stride + offset(at, mask_stride)];
        }
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) {
            const int cell = cell_of(i * 32 + lane);
            z_tile[cell] = !MASKED || legal[i] ? widened(z_raw[i]) : NOTHING;
            q_tile[cell] = widened(q_raw[i]);
        }
        __syncwarp();
        float z_row[N_ACTIONS], q_row[N_ACTIONS];
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) {
            z_row[i] = z_tile[lane * PITCH + i];
            q_row[i] = q_tile[lane * PITCH + i];
        }
        const float loss_of_row = distill(z_row, q_row, tuning, loss);
        if (loss && first + lane < n) loss[first + lane] = loss_of_row;
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) z_tile[lane * PITCH + i] = z_row[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) z_row[i] = z_tile[cell_of(i * 32 + lane)];
#pragma unroll
        for (int i = 0; i < N_ACTIONS; ++i) {
            const int at = i * 32 + lane;
            if (at <= last) narrow(z_row[i], gradient[first * gradient_stride + offset(at, gradient_stride)]);
        }
        __syncwarp();
    }
}

#else

// VECTOR elements, as the words that they come in.
template <int BYTES> struct Words { uint4 words[BYTES / 16]; };
template <> struct Words<1> { unsigned char words; };
template <> struct Words<2> { unsigned short words; };
template <> struct Words<4> { unsigned words; };
template <> struct Words<8> { uint2 words; };
template <> struct Words<16> { uint4 words; };

template <typename T>
union Vector {
    Words<sizeof(T) * VECTOR> words;
    T items[VECTOR];
};

template <typename T>
__device__ __forceinline__ Vector<T> load(const T* from)
{
    Vector<T> vector;
    vector.words = *(const Words<sizeof(T) * VECTOR>*)from;
    return vector;
}

__device__ __forceinline__ int column_of(int vector, int lane) { return (vector * LANES + lane) * VECTOR; }

extern "C" __global__ void __launch_bounds__(LANES > 32 ? LANES : 32 * MAX_WARPS) q_pi_distill_grad(PARAMETERS)
{
    const int lane = threadIdx.x % LANES, rows = blockDim.x / LANES;
    const Tuning tuning = {slots[SLOT_ALPHA], slots[SLOT_TAU]};
    for (long long first = (long long)blockIdx.x * rows; first < n; first += (long long)gridDim.x * rows) {
        const long long row = first + threadIdx.x / LANES, read_row = row < n ? row : n - 1;
        const bool there = row < n;
        Vector<logit_t> z_vectors[VECTORS];
        Vector<q_t> q_vectors[VECTORS];
        Vector<unsigned char> legal[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {  // what is not there: another again, so no load waits for a branch
            const int column = column_of(v, lane), read_column = column < N_ACTIONS ? column : 0;
            z_vectors[v] = load(logits + read_row * logits_stride + read_column);
            q_vectors[v] = load(q + read_row * q_stride + read_column);
            if (MASKED) legal[v] = load(mask + read_row * mask_stride + read_column);
        }
        float z_row[PER_LANE], q_row[PER_LANE];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const bool counts = column_of(v, lane) < N_ACTIONS && (!MASKED || legal[v].items[i]);
                z_row[v * VECTOR + i] = counts ? widened(z_vectors[v].items[i]) : NOTHING;
                q_row[v * VECTOR + i] = widened(q_vectors[v].items[i]);
            }
        const float loss_of_row = distill(z_row, q_row, tuning, loss);
        if (loss && there && lane == 0) loss[row] = loss_of_row;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (!there || column_of(v, lane) >= N_ACTIONS) continue;
            Vector<gradient_t> vector;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) narrow(z_row[v * VECTOR + i], vector.items[i]);
            gradient_t* to = gradient + row * gradient_stride + column_of(v, lane);
            *(Words<sizeof(gradient_t) * VECTOR>*)to = vector.words;
        }
    }
}

#endif
