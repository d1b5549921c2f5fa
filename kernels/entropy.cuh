// H = −Σ p ln p from integer counts, in float64 where it matters and in integers where order could matter.
//
// A term p ln(1/p) = c/n · (ln n − ln c) is rounded once to units of 2^-48 nat, and the units are added as integers:
// no order of summation, number of threads or launch shape can change a bit. With ln to 3e-11 and K ≤ 4096 roundings
// of 2^-49, H is within 1e-10 of the exact value (the slot's float32 costs 2.4e-7). One bin in use gives exactly 0,
// because the same function computes both logarithms.

#define FULL_WARP 0xffffffffu

__device__ __forceinline__ unsigned warp_sum(unsigned value)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_WARP, value);
#else
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
#endif
}

// For values whose sum is below 2^58.
__device__ __forceinline__ unsigned long long warp_sum_wide(unsigned long long value)
{
    const unsigned low = warp_sum((unsigned)value & 0x7ffffffu), high = warp_sum((unsigned)(value >> 27));
    return ((unsigned long long)high << 27) + low;
}

// The same over a block of whole warps; every thread gets the sum.
__device__ __forceinline__ unsigned long long block_sum_wide(unsigned long long value)
{
    __shared__ unsigned long long of_warp[32];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    value = warp_sum_wide(value);
    __syncthreads();  // the sum before this one has been read
    if (lane == 0) of_warp[threadIdx.x >> 5] = value;
    __syncthreads();
    return warp_sum_wide(lane < warps ? of_warp[lane] : 0);
}

// Within 2^-40, for 0.5 ≤ x < 2^63.
__device__ __forceinline__ double reciprocal_of(double x)
{
    double reciprocal;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(reciprocal) : "d"(x));
    return fma(fma(-x, reciprocal, 1.0), reciprocal, reciprocal);
}

// Exact for 0 ≤ x < 2^52; an addition is sooner done than a conversion.
__device__ __forceinline__ double whole(long long x)
{
    return __longlong_as_double(x | 0x4330000000000000) - 4503599627370496.0;
}

// ln of a whole number ≥ 1: x = 2^e·m with m in [√½, √2), ln m = 2 artanh((m − 1)/(m + 1)), |s| ≤ 0.1716; the first
// term that the series leaves out is 2/13·s^13 ≤ 2e-11.
__device__ __forceinline__ double ln_whole(double x)
{
    const int high = __double2hiint(x), exponent = (high - 0x3fe6a09e) >> 20;
    const double m = __hiloint2double(high - (exponent << 20), __double2loint(x));
    const double s = (m - 1.0) * reciprocal_of(m + 1.0), z = s * s, zz = z * z;
    const double low = fma(z, 2.0 / 3.0, 2.0), middle = fma(z, 2.0 / 7.0, 2.0 / 5.0);
    const double high_terms = fma(z, 2.0 / 11.0, 2.0 / 9.0);
    return fma(whole(exponent), 0.69314718055994530942, s * fma(zz, fma(zz, high_terms, middle), low));
}

// p ln(1/p) of one bin in units of 2^-48 nat; 24 + p ln(1/p) has exactly that ulp. No count, no term: p is 0.
__device__ __forceinline__ unsigned long long entropy_units(long long count, double per_action, double ln_total)
{
    const double p = whole(count) * per_action, term = p * (ln_total - ln_whole(whole(count > 0 ? count : 1)));
    return (unsigned long long)(__double_as_longlong(term + 24.0) - __double_as_longlong(24.0));
}

__device__ __forceinline__ double nats(unsigned long long units)
{
    const double entropy = __longlong_as_double(__double_as_longlong(16.0) + (long long)units) - 16.0;
    return entropy < LN_N_ACTIONS ? entropy : LN_N_ACTIONS;
}

// What daemon clients reported with the pooled actions becomes an observation with them; one thread, rarely.
__device__ inline void observe_pooled_reports(const Row& row)
{
    const long long* columns = row.pool + N_ACTIONS;
    const double blend = row.parameters[PARAM_EMA_BLEND];
    if (columns[POOL_PROPOSED] > 0) {
        const double rate = (double)columns[POOL_GATED] / (double)columns[POOL_PROPOSED];
        const long long seen = row.counters[COUNTER_GATE_OBSERVATIONS]++;
        row.slots[SLOT_GATE_RATE] = narrow(rate);
        row.slots[SLOT_GATE_RATE_EMA] = blended(row.slots[SLOT_GATE_RATE_EMA], rate, blend, true, seen);
    }
    if (columns[POOL_ROWS] > 0) {
        const double mean = (double)columns[POOL_ROW_ENTROPY] * ROW_ENTROPY_UNIT / (double)columns[POOL_ROWS];
        const long long seen = row.counters[COUNTER_CONDITIONAL_OBSERVATIONS]++;
        row.slots[SLOT_CONDITIONAL_ENTROPY] = narrow(mean);
        row.slots[SLOT_CONDITIONAL_ENTROPY_EMA] =
            blended(row.slots[SLOT_CONDITIONAL_ENTROPY_EMA], mean, blend, true, seen);
    }
}
