// Chooses a token's experts in every work-group of a persistent kernel: portable/choose_experts.cl (formula there), for logits with
// flags. Each group computes the same result, so no group waits for another's result.
//
// Four lanes count the experts ahead of an expert, each lane a quarter of all experts.
// Build: N_EXPERTS, TOP_K, RENORMALIZE, LOCAL_SIZE (a multiple of 32). Local memory: chosen_experts.
#include "common/float_order.cl"
#include "nvidia/ptx.cl"
#include "nvidia/flag_in_data.cl"

typedef struct {
    uint orders[N_EXPERTS];
    uint chosen[TOP_K];
    int ids[TOP_K];
    float shares[TOP_K];
} chosen_experts;

// Called by all work-items in a group. logits: float [N_EXPERTS], with flags.
inline void choose_experts(__local chosen_experts* to, __global const float* logits, const uint flag) {
    const int lid = this_item(), lane = lid % WARP;
    for (int first = lid / WARP * WARP; first < N_EXPERTS; first += LOCAL_SIZE) {
        const int i = first + lane;
        uint word = flag ^ 1;
        bool missing = i < N_EXPERTS;
        do {
            poll1(&word, logits + min(i, N_EXPERTS - 1), missing);
            missing = missing && ((word ^ flag) & 1);
        } while (warp_any(missing));
        if (i < N_EXPERTS) to->orders[i] = order_of(value_of(word));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int first = lid / WARP * (WARP / 4); first < N_EXPERTS; first += LOCAL_SIZE / 4) {
        const int i = first + lane / 4, j_first = lane % 4;
        const uint order = to->orders[min(i, N_EXPERTS - 1)];
        int place = 0;
#pragma unroll 8
        for (int j = j_first; j < N_EXPERTS; j += 4) {
            const uint other = to->orders[j];
            place += other > order || (other == order && j < i);
        }
        place += shuffle_int(place, 1);
        place += shuffle_int(place, 2);
        if (j_first == 0 && i < N_EXPERTS && place < TOP_K) {
            to->ids[place] = i;
            to->chosen[place] = order;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < WARP) {
        const float largest = ordered_float(to->chosen[0]);
        float sum = 0.0f;
        for (int i = lane; i < (RENORMALIZE ? TOP_K : N_EXPERTS); i += WARP)
            sum += exp(ordered_float(RENORMALIZE ? to->chosen[min(i, TOP_K - 1)] : to->orders[i]) - largest);
        sum = warp_sum(sum);
        for (int s = lane; s < TOP_K; s += WARP) to->shares[s] = exp(ordered_float(to->chosen[s]) - largest) / sum;
    }
}
