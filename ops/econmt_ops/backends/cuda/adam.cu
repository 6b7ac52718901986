// Adam and AdamW for many float32 tensors in one launch, with the arithmetic of torch's fused kernels. Each gradient is
// read once: counted in the norm, clipped and used. A block updates TILE values of one tensor.
#include "device.cuh"

constexpr int GROUPS = TILE / (THREADS * 4);  // groups of four values of a thread

struct AdamArguments {
  float* values[MOST];
  const float* gradients[MOST];
  float* first[MOST];
  float* second[MOST];
  const float* steps[MOST];
  long long sizes[MOST];
  int ends[MOST];
  int count;
  const float* rate;
  const float* divisor;
  const float* skip;
  float* squares;
  float beta1, beta2, log_beta1, log_beta2, bound, epsilon, decay;
  int decoupled;
};
// Per tensor: values, gradients, first (exp_avg), second (exp_avg_sq); steps: the number of this step, counted from 1;
// ends: the blocks of the tensor and of all before it. squares: per block, the sum of squares of the gradients as they
// come; or null. Gradients are divided by divisor, if there is one, and then clipped to bound. A launch whose skip is not
// zero, if there is one, changes nothing.

struct Rule {
  float beta1, beta2, rate, epsilon, decay, decay_factor, root, divisor, bound;
};

__device__ inline void update(const Rule& rule, float& value, float gradient, float& first, float& second, float& squares) {
  squares = fmaf(gradient, gradient, squares);
  gradient /= rule.divisor;
  gradient = gradient > rule.bound ? rule.bound : gradient < -rule.bound ? -rule.bound : gradient;  // NaN stays
  value *= rule.decay_factor;
  gradient = fmaf(value, rule.decay, gradient);
  first = fmaf(rule.beta1, first, fmaf(-rule.beta1, gradient, gradient));
  const float square = gradient * gradient;
  second = fmaf(rule.beta2, second, fmaf(-rule.beta2, square, square));
  value -= rule.rate * first / (sqrtf(second) / rule.root + rule.epsilon);
}

__device__ inline bool is_aligned(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer) % 16 == 0; }

extern "C" __global__ void __launch_bounds__(THREADS) adam(const __grid_constant__ AdamArguments its) {
  if (its.skip != nullptr && *its.skip != 0.f) return;
  const int block = blockIdx.x, thread = threadIdx.x;
  int tensor = 0;
  for (int skip = MOST / 2; skip; skip /= 2)
    if (tensor + skip < its.count && its.ends[tensor + skip - 1] <= block) tensor += skip;
  const long long begin = (long long)(block - (tensor ? its.ends[tensor - 1] : 0)) * TILE, size = its.sizes[tensor];
  float *values = its.values[tensor], *first = its.first[tensor], *second = its.second[tensor];
  const float* gradients = its.gradients[tensor];
  const bool whole = begin + TILE <= size && is_aligned(values) && is_aligned(gradients) && is_aligned(first) && is_aligned(second);

  float4 value[GROUPS], gradient[GROUPS], one[GROUPS], two[GROUPS];
  if (whole)
    for (int i = 0; i < GROUPS; ++i) {
      const long long at = begin / 4 + i * THREADS + thread;
      value[i] = reinterpret_cast<const float4*>(values)[at];
      gradient[i] = reinterpret_cast<const float4*>(gradients)[at];
      one[i] = reinterpret_cast<const float4*>(first)[at];
      two[i] = reinterpret_cast<const float4*>(second)[at];
    }

  // 1 - beta^step without cancellation.
  const float step = *its.steps[tensor], rate = *its.rate;
  const float rest1 = -expm1f(step * its.log_beta1), rest2 = -expm1f(step * its.log_beta2);
  Rule rule = {its.beta1, its.beta2, rate / rest1, its.epsilon, its.decay, 1.f, sqrtf(rest2),
               its.divisor ? *its.divisor : 1.f, its.bound};
  if (its.decoupled) rule.decay = 0.f, rule.decay_factor = 1.f - rate * its.decay;

  float squares = 0.f;
  if (whole)
    for (int i = 0; i < GROUPS; ++i) {
      const long long at = begin / 4 + i * THREADS + thread;
      update(rule, value[i].x, gradient[i].x, one[i].x, two[i].x, squares);
      update(rule, value[i].y, gradient[i].y, one[i].y, two[i].y, squares);
      update(rule, value[i].z, gradient[i].z, one[i].z, two[i].z, squares);
      update(rule, value[i].w, gradient[i].w, one[i].w, two[i].w, squares);
      reinterpret_cast<float4*>(values)[at] = value[i];
      reinterpret_cast<float4*>(first)[at] = one[i];
      reinterpret_cast<float4*>(second)[at] = two[i];
    }
  else
    for (long long at = begin + thread; at < min(begin + TILE, size); at += THREADS) {
      float its_value = values[at], its_first = first[at], its_second = second[at];
      update(rule, its_value, gradients[at], its_first, its_second, squares);
      values[at] = its_value, first[at] = its_first, second[at] = its_second;
    }

  if (its.squares == nullptr) return;
  float* shared = reinterpret_cast<float*>(shared_memory());
  for (int mask = 16; mask; mask /= 2) squares += lane_xor(squares, mask);
  if (thread % 32 == 0) shared[thread / 32] = squares;
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < THREADS / 32; ++warp) squares += shared[warp];
    its.squares[block] = squares;
  }
}
