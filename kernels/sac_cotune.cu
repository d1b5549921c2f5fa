// sac_cotune: one new learner step of one run; sac_cotune.py states the rule and is what the tests compare with.
//
//   bus             the bus (isv_bus.cuh)
//   row             the run's row
//   policy_entropy  double [1], what the learner reported for this step, in nats; NaN: nothing
//
// Idea: everything that the step depends on lies on the device, the decision whether it moves anything included, so
// that one launch of one thread is the whole step, and a CUDA graph that captured it goes on being right. The
// arithmetic is float64 in the order of the NumPy reference; the bus keeps float32.

__device__ __forceinline__ void store_log(float* slots, int log_slot, int slot, double log_value)
{
    slots[log_slot] = narrow(log_value);
    slots[slot] = narrow(exp(widen(slots[log_slot])));
}

__device__ __forceinline__ double clipped(double wanted, double low, double high)
{
    return wanted < low ? low : wanted > high ? high : wanted;
}

__device__ bool step_alpha(float* slots, long long update, const double* p, double error)
{
    const double gradient = -error;
    const double first = p[PARAM_BETA1] * widen(slots[SLOT_ALPHA_FIRST_MOMENT]) + (1.0 - p[PARAM_BETA1]) * gradient;
    const double second = p[PARAM_BETA2] * widen(slots[SLOT_ALPHA_SECOND_MOMENT])
                          + (1.0 - p[PARAM_BETA2]) * gradient * gradient;
    const double unbiased_first = first / (1.0 - pow(p[PARAM_BETA1], (double)update));
    const double unbiased_second = second / (1.0 - pow(p[PARAM_BETA2], (double)update));
    const double step = p[PARAM_LR_ALPHA] * unbiased_first / (sqrt(unbiased_second) + p[PARAM_EPSILON]);
    const double wanted = widen(slots[SLOT_LOG_ALPHA]) - step;
    const double low = p[PARAM_LOG_ALPHA_MIN], high = p[PARAM_LOG_ALPHA_MAX];
    const bool at_bound = wanted < low || wanted > high;
    slots[SLOT_ALPHA_FIRST_MOMENT] = at_bound ? 0.0f : narrow(first);  // no winding up against a bound
    slots[SLOT_ALPHA_SECOND_MOMENT] = narrow(second);
    store_log(slots, SLOT_LOG_ALPHA, SLOT_ALPHA, clipped(wanted, low, high));
    return at_bound;
}

__device__ bool step_tau(float* slots, const double* p, double error)
{
    const double wanted = widen(slots[SLOT_LOG_TAU]) + p[PARAM_LR_TAU] * error;
    const double low = p[PARAM_LOG_TAU_MIN], high = p[PARAM_LOG_TAU_MAX];
    store_log(slots, SLOT_LOG_TAU, SLOT_TAU, clipped(wanted, low, high));
    return wanted < low || wanted > high;
}

__device__ int step(const Row& row)
{
    float* slots = row.slots;
    long long* counters = row.counters;
    const double* p = row.parameters;
    const long long seen = counters[(int)p[PARAM_SOURCE_COUNTER]];
    if (seen == 0) return STATUS_WAITING;
    if (seen == counters[COUNTER_SOURCE_SEEN]) return STATUS_HELD;
    counters[COUNTER_SOURCE_SEEN] = seen;
    const long long update = ++counters[COUNTER_UPDATES];
    const double error = p[PARAM_TARGET] - widen(slots[(int)p[PARAM_SOURCE_SLOT]]);
    slots[SLOT_EFFECTIVE_TARGET] = narrow(p[PARAM_TARGET]);
    slots[SLOT_ENTROPY_ERROR] = narrow(error);
    const bool alpha_at_bound = step_alpha(slots, update, p, error);
    const bool tau_at_bound = step_tau(slots, p, error);
    return alpha_at_bound || tau_at_bound ? STATUS_AT_BOUND : STATUS_UPDATED;
}

extern "C" __global__ void sac_cotune(unsigned char* bus, long long row, const double* policy_entropy)
{
    const Row mine = row_at(bus, row);
    const double reported = *policy_entropy;
    if (reported == reported) {  // not NaN
        float* ema = mine.slots + SLOT_RL_POLICY_ENTROPY_EMA_INDEX;
        *ema = blended(*ema, reported, mine.parameters[PARAM_EMA_BLEND], false, 0);
        mine.counters[COUNTER_POLICY_OBSERVATIONS] += 1;
    }
    mine.slots[SLOT_TUNER_STATUS] = (float)step(mine);
}
