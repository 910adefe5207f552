// GlmAccept: one sample for each slot (a cluster of 8 blocks a logits row), then the acceptance rule (a thread a request).
//
// Nothing is sorted. top-k and top-p both keep the best-ranked ids while the measure of better-ranked ones (count, or
// weight) stays below a target; the border is found by a histogram over 256 linear bins of the logit, one over 256 parts
// of the bin that holds it, and a direct comparison of the few ids left there (or, when many are left, histograms over the
// digits of the order-preserving key). The border is a key plus how many of its equals are kept, lowest ids first.
// Bound: memory once (16 rows of 154880 are 9.9 MB, 2.3 us); then latency of three cluster exchanges plus four for each
// active border, 1 to 2 us each.
#include <cooperative_groups.h>

#include "glm_kernels/sampling.h"
#include "refusal.h"
#include "vocabulary_row.cuh"

namespace glm {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr int kBins = 256;
constexpr float kCoarseRange = 28.f;  // in units of temperature: below e^-28 weights vanish
constexpr int kCandidates = 256;      // ids of a whole row that are compared directly

struct SlotResult {
  int32_t sample, best, has_nan, relaxed_accepted;
};

// Weights are added by 32-bit atomics in three parts of 14 bits; a block adds at most 49152 ids to a bin.
struct Histogram {
  uint32_t count[kBins];
  uint32_t part[3][kBins];
};

struct SharedState {
  ClusterExchange exchange;
  Histogram histograms[2];
  uint64_t scan_totals[kBins / 32];
  uint64_t warp_equal[kRowWarps], warp_weight[kRowWarps];
  uint64_t chosen_before;
  uint32_t chosen_bin, chosen_count;
  uint32_t num_candidates, candidates[kCandidates];  // keys of this block; read by the cluster
  uint32_t all_candidates[kCandidates];
  uint64_t measures[kCandidates];
  uint32_t border_key;
  uint64_t border_equal;
};

// Ids kept so far: key above `key`, and the first `num_equal` ids whose key equals it.
struct Border {
  uint32_t key;
  uint64_t num_equal;
};

__device__ uint32_t fmix32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// 24 random bits m of an output position; u = (m + 0.5) / 2^24.
__device__ uint32_t random_bits(int64_t seed, uint32_t position) {
  uint32_t h = fmix32((uint32_t)(uint64_t)seed ^ 0x9E3779B9u);
  h = fmix32(h ^ (uint32_t)((uint64_t)seed >> 32));
  return fmix32(h ^ position) >> 8;
}

__device__ float logit_of_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// ceil(fraction * total) for 0 <= fraction < 1, exact.
__device__ uint64_t ceil_of_fraction(float fraction, uint64_t total) {
  const uint32_t bits = __float_as_uint(fraction);
  const int exponent = (int)(bits >> 23);
  if (exponent < 63) return total > 0 ? 1 : 0;  // below 2^-64, subnormals included: product in (0, 1)
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const int shift = 150 - exponent;  // fraction = mantissa * 2^-shift, 24 <= shift <= 87
  const uint64_t high = __umul64hi(total, mantissa), low = total * mantissa;
  if (shift >= 64) {
    const uint64_t floor_value = shift - 64 >= 64 ? 0 : high >> (shift - 64);
    const uint64_t rest = (shift > 64 ? high << (128 - shift) : 0) | low;
    return floor_value + (rest != 0);
  }
  const uint64_t floor_value = high << (64 - shift) | low >> shift;
  return floor_value + (low << (64 - shift) != 0);
}

// Place of a logit in the two linear histograms; both bins fall when the logit falls.
struct LinearBins {
  int coarse, fine;
};

struct RowSampler {
  VocabularyRow row;
  SharedState& state;
  float maximum, scale;   // scale = log2(e) / temperature
  float bins_per_logit;
  int buffer;             // histogram to fill next; it is clear

  __device__ uint64_t weight(float logit) const { return fixed_weight(logit, maximum, scale); }

  __device__ LinearBins linear_bins(float logit) const {
    const float place = logit == maximum ? 0.f : fminf((maximum - logit) * bins_per_logit, 1e9f);
    const float coarse = fminf(floorf(place), (float)(kBins - 1));
    return {(int)coarse, (int)fminf((place - coarse) * kBins, (float)(kBins - 1))};
  }

  // No id with a logit below this matters to the border being sought.
  float floor_logit;

  // Adds this thread's ids for which bin_of(logit) >= 0 to the current histogram.
  template <bool kByWeight, typename Bin>
  __device__ void fill(Bin bin_of) {
    Histogram& histogram = state.histograms[buffer];
    row.for_each([&](int, float logit) {
      if (logit < floor_logit) return;
      const int bin = bin_of(logit);
      if (bin < 0) return;
      atomicAdd(&histogram.count[bin], 1u);
      if constexpr (kByWeight) {
        const uint64_t value = weight(logit);
        const uint32_t parts[3] = {(uint32_t)value & 0x3fffu, (uint32_t)(value >> 14) & 0x3fffu, (uint32_t)(value >> 28)};
#pragma unroll
        for (int p = 0; p < 3; ++p) {
          if (parts[p] != 0) atomicAdd(&histogram.part[p][bin], parts[p]);
        }
      }
    });
  }

  // Bins in rank order (0 = best): the bin whose elements carry the measure from below to at least `target`.
  template <bool kByWeight>
  __device__ void choose(uint64_t target) {
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const int bin = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t value = 0, inclusive = 0;
    uint32_t count = 0;
    if (bin < kBins) {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        const Histogram* histogram = cluster.map_shared_rank(&state.histograms[buffer], block);
        count += histogram->count[bin];
        if constexpr (kByWeight) {
          value += (uint64_t)histogram->part[0][bin] + ((uint64_t)histogram->part[1][bin] << 14) +
                   ((uint64_t)histogram->part[2][bin] << 28);
        }
      }
      if constexpr (!kByWeight) value = count;
      inclusive = value;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      if (lane == 31) state.scan_totals[warp] = inclusive;
    }
    __syncthreads();
    if (bin < kBins) {
      uint64_t before = inclusive - value;
      for (int other = 0; other < warp; ++other) before += state.scan_totals[other];
      // Should rounding of floor_logit ever leave too little, the last bin stands in, so that nothing stale is read.
      if ((before < target && target <= before + value) || (bin == kBins - 1 && target > before + value)) {
        state.chosen_bin = bin;
        state.chosen_before = before;
        state.chosen_count = count;
      }
    }
    // The other histogram was last read before the synchronisation above.
    buffer ^= 1;
    uint32_t* words = reinterpret_cast<uint32_t*>(&state.histograms[buffer]);
    for (int i = threadIdx.x; i < (int)(sizeof(Histogram) / 4); i += kRowThreads) words[i] = 0;
    __syncthreads();
  }

  // Ends the search among at most kCandidates ids of the row, those in `bins`: every block collects all their keys.
  template <bool kByWeight>
  __device__ Border compare_candidates(LinearBins bins, uint64_t target) {
    row.for_each([&](int, float logit) {
      if (logit < floor_logit) return;
      const LinearBins found = linear_bins(logit);
      if (found.coarse == bins.coarse && found.fine == bins.fine) {
        const uint32_t place = atomicAdd(&state.num_candidates, 1u);
        if (place < kCandidates) state.candidates[place] = logit_key(logit);
      }
    });
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    uint32_t total = 0;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const uint32_t count = min(*cluster.map_shared_rank(&state.num_candidates, block), kCandidates - total);
      if (threadIdx.x < count) {
        const uint32_t key = *cluster.map_shared_rank(&state.candidates[threadIdx.x], block);
        state.all_candidates[total + threadIdx.x] = key;
        state.measures[total + threadIdx.x] = kByWeight ? weight(logit_of_key(key)) : 1;
      }
      total += count;
    }
    __syncthreads();
    if (threadIdx.x < total) {
      const uint32_t key = state.all_candidates[threadIdx.x];
      const uint64_t measure = state.measures[threadIdx.x];
      uint64_t before = 0, equal = 0;
      for (uint32_t other = 0; other < total; ++other) {
        if (state.all_candidates[other] > key) before += state.measures[other];
        equal += state.all_candidates[other] == key;
      }
      // One key fits; its equals all write the same.
      if (before < target && target <= before + equal * measure) {
        state.border_key = key;
        state.border_equal = (target - before + measure - 1) / measure;
      }
    }
    __syncthreads();
    return {state.border_key, state.border_equal};
  }

  // Ends the search among any number of ids, those in `bins`: four histograms over the digits of their keys.
  template <bool kByWeight>
  __device__ Border descend_digits(LinearBins bins, uint64_t target) {
    uint32_t prefix = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
      fill<kByWeight>([&](float logit) {
        const LinearBins found = linear_bins(logit);
        const uint32_t key = logit_key(logit);
        const bool member = found.coarse == bins.coarse && found.fine == bins.fine &&
                            (shift == 24 || (key >> (shift + 8)) == (prefix >> (shift + 8)));
        return member ? 255 - (int)(key >> shift & 255u) : -1;
      });
      choose<kByWeight>(target);
      prefix |= (255u - state.chosen_bin) << shift;
      target -= state.chosen_before;
    }
    const uint64_t measure = kByWeight ? weight(logit_of_key(prefix)) : 1;
    return {prefix, (target + measure - 1) / measure};
  }

  // The border that keeps ids while the measure of better-ranked ids is below target (1 <= target <= whole measure).
  template <bool kByWeight>
  __device__ Border find_border(uint64_t target) {
    if (threadIdx.x == 0) {
      // Read by other blocks for the border before; a cluster-wide sum lies between.
      state.num_candidates = 0;
      state.border_key = 0;
      state.border_equal = 0;
    }
    LinearBins bins;
    fill<kByWeight>([&](float logit) { return linear_bins(logit).coarse; });
    choose<kByWeight>(target);
    bins.coarse = state.chosen_bin;
    target -= state.chosen_before;
    fill<kByWeight>([&](float logit) {
      const LinearBins found = linear_bins(logit);
      return found.coarse == bins.coarse ? found.fine : -1;
    });
    choose<kByWeight>(target);
    bins.fine = state.chosen_bin;
    target -= state.chosen_before;
    return state.chosen_count <= kCandidates ? compare_candidates<kByWeight>(bins, target)
                                             : descend_digits<kByWeight>(bins, target);
  }

  // The id drawn by 24 random bits among ids inside the border with at least `floor_weight`; written by one thread.
  // Overwrites the segment: ids get their kept weight as a float (a multiple of 2^-40 once rounded), others 0.
  __device__ void draw(Border border, uint64_t floor_weight, uint32_t bits, int32_t* sample) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t lanes_below = (1u << lane) - 1;
    const int segment = ((row.count + kRowWarps - 1) / kRowWarps + 31) / 32 * 32;
    const int begin = min(warp * segment, row.count), end = min(begin + segment, row.count);

    uint64_t equals = 0;  // ids before this warp's that equal the border
    if (border.num_equal > 0) {
      uint32_t equal = 0;
      for (int i = begin + lane; i < end; i += 32) equal += logit_key(row.at(i)) == border.key;
      equal = __reduce_add_sync(0xffffffffu, equal);
      if (lane == 0) state.warp_equal[warp] = equal;
      __syncthreads();
      uint64_t block_equal = 0, all[kRowBlocks];
#pragma unroll
      for (int other = 0; other < kRowWarps; ++other) {
        if (other < warp) equals += state.warp_equal[other];
        block_equal += state.warp_equal[other];
      }
      row.gather_blocks(block_equal, all);
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) equals += block < row.rank ? all[block] : 0;
    }

    uint64_t warp_total = 0;
    const auto keep = [&](int i, float logit, bool kept) {
      const uint64_t value = kept ? weight(logit) : 0;
      const bool stays = value >= floor_weight;
      // A weight has at most 24 significant bits, so the float holds it exactly.
      row.cached[i] = stays ? __ull2float_rn(value) : 0.f;
      warp_total += stays ? value : 0;
    };
    if (border.num_equal == 0) {
#pragma unroll 4
      for (int i = begin + lane; i < end; i += 32) {
        const float logit = row.at(i);
        keep(i, logit, logit_key(logit) > border.key);
      }
    } else {
      for (int i0 = begin; i0 < end; i0 += 32) {
        const int i = i0 + lane;
        const float logit = i < end ? row.at(i) : 0.f;
        const uint32_t key = logit_key(logit);
        const uint32_t same = __ballot_sync(0xffffffffu, i < end && key == border.key);
        const bool kept =
            key > border.key || (key == border.key && equals + __popc(same & lanes_below) < border.num_equal);
        equals += __popc(same);
        if (i < end) keep(i, logit, kept);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) warp_total += __shfl_xor_sync(0xffffffffu, warp_total, offset);
    if (lane == 0) state.warp_weight[warp] = warp_total;
    __syncthreads();
    uint64_t before = 0, block_total = 0, total = 0, all[kRowBlocks];
#pragma unroll
    for (int other = 0; other < kRowWarps; ++other) {
      if (other < warp) before += state.warp_weight[other];
      block_total += state.warp_weight[other];
    }
    row.gather_blocks(block_total, all);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      before += block < row.rank ? all[block] : 0;
      total += all[block];
    }
    // Running sums are integers, so they exceed u * total exactly when they exceed its floor.
    const uint64_t odd = 2 * (uint64_t)bits + 1;
    const uint64_t point = __umul64hi(total, odd) << 39 | total * odd >> 25;
    if (before > point || point >= before + warp_total) return;

    // This warp holds the id: first the lane whose contiguous share holds it, then the lane walks its share.
    const int share = (end - begin + 31) / 32;
    const int share_begin = min(begin + lane * share, end), share_end = min(share_begin + share, end);
    uint64_t share_total = 0;
#pragma unroll 8
    for (int i = share_begin; i < share_end; ++i) share_total += __float2ull_rn(row.cached[i]);
    uint64_t inclusive = share_total;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    uint64_t running = before + inclusive - share_total;
    if (running > point || point >= running + share_total) return;
    for (int i = share_begin; i < share_end; ++i) {
      running += __float2ull_rn(row.cached[i]);
      if (running > point) {
        *sample = row.begin + i;
        return;
      }
    }
  }
};

__device__ int clamped_drafts(const GlmAcceptArgs& args, int request) {
  return min(max(args.num_drafts[request], 0), args.num_slots - 1);
}

__device__ bool is_relaxed(const GlmAcceptArgs& args, int request, int slot) {
  if (args.relaxed_topk <= 0 || !args.in_thinking_phase[request]) return false;
  if (!(args.temperature[request] >= kGreedyBelow)) return false;
  for (int j = 0; j <= slot; ++j) {
    const int draft = args.draft_tokens[(int64_t)request * args.draft_width + j];
    for (int i = 0; i < args.num_thinking_end_ids; ++i) {
      if (draft == args.thinking_end_ids[i]) return false;
    }
  }
  return true;
}

// Whether the draft ranks among the relaxed_topk best with a probability within delta of the best one's.
__device__ bool accepts_relaxed(const GlmAcceptArgs& args, VocabularyRow& row, float maximum, int draft, float logit) {
  const uint64_t code = rank_code(logit, draft);
  uint64_t total = 0, better = 0;
  row.for_each([&](int i, float other) {
    total += fixed_weight(other, maximum, kLog2e);
    better += rank_code(other, row.begin + i) > code;
  });
  total = row.cluster_sum(total);
  better = row.cluster_sum(better);
  const double probability = (double)fixed_weight(logit, maximum, kLog2e) / (double)total;
  return better < (uint64_t)args.relaxed_topk &&
         probability >= (double)(1ull << 40) / (double)total - (double)args.relaxed_delta[0];
}

// Grid (8, B * num_slots), clusters of 8.
__global__ void __launch_bounds__(kRowThreads, 2) sample_kernel(const __grid_constant__ GlmAcceptArgs args,
                                                                SlotResult* results) {
  extern __shared__ float cached[];
  __shared__ SharedState state;
  const int request = blockIdx.y / args.num_slots, slot = blockIdx.y % args.num_slots;
  allow_next_kernel();
  wait_for_previous_kernels();
  const int num_drafts = clamped_drafts(args, request);
  if (slot > num_drafts) return;  // the whole cluster
  const float* logits = args.logits + (int64_t)blockIdx.y * args.vocab_size;
  VocabularyRow row = make_vocabulary_row(logits, args.vocab_size, cached, &state.exchange);
  SlotResult* result = results + blockIdx.y;
  const bool leader = row.rank == 0 && threadIdx.x == 0;

  row.load();
  const uint64_t best = row.cluster_max(row.best_of_thread());
  const bool has_nan = best == kNan;
  const int best_id = has_nan ? 0 : rank_code_id(best);
  const float maximum = has_nan ? 0.f : logits[best_id], temperature = args.temperature[request];
  if (leader) *result = {best_id, best_id, has_nan, 0};

  const bool relaxed = slot < num_drafts && is_relaxed(args, request, slot);
  const bool sampled = temperature >= kGreedyBelow && !relaxed && maximum != -CUDART_INF_F;
  if (!has_nan && relaxed) {
    const int draft = args.draft_tokens[(int64_t)request * args.draft_width + slot];
    if ((unsigned)draft < (unsigned)args.vocab_size) {
      const bool accepted = accepts_relaxed(args, row, maximum, draft, logits[draft]);
      if (leader) result->relaxed_accepted = accepted;
    }
  } else if (!has_nan && sampled) {
    RowSampler sampler = {row, state, maximum, kLog2e / temperature, (kBins - 1) / kCoarseRange / temperature, 0,
                          -CUDART_INF_F};
    uint32_t* words = reinterpret_cast<uint32_t*>(state.histograms);
    for (int i = threadIdx.x; i < (int)(sizeof(state.histograms) / 4); i += kRowThreads) words[i] = 0;
    __syncthreads();

    Border border = {0, 0};  // keeps every id: keys are above 0
    const int top_k = args.top_k[request];
    if (top_k > 0 && top_k < args.vocab_size) border = sampler.find_border<false>(top_k);
    const float top_p = args.top_p[request];
    if (top_p < 1.f) {
      uint64_t total = 0;
      row.for_each([&](int, float logit) { total += logit_key(logit) > border.key ? sampler.weight(logit) : 0; });
      total = sampler.row.cluster_sum(total);
      if (border.num_equal > 0) total += border.num_equal * sampler.weight(logit_of_key(border.key));
      const uint64_t wanted = top_p > 0.f ? ceil_of_fraction(top_p, total) : 0;
      // Ids lighter than (1 - top_p) total / vocabulary weigh less than 1 - top_p together: the border lies above them.
      // A hundredth of a bit is far more than the error of this bound.
      const float lightest = (1.f - fmaxf(top_p, 0.f)) * ((float)total / kWeightOne) / (float)args.vocab_size;
      sampler.floor_logit = maximum + (log2f(lightest) - 0.01f) / sampler.scale;
      const Border tighter = sampler.find_border<true>(wanted > 0 ? wanted : 1);
      if (tighter.key == border.key && border.num_equal < tighter.num_equal) {
        // Equal logits on both borders: the earlier cut already dropped the higher ids.
      } else {
        border = tighter;
      }
    }
    const float min_p = fminf(args.min_p[request], 1.f);
    const uint64_t floor_weight = min_p > 0.f ? (uint64_t)ceil((double)min_p * 1099511627776.0) : 0;
    const uint32_t bits = random_bits(args.seed[request], (uint32_t)args.sample_offset[request] + (uint32_t)slot);
    if (leader) result->sample = 0;
    cg::this_cluster().sync();  // the line above must not overtake the one that draws
    sampler.draw(border, floor_weight, bits, &result->sample);
  }
  cg::this_cluster().sync();  // no block leaves while others read its shared memory
}

__global__ void accept_kernel(const __grid_constant__ GlmAcceptArgs args, const SlotResult* results) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;
  allow_next_kernel();
  wait_for_previous_kernels();
  if (request >= args.num_requests) return;
  const int num_drafts = clamped_drafts(args, request);
  const SlotResult* slots = results + (int64_t)request * args.num_slots;
  int32_t* committed = args.committed + (int64_t)request * args.num_slots;
  bool has_nan = false;
  for (int j = 0; j <= num_drafts; ++j) has_nan |= slots[j].has_nan != 0;
  int num_accepted = num_drafts;
  for (int j = 0; j < args.num_slots; ++j) {
    int token = 0;
    if (!has_nan && j < num_drafts) {
      const int draft = args.draft_tokens[(int64_t)request * args.draft_width + j];
      const bool relaxed = is_relaxed(args, request, j);
      const bool rejected = relaxed ? slots[j].relaxed_accepted == 0 : draft != slots[j].sample;
      token = !rejected ? draft : relaxed ? slots[j].best : slots[j].sample;
      if (rejected && j < num_accepted) num_accepted = j;
    } else if (!has_nan && j == num_drafts) {
      token = slots[j].sample;
    }
    committed[j] = token;
  }
  args.num_accepted[request] = has_nan ? 0 : num_accepted;
  args.next_tokens[request] = has_nan ? -1 : committed[num_accepted];
}

int check_sizes(const GlmAcceptArgs& args) {
  const char* entry = "glm_accept";
  if (args.num_requests < 0 || args.num_slots < 1 || args.num_slots > 33) {
    return refuse("%s: num_requests %d and num_slots %d, expected >= 0 and 1 .. 33", entry, args.num_requests,
                  args.num_slots);
  }
  if (args.vocab_size < 1 || args.vocab_size > kMaxVocabulary) {
    return refuse("%s: vocab_size %d, expected 1 .. %d", entry, args.vocab_size, kMaxVocabulary);
  }
  if (args.draft_width < args.num_slots - 1) {
    return refuse("%s: draft_width %d, expected at least num_slots - 1 = %d", entry, args.draft_width,
                  args.num_slots - 1);
  }
  if ((int64_t)args.num_requests * args.num_slots > 65535) {
    return refuse("%s: %lld logits rows, expected at most 65535; split the batch", entry,
                  (long long)args.num_requests * args.num_slots);
  }
  if (args.num_thinking_end_ids < 0 || args.num_thinking_end_ids > 8) {
    return refuse("%s: num_thinking_end_ids %d, expected 0 .. 8", entry, args.num_thinking_end_ids);
  }
  if (args.relaxed_topk > 0 && (args.in_thinking_phase == nullptr || args.relaxed_delta == nullptr)) {
    return refuse("%s: relaxed_topk is %d but in_thinking_phase or relaxed_delta is null", entry, args.relaxed_topk);
  }
  return 0;
}

}  // namespace
}  // namespace glm

size_t glm_accept_workspace_bytes(int num_requests, int num_slots) {
  if (num_requests <= 0 || num_slots <= 0) return 0;
  return glm::align_up((size_t)num_requests * num_slots * sizeof(glm::SlotResult), 256);
}

int glm_accept(const GlmAcceptArgs* args, void* workspace, size_t workspace_bytes, void* stream_pointer) {
  GLM_RETURN_IF(glm::check_sizes(*args));
  if (args->num_requests == 0) return 0;
  GLM_RETURN_IF(glm::check_pointer("glm_accept", "logits", args->logits, 4));
  GLM_RETURN_IF(glm::check_workspace("glm_accept", workspace, workspace_bytes,
                                     glm_accept_workspace_bytes(args->num_requests, args->num_slots)));
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  auto* results = static_cast<glm::SlotResult*>(workspace);
  GLM_RETURN_IF(glm::launch_on_row_clusters("glm_accept", glm::sample_kernel, args->num_requests * args->num_slots,
                                            args->vocab_size, stream, *args, results));
  return glm::launch_dependent("glm_accept", glm::accept_kernel, dim3((args->num_requests + 63) / 64), 64, 0, stream, 1,
                               *args, results);
}
