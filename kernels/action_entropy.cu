// action_entropy: what a drain of executed actions does to the bus.
//
//   actions      action_t  [N]    the actions that count, segment after segment, 16-byte aligned at their start
//   proposed     action_t  [N]    the proposed ones, equal to the executed where not reported; null: none reported
//   piece_start  long long [P+1]  segments cut into pieces of at most MAX_PIECE_ACTIONS; a block counts a piece
//   partials     unsigned  [P, N_ACTIONS + 1]   counts of each piece, then its number of overruled actions
//   segments     Segment   [S]    one observation each, or the run's new pool
//   runs         Run       [T]    the touched runs: their segments, and what their counters grow by
//
// count_pieces (P blocks) → merge_segments where there are many actions and a segment of several pieces → finish_runs
// (T blocks): pool, H = −Σ p ln p (entropy.cuh), EMA. A drain of one piece needs only observe_piece (one block does
// both, everything but the actions comes as a kernel argument).
//
// Idea: nothing is shared while counting. With few actions each thread owns a column of byte counters, four packed in
// a word at [bin / 4][thread], free of bank conflicts; a column of words is then added up as two pairs of 16-bit fields.
// With many, each warp owns a histogram and __match_any_sync lets one lane count for all that hold the same action.
// Counts are integers and every float sum has one fixed order, so the bits depend on neither launch shape nor timing.

#define ROW_OF_COUNTS (N_ACTIONS + 1)
#define PER_VECTOR (16 / ACTION_BYTES)

#define COUNT_WARPS (COUNT_THREADS / 32)
#define ROUND 64  // segments of a run whose entropies are computed before the EMA walks over them
static_assert(COUNT_WARPS >= 3, "three warps walk the three EMAs");
static_assert(MAX_PIECE_ACTIONS <= 61440, "240 actions a thread in vectors, and two at the ends, fit a byte");
static_assert(ACTION_BYTES <= 4, "visit_actions cuts 32-bit words");

struct Segment { SEGMENT_FIELDS };
struct Run { RUN_FIELDS };

// Calls visit(valid, action) for n actions. The lanes of a warp call it together, those without an action too.
template <class Visit>
__device__ __forceinline__ void visit_actions(const action_t* actions, int n, Visit visit)
{
    const int lane = threadIdx.x & 31;
    const int to_boundary = (int)((16 - ((unsigned long long)actions & 15)) & 15) / ACTION_BYTES;
    const int head = to_boundary < n ? to_boundary : n;
    const int vectors = (n - head) / PER_VECTOR, ends = head + vectors * PER_VECTOR;
    const uint4* wide = (const uint4*)(actions + head);
    for (int i = threadIdx.x; i - lane < vectors; i += COUNT_THREADS) {
        const bool valid = i < vectors;
        const uint4 vector = valid ? wide[i] : make_uint4(0, 0, 0, 0);
        const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int shift = 0; shift < 32; shift += 8 * ACTION_BYTES)
                visit(valid, (unsigned)(action_t)(words[w] >> shift));
    }
    if (threadIdx.x < 32) {  // fewer than a vector before the first boundary, and after the last
        visit(lane < head, lane < head ? (unsigned)actions[lane] : 0u);
        visit(ends + lane < n, ends + lane < n ? (unsigned)actions[ends + lane] : 0u);
    }
}

#if N_ACTIONS <= FEW_ACTIONS

__device__ void count_actions(const action_t* actions, int n, unsigned* bins)
{
    __shared__ unsigned packed[(N_ACTIONS + 3) / 4][COUNT_THREADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int w = 0; w < (N_ACTIONS + 3) / 4; ++w) packed[w][threadIdx.x] = 0;
    visit_actions(actions, n, [&](bool valid, unsigned action) {
        if (valid) packed[action >> 2][threadIdx.x] += 1u << (8 * (action & 3));
    });
    __syncthreads();
    for (int w = warp; w < (N_ACTIONS + 3) / 4; w += COUNT_WARPS) {
        unsigned even = 0, odd = 0;  // bins 4w and 4w + 2, 4w + 1 and 4w + 3: 256 threads × 242 fit 16 bits
        for (int t = lane; t < COUNT_THREADS; t += 32) {
            even += packed[w][t] & 0x00ff00ffu;
            odd += (packed[w][t] >> 8) & 0x00ff00ffu;
        }
        for (int offset = 16; offset > 0; offset >>= 1) {
            even += __shfl_xor_sync(FULL_WARP, even, offset);
            odd += __shfl_xor_sync(FULL_WARP, odd, offset);
        }
        if (lane < 4 && 4 * w + lane < N_ACTIONS)
            bins[4 * w + lane] = ((lane & 1 ? odd : even) >> (8 * (lane & 2))) & 0xffffu;
    }
}

#else

__device__ void count_actions(const action_t* actions, int n, unsigned* bins)
{
    __shared__ unsigned short histograms[COUNT_WARPS][N_ACTIONS];
    const int lane = threadIdx.x & 31;
    unsigned short* mine = histograms[threadIdx.x >> 5];
    for (int bin = lane; bin < N_ACTIONS; bin += 32) mine[bin] = 0;
    __syncwarp();
    visit_actions(actions, n, [&](bool valid, unsigned action) {
        const unsigned peers = __match_any_sync(FULL_WARP, valid ? action : (unsigned)N_ACTIONS);
        if (valid && lane == __ffs(peers) - 1) mine[action] += (unsigned short)__popc(peers);
        __syncwarp();
    });
    __syncthreads();
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += COUNT_THREADS) {
        unsigned sum = 0;
        for (int warp = 0; warp < COUNT_WARPS; ++warp) sum += histograms[warp][bin];
        bins[bin] = sum;
    }
}

#endif

// Number of places where two stretches of the same alignment differ; thread 0 gets it, the others get 0.
__device__ unsigned count_differences(const action_t* actions, const action_t* proposed, int n)
{
    __shared__ unsigned of_warp[COUNT_WARPS];
    unsigned sum = 0;
    for (int i = threadIdx.x; i < n; i += COUNT_THREADS) sum += actions[i] != proposed[i];
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return 0;  // nobody else reads: a wide load may touch the word that thread 0 writes next
    sum = 0;
    for (int warp = 0; warp < COUNT_WARPS; ++warp) sum += of_warp[warp];
    return sum;
}

__device__ void count_piece(const action_t* actions, const action_t* proposed, int n, unsigned* counts)
{
    count_actions(actions, n, counts);
    const unsigned overruled = proposed ? count_differences(actions, proposed, n) : 0;
    if (threadIdx.x == 0) counts[N_ACTIONS] = overruled;
}

// Adds the pieces of a segment up in its first one.
__device__ void merge_pieces(unsigned* partials, long long n_pieces)
{
    __shared__ unsigned shares[FINISH_THREADS];
    const int threads = blockDim.x, stripes = threads >= 2 * ROW_OF_COUNTS ? threads / ROW_OF_COUNTS : 1;
    const int stripe = stripes > 1 ? threadIdx.x / ROW_OF_COUNTS : 0;
    for (int bin = threadIdx.x - stripe * ROW_OF_COUNTS; bin < ROW_OF_COUNTS; bin += threads) {
        unsigned sum = 0;
        if (stripe < stripes)
#pragma unroll 8
            for (long long piece = stripe; piece < n_pieces; piece += stripes)
                sum += partials[piece * ROW_OF_COUNTS + bin];
        if (stripes > 1) shares[threadIdx.x] = sum;
        else partials[bin] = sum;
    }
    __syncthreads();
    if (stripes > 1 && threadIdx.x < ROW_OF_COUNTS) {
        unsigned sum = 0;
        for (int s = 0; s < stripes; ++s) sum += shares[s * ROW_OF_COUNTS + threadIdx.x];
        partials[threadIdx.x] = sum;
    }
    __syncthreads();
}

// Entry `i` of what a segment adds to a pool: its counts, then the columns.
__device__ __forceinline__ long long share_of_pool(const Segment& segment, const unsigned* counts, int i)
{
    if (i < N_ACTIONS) return counts[i];
    switch (i - N_ACTIONS) {
        case POOL_ACTIONS: return segment.actions;
        case POOL_PROPOSED: return segment.proposed;
        case POOL_GATED: return counts[N_ACTIONS];
        case POOL_ROWS: return segment.rows;
        default: return segment.row_entropy;
    }
}

// What is observed of one segment, by one warp or, `together`, by the whole block; −1 where nothing was reported.
__device__ void measure(const Segment& segment, const unsigned* counts, const long long* pool, bool together,
                        double* entropy, double* gate_rate, double* conditional)
{
    const int member = together ? threadIdx.x : threadIdx.x & 31, members = together ? blockDim.x : 32;
    const bool pooled = segment.takes_pool;
    const double total = (double)(segment.actions + (pooled ? pool[N_ACTIONS + POOL_ACTIONS] : 0));
    const double per_action = reciprocal_of(total), ln_total = ln_whole(total);
    unsigned long long units = 0;
#pragma unroll 4
    for (int bin = member; bin < N_ACTIONS; bin += members)
        units += entropy_units(counts[bin] + (pooled ? pool[bin] : 0), per_action, ln_total);
    units = together ? block_sum_wide(units) : warp_sum_wide(units);
    if (member != 0) return;
    long long columns[N_POOL_COLUMNS];
    for (int c = 0; c < N_POOL_COLUMNS; ++c)
        columns[c] = share_of_pool(segment, counts, N_ACTIONS + c) + (pooled ? pool[N_ACTIONS + c] : 0);
    const double proposed = (double)columns[POOL_PROPOSED], rows = (double)columns[POOL_ROWS];
    *entropy = nats(units);
    *gate_rate = proposed > 0.0 ? (double)columns[POOL_GATED] / proposed : -1.0;
    *conditional = rows > 0.0 ? (double)columns[POOL_ROW_ENTROPY] * ROW_ENTROPY_UNIT / rows : -1.0;
}

// Takes n observed values, in order, into an EMA; one thread.
__device__ void follow(const double* values, int n, const Row& row, int last, int ema, int counter, bool counted)
{
    const double blend = row.parameters[PARAM_EMA_BLEND];
    float slot = row.slots[ema];
    long long seen = row.counters[counter];
    for (int i = 0; i < n; ++i) {
        if (values[i] < 0.0) continue;
        slot = blended(slot, values[i], blend, counted, seen++);
        row.slots[last] = narrow(values[i]);
    }
    row.slots[ema] = slot;
    row.counters[counter] = seen;
}

// One run by one block: `segments` are the run's, `partials` all pieces.
__device__ void finish_run(unsigned char* bus, const Run& run, const Segment* segments, unsigned* partials)
{
    __shared__ double entropy[ROUND], gate_rate[ROUND], conditional[ROUND];
    const Row row = row_at(bus, run.row);
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const long long n = run.n_segments;
    for (long long s = 0; s < n; ++s)
        if (N_ACTIONS <= FEW_ACTIONS && segments[s].n_pieces > 1)
            merge_pieces(partials + segments[s].first_piece * ROW_OF_COUNTS, segments[s].n_pieces);
    const long long observed = n > 0 && !segments[n - 1].complete ? n - 1 : n;  // only the last can be a new pool
    for (long long begin = 0; begin < observed; begin += ROUND) {
        const int in_round = (int)(observed - begin < ROUND ? observed - begin : ROUND);
        const bool together = in_round < warps;
        for (int i = together ? 0 : warp; i < in_round; i += together ? 1 : warps) {
            const Segment& segment = segments[begin + i];
            measure(segment, partials + segment.first_piece * ROW_OF_COUNTS, row.pool, together, &entropy[i],
                    &gate_rate[i], &conditional[i]);
        }
        __syncthreads();
        if (threadIdx.x == 0)
            follow(entropy, in_round, row, SLOT_ACTION_ENTROPY, SLOT_RL_ACTION_ENTROPY_EMA_INDEX,
                   COUNTER_OBSERVATIONS, false);
        if (threadIdx.x == 32)
            follow(gate_rate, in_round, row, SLOT_GATE_RATE, SLOT_GATE_RATE_EMA, COUNTER_GATE_OBSERVATIONS, true);
        if (threadIdx.x == 64)
            follow(conditional, in_round, row, SLOT_CONDITIONAL_ENTROPY, SLOT_CONDITIONAL_ENTROPY_EMA,
                   COUNTER_CONDITIONAL_OBSERVATIONS, true);
        __syncthreads();
    }
    if (n > 0) {
        const Segment& last = segments[n - 1];
        const unsigned* counts = partials + last.first_piece * ROW_OF_COUNTS;
        for (int i = threadIdx.x; i < N_ACTIONS + N_POOL_COLUMNS; i += blockDim.x) {
            const long long before = last.takes_pool ? row.pool[i] : 0;
            row.pool[i] = last.complete ? 0 : before + share_of_pool(last, counts, i);
        }
    }
    if (threadIdx.x == 0) {
        row.counters[COUNTER_BATCHES_TRAIN] += run.batches_train;
        row.counters[COUNTER_ACTIONS_TRAIN] += run.actions_train;
        row.counters[COUNTER_BATCHES_PREFILL] += run.batches_prefill;
        row.counters[COUNTER_ACTIONS_PREFILL] += run.actions_prefill;
        row.counters[COUNTER_BATCHES_REJECTED] += run.batches_rejected;
    }
}

extern "C" __global__ void __launch_bounds__(COUNT_THREADS)
count_pieces(const action_t* actions, const action_t* proposed, const long long* piece_start, unsigned* partials)
{
    const long long begin = piece_start[blockIdx.x];
    count_piece(actions + begin, proposed ? proposed + begin : proposed, (int)(piece_start[blockIdx.x + 1] - begin),
                partials + (long long)blockIdx.x * ROW_OF_COUNTS);
}

// Adds the pieces of every segment up in its first one: 32 columns by a block. With few actions finish_run does it.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
merge_segments(const Segment* segments, long long n_segments, unsigned* partials)
{
    __shared__ unsigned of_warp[FINISH_THREADS / 32][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = FINISH_THREADS / 32;
    const int bin = blockIdx.x * 32 + lane;
    for (long long s = blockIdx.y; s < n_segments; s += gridDim.y) {
        const long long n_pieces = segments[s].n_pieces;
        if (n_pieces <= 1) continue;
        unsigned* mine = partials + segments[s].first_piece * ROW_OF_COUNTS + bin;
        unsigned sum = 0;
        if (bin < ROW_OF_COUNTS)
#pragma unroll 8
            for (long long piece = warp; piece < n_pieces; piece += warps) sum += mine[piece * ROW_OF_COUNTS];
        of_warp[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && bin < ROW_OF_COUNTS) {
            sum = 0;
            for (int w = 0; w < warps; ++w) sum += of_warp[w][lane];
            *mine = sum;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS, 1)
finish_runs(unsigned char* bus, const Run* runs, const Segment* segments, unsigned* partials)
{
    finish_run(bus, runs[blockIdx.x], segments + runs[blockIdx.x].first_segment, partials);
}

extern "C" __global__ void __launch_bounds__(COUNT_THREADS)
observe_piece(unsigned char* bus, const __grid_constant__ Run run, const __grid_constant__ Segment segment,
              const action_t* actions, const action_t* proposed)
{
    __shared__ unsigned counts[ROW_OF_COUNTS];
    count_piece(actions, proposed, (int)segment.actions, counts);
    __syncthreads();
    finish_run(bus, run, &segment, counts);
}
