// Adam and AdamW for many tensors in one launch, with the arithmetic of torch's fused kernels. Each gradient is read once:
// counted in the norm, clipped and used. A block updates TILE values of one tensor. Values and gradients are float32; with
// NARROW they are bfloat16, and values are rounded stochastically, as `econmt_ops.optimizers.stochastic_rounding` does.
#include "device.cuh"

#if NARROW
using Value = u16;
#else
using Value = float;
#endif

constexpr int GROUPS = TILE / (THREADS * 4);  // groups of four values of a thread

struct AdamArguments {
  Value* values[MOST];
  const Value* gradients[MOST];
  float* first[MOST];
  float* second[MOST];
  const float* steps[MOST];
  long long sizes[MOST];
  int ends[MOST];
  int salts[MOST];
  int count;
  const float* rate;
  const float* divisor;
  const float* skip;
  float* squares;
  float beta1, beta2, log_beta1, log_beta2, bound, epsilon, decay;
  int decoupled;
};
// Per tensor: values, gradients, first (exp_avg), second (exp_avg_sq); steps: the number of this step, counted from 1;
// ends: the blocks of the tensor and of all before it; salts: of the rounding. squares: per block, the sum of squares of the gradients as they
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

#if NARROW
__device__ inline u32 hashed(u32 bits) {
  bits = (bits ^ bits >> 16) * 0x7feb352du;
  bits = (bits ^ bits >> 15) * 0x846ca68bu;
  return bits ^ bits >> 16;
}
__device__ inline u16 rounded(float value, long long position, u32 key) {
  const u32 bits = bits_of(value), noise = hashed(hashed(static_cast<u32>(position)) ^ key) & 0xffffu;
  if ((bits & 0x7f800000u) != 0x7f800000u) return (bits + noise) >> 16;
  return bits >> 16 | ((bits & 0x7fffffu) != 0);  // an infinity, or NaN
}
__device__ inline float widened(u16 value) { return float_of(static_cast<u32>(value) << 16); }
__device__ inline float4 load_four(const u16* from) {
  const uint2 four = *reinterpret_cast<const uint2*>(from);
  return make_float4(float_of(four.x << 16), float_of(four.x & 0xffff0000u), float_of(four.y << 16),
                     float_of(four.y & 0xffff0000u));
}
__device__ inline void store_four(u16* to, float4 four, long long position, u32 key) {
  uint2 packed;
  packed.x = rounded(four.x, position, key) | static_cast<u32>(rounded(four.y, position + 1, key)) << 16;
  packed.y = rounded(four.z, position + 2, key) | static_cast<u32>(rounded(four.w, position + 3, key)) << 16;
  *reinterpret_cast<uint2*>(to) = packed;
}
#else
__device__ inline float rounded(float value, long long, u32) { return value; }
__device__ inline float widened(float value) { return value; }
__device__ inline float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ inline void store_four(float* to, float4 four, long long, u32) { *reinterpret_cast<float4*>(to) = four; }
#endif

__device__ inline bool is_aligned(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer) % 16 == 0; }

extern "C" __global__ void __launch_bounds__(THREADS) adam(const __grid_constant__ AdamArguments its) {
  if (its.skip != nullptr && *its.skip != 0.f) return;
  const int block = blockIdx.x, thread = threadIdx.x;
  int tensor = 0;
  for (int skip = MOST / 2; skip; skip /= 2)
    if (tensor + skip < its.count && its.ends[tensor + skip - 1] <= block) tensor += skip;
  const long long begin = (long long)(block - (tensor ? its.ends[tensor - 1] : 0)) * TILE, size = its.sizes[tensor];
  Value* values = its.values[tensor];
  float *first = its.first[tensor], *second = its.second[tensor];
  const Value* gradients = its.gradients[tensor];
  const bool whole = begin + TILE <= size && is_aligned(values) && is_aligned(gradients) && is_aligned(first) && is_aligned(second);

  float4 value[GROUPS], gradient[GROUPS], one[GROUPS], two[GROUPS];
  if (whole)
    for (int i = 0; i < GROUPS; ++i) {
      const long long at = begin / 4 + i * THREADS + thread;
      value[i] = load_four(values + 4 * at);
      gradient[i] = load_four(gradients + 4 * at);
      one[i] = reinterpret_cast<const float4*>(first)[at];
      two[i] = reinterpret_cast<const float4*>(second)[at];
    }

  // 1 - beta^step without cancellation.
  const float step = *its.steps[tensor], rate = *its.rate;
  const float rest1 = -expm1f(step * its.log_beta1), rest2 = -expm1f(step * its.log_beta2);
  Rule rule = {its.beta1, its.beta2, rate / rest1, its.epsilon, its.decay, 1.f, sqrtf(rest2),
               its.divisor ? *its.divisor : 1.f, its.bound};
  if (its.decoupled) rule.decay = 0.f, rule.decay_factor = 1.f - rate * its.decay;

#if NARROW
  const u32 key = hashed(hashed(static_cast<u32>(step)) ^ static_cast<u32>(its.salts[tensor]));
#else
  const u32 key = 0;
#endif
  float squares = 0.f;
  if (whole)
    for (int i = 0; i < GROUPS; ++i) {
      const long long at = begin / 4 + i * THREADS + thread;
      update(rule, value[i].x, gradient[i].x, one[i].x, two[i].x, squares);
      update(rule, value[i].y, gradient[i].y, one[i].y, two[i].y, squares);
      update(rule, value[i].z, gradient[i].z, one[i].z, two[i].z, squares);
      update(rule, value[i].w, gradient[i].w, one[i].w, two[i].w, squares);
      store_four(values + 4 * at, value[i], 4 * at, key);
      reinterpret_cast<float4*>(first)[at] = one[i];
      reinterpret_cast<float4*>(second)[at] = two[i];
    }
  else
    for (long long at = begin + thread; at < min(begin + TILE, size); at += THREADS) {
      float its_value = widened(values[at]), its_first = first[at], its_second = second[at];
      update(rule, its_value, widened(gradients[at]), its_first, its_second, squares);
      values[at] = rounded(its_value, at, key), first[at] = its_first, second[at] = its_second;
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
