// entropy_step_wide: what entropy_step does, for more than 16 actions.
//
//   record, actions, n, pool_min, prefill   as in entropy_step.cu
//   partials  unsigned [blocks, N_ACTIONS]            counts of each block
//   totals    unsigned long long [N_ACTIONS]          counts of the batch
//
// count_blocks (any grid) → merge_blocks (32 bins a block) → finish_batch (one block). A batch that one block counts
// needs only observe_batch.
//
// Idea: each warp owns a histogram of 16-bit counters in shared memory, and __match_any_sync lets one lane count for
// all that hold the same action. An action outside [0, K) is in no bin, so that the counts add up to less than n.

#define WARPS (WIDE_THREADS / 32)
#define ROUNDS_BEFORE_CARRY 2047  // 32 actions each; 16 bits hold 65535
#define PER_VECTOR (16 / ACTION_BYTES)

struct Histograms {
    unsigned total[N_ACTIONS];
    unsigned short of_warp[WARPS][N_ACTIONS];
};

__device__ __forceinline__ void carry(Histograms& histograms)
{
    __syncthreads();
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += WIDE_THREADS) {
        unsigned sum = histograms.total[bin];
        for (int warp = 0; warp < WARPS; ++warp) {
            sum += histograms.of_warp[warp][bin];
            histograms.of_warp[warp][bin] = 0;
        }
        histograms.total[bin] = sum;
    }
    __syncthreads();
}

// All lanes of a warp; `present` where there is an action at all.
__device__ __forceinline__ void count_warp(unsigned short* mine, bool present, action_t action)
{
    const bool valid = present && action < N_ACTIONS;
    const unsigned peers = __match_any_sync(FULL_WARP, valid ? (unsigned)action : (unsigned)N_ACTIONS);
    if (valid && (threadIdx.x & 31) == __ffs(peers) - 1) mine[(unsigned)action] += (unsigned short)__popc(peers);
    __syncwarp();
}

__device__ __forceinline__ action_t action_of(const uint4& vector, int i)
{
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
#if ACTION_BYTES == 8
    return (action_t)words[2 * i + 1] << 32 | words[2 * i];
#else
    return (action_t)(words[i * ACTION_BYTES / 4] >> (8 * (i * ACTION_BYTES % 4)));
#endif
}

// The share of block `block` of `blocks`, into histograms.total.
__device__ __forceinline__ void count_share(const action_t* actions, long long n, int block, int blocks,
                                            Histograms& histograms)
{
    const int lane = threadIdx.x & 31;
    unsigned short* mine = histograms.of_warp[threadIdx.x >> 5];
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += WIDE_THREADS) {
        histograms.total[bin] = 0;
        for (int warp = 0; warp < WARPS; ++warp) histograms.of_warp[warp][bin] = 0;
    }
    __syncthreads();
    const int to_boundary = (int)((16 - ((unsigned long long)actions & 15)) & 15) / ACTION_BYTES;
    const int head = to_boundary < n ? to_boundary : (int)n;
    const long long n_vectors = (n - head) / PER_VECTOR, tail = head + n_vectors * PER_VECTOR;
    const uint4* wide = (const uint4*)(actions + head);
    int rounds = 2;
    if (block == 0 && threadIdx.x < 32) {
        count_warp(mine, lane < head, lane < head ? actions[lane] : 0);
        count_warp(mine, tail + lane < n, tail + lane < n ? actions[tail + lane] : 0);
    }
    const long long stride = (long long)blocks * WIDE_THREADS;
    for (long long begin = (long long)block * WIDE_THREADS; begin < n_vectors; begin += stride) {
        const bool present = begin + threadIdx.x < n_vectors;
        const uint4 vector = present ? wide[begin + threadIdx.x] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < PER_VECTOR; ++i) count_warp(mine, present, action_of(vector, i));
        rounds += PER_VECTOR;
        if (rounds + PER_VECTOR > ROUNDS_BEFORE_CARRY) {
            carry(histograms);
            rounds = 0;
        }
    }
    carry(histograms);
}

// From the counts of the batch to the row, by one block.
template <class Count>
__device__ void finish(const Row& row, const Count* counts, long long n, long long pool_min, int prefill)
{
    const long long pooled = row.pool[N_ACTIONS + POOL_ACTIONS], total = n + pooled;
    const double per_action = reciprocal_of((double)total), ln_total = ln_whole((double)total);
    unsigned long long counted = 0, units = 0;
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += blockDim.x) {
        counted += counts[bin];
        units += entropy_units((long long)counts[bin] + (pooled ? row.pool[bin] : 0), per_action, ln_total);
    }
    counted = block_sum_wide(counted);
    units = block_sum_wide(units);
    if ((long long)counted != n) {
        if (threadIdx.x == 0) row.counters[COUNTER_BATCHES_REJECTED] += 1;
        return;
    }
    const bool complete = total >= pool_min;
    if (threadIdx.x == 0) {
        row.counters[COUNTER_BATCHES_TRAIN + prefill] += 1;
        row.counters[COUNTER_ACTIONS_TRAIN + prefill] += n;
        if (complete) {
            float* ema = row.slots + SLOT_RL_ACTION_ENTROPY_EMA_INDEX;
            row.slots[SLOT_ACTION_ENTROPY] = narrow(nats(units));
            *ema = blended(*ema, nats(units), row.parameters[PARAM_EMA_BLEND], false, 0);
            row.counters[COUNTER_OBSERVATIONS] += 1;
            if (pooled) observe_pooled_reports(row);
        }
    }
    __syncthreads();
    if (complete && pooled == 0) return;
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += blockDim.x)
        row.pool[bin] = complete ? 0 : row.pool[bin] + (long long)counts[bin];
    if (complete && threadIdx.x < N_POOL_COLUMNS) row.pool[N_ACTIONS + threadIdx.x] = 0;
    if (!complete && threadIdx.x == 0) row.pool[N_ACTIONS + POOL_ACTIONS] = total;
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS)
observe_batch(unsigned char* record, const action_t* actions, long long n, long long pool_min, int prefill)
{
    __shared__ Histograms histograms;
    count_share(actions, n, 0, 1, histograms);
    finish(row_at(record, 0), histograms.total, n, pool_min, prefill);
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS)
count_blocks(const action_t* actions, long long n, unsigned* partials)
{
    __shared__ Histograms histograms;
    count_share(actions, n, blockIdx.x, gridDim.x, histograms);
    unsigned* mine = partials + (long long)blockIdx.x * N_ACTIONS;
    for (int bin = threadIdx.x; bin < N_ACTIONS; bin += WIDE_THREADS) mine[bin] = histograms.total[bin];
}

extern "C" __global__ void __launch_bounds__(512)
merge_blocks(const unsigned* partials, int blocks, unsigned long long* totals)
{
    __shared__ unsigned long long of_warp[16][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, bin = blockIdx.x * 32 + lane;
    unsigned long long sum = 0;
    if (bin < N_ACTIONS)
#pragma unroll 8
        for (int block = warp; block < blocks; block += 16) sum += partials[(long long)block * N_ACTIONS + bin];
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || bin >= N_ACTIONS) return;
    sum = 0;
    for (int w = 0; w < 16; ++w) sum += of_warp[w][lane];
    totals[bin] = sum;
}

extern "C" __global__ void __launch_bounds__(512)
finish_batch(unsigned char* record, const unsigned long long* totals, long long n, long long pool_min, int prefill)
{
    finish(row_at(record, 0), totals, n, pool_min, prefill);
}
