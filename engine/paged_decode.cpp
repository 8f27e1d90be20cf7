// Attention of single query tokens over the paged cache, on the CPU, without copying the cache.
//
// Each item of work is one sequence, or one key head of it: store the token's own key and value, then make one pass over
// the sequence's blocks with a running softmax. The cache is read once, in the order in which it lies in memory; that
// traffic is the cost. All arithmetic is float32.
//
// Built once for the machine by native.py, which also describes `Task` to ctypes. No headers of Python or torch, and
// no OpenMP of its own: `parallel` is the GOMP_parallel of the runtime that torch has loaded, so that both use the same
// threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kSpan = 64;   // tokens whose scores are held at once
constexpr int kStride = 4;  // tokens per inner step: the query is loaded, and the result stored, once for all of them

struct Bfloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bfloat16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Bfloat16* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  to->bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

// e to the power of x for x <= 0, to about 2 units in the last place; NaN stays NaN.
inline float exponential(float x) {
  const float scaled = std::max(x * 1.44269504f, -126.0f);
  const float whole = std::nearbyint(scaled);
  const float f = (scaled - whole) * 0.693147181f;
  float p = 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const float power = __builtin_bit_cast(float, (static_cast<int32_t>(whole) + 127) << 23);
  return x == x ? (x < -87.0f ? 0.0f : p * power) : x;
}

}  // namespace

extern "C" {

// What one call works on. Strides count elements. Mirrored by native.Task.
struct Task {
  const void* query;     // [heads, tokens, head_dim] by strides; the last dimension is dense, here and below
  const void* new_key;   // [kv_heads, tokens, head_dim] by strides
  const void* new_value; // [kv_heads, tokens, head_dim] by strides
  void* keys;            // [blocks, block_size, kv_heads, head_dim], dense
  void* values;          // the same
  void* output;          // [tokens, heads, head_dim], dense
  const int32_t* tables; // [tokens, table_stride]
  const int64_t* lens;   // [tokens]; cached tokens with the new one
  const float* sinks;    // [heads], or null
  int64_t query_head_stride, query_token_stride;
  int64_t key_head_stride, key_token_stride;
  int64_t value_head_stride, value_token_stride;
  int64_t table_stride;
  int32_t tokens, heads, kv_heads, head_dim, block_size;
  int32_t window;        // keys that a query sees, itself included; 0: all
  int32_t splits;        // items that a sequence is cut into: 1 or kv_heads
  int32_t is_bfloat16;
  float scaling, softcap; // softcap 0: none
};

}  // extern "C"

namespace {

// Scratch of one thread, grown to the largest task it has seen.
struct Scratch {
  std::vector<float> query, sums, scores, rows, largest, total;
  std::vector<int64_t> where;

  void fit(int heads, int group, int dim) {
    query.resize(static_cast<size_t>(heads) * dim);
    sums.resize(static_cast<size_t>(heads) * dim);
    largest.resize(heads);
    total.resize(heads);
    scores.resize(static_cast<size_t>(group) * kSpan);
    rows.resize(static_cast<size_t>(kStride) * dim);
    where.resize(2 * kSpan);
  }
};

template <class T>
inline void load_rows(const T* base, const int64_t* where, int count, int64_t row_size, int dim, float* to) {
  for (int i = 0; i < kStride; ++i) {
    const T* from = base + where[std::min(i, count - 1)] * row_size;  // beyond the end: the last one again
#pragma omp simd
    for (int d = 0; d < dim; ++d) to[i * dim + d] = widen(from[d]);
  }
}

// scores[g, i] = query[g] . key[i], for `count` tokens at `where`. kDim is head_dim if it is known at compile time.
template <class T, int kDim>
void score(const T* keys, const int64_t* where, int count, int64_t row_size, int group, int runtime_dim,
           const float* query, float* rows, float* scores) {
  const int dim = kDim ? kDim : runtime_dim;
  for (int i = 0; i < count; i += kStride) {
    load_rows(keys, where + i, count - i, row_size, dim, rows);
    for (int g = 0; g < group; ++g) {
      const float* q = query + g * dim;
      float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
      for (int d = 0; d < dim; ++d) {
        s0 += q[d] * rows[d];
        s1 += q[d] * rows[dim + d];
        s2 += q[d] * rows[2 * dim + d];
        s3 += q[d] * rows[3 * dim + d];
      }
      float* s = scores + g * kSpan + i;
      s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3;  // kSpan is a multiple of kStride: no overrun
    }
  }
}

// sums[g] += sum over i of weights[g, i] * value[i]; weights beyond `count` are zero.
template <class T, int kDim>
void accumulate(const T* values, const int64_t* where, int count, int64_t row_size, int group, int runtime_dim,
                const float* weights, float* rows, float* sums) {
  const int dim = kDim ? kDim : runtime_dim;
  for (int i = 0; i < count; i += kStride) {
    load_rows(values, where + i, count - i, row_size, dim, rows);
    for (int g = 0; g < group; ++g) {
      const float* w = weights + g * kSpan + i;
      const float w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
      float* sum = sums + g * dim;
#pragma omp simd
      for (int d = 0; d < dim; ++d) {
        sum[d] += w0 * rows[d] + w1 * rows[dim + d] + w2 * rows[2 * dim + d] + w3 * rows[3 * dim + d];
      }
    }
  }
}

// Turn the scores of one head into weights relative to its largest score so far, and rescale what was summed up.
inline void soften(float* scores, int count, float softcap, int dim, float* largest, float* total, float* sums) {
  if (softcap != 0) {
    for (int i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
  }
  float top = *largest;
#pragma omp simd reduction(max : top)
  for (int i = 0; i < count; ++i) top = std::max(top, scores[i]);
  if (top > *largest) {
    const float shrink = exponential(*largest - top);
    *total *= shrink;
#pragma omp simd
    for (int d = 0; d < dim; ++d) sums[d] *= shrink;
    *largest = top;
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < count; ++i) sum += scores[i] = exponential(scores[i] - top);
  *total += sum;
  for (int i = count; i % kStride; ++i) scores[i] = 0;
}

template <class T>
void store(const Task& t, int token, int first_head, int last_head, int64_t row) {
  const int dim = t.head_dim;
  for (int h = first_head; h < last_head; ++h) {
    const T* key = static_cast<const T*>(t.new_key) + h * t.key_head_stride + token * t.key_token_stride;
    const T* value = static_cast<const T*>(t.new_value) + h * t.value_head_stride + token * t.value_token_stride;
    const int64_t at = (row * t.kv_heads + h) * dim;
    std::copy_n(key, dim, static_cast<T*>(t.keys) + at);
    std::copy_n(value, dim, static_cast<T*>(t.values) + at);
  }
}

// Ask for the keys and values of tokens that come next, so that they are on their way while we compute.
template <class T>
void prefetch(const Task& t, int first_head, int last_head, const int64_t* where, int count, int64_t row_size) {
  constexpr int kLine = 64 / sizeof(T);
  const int64_t first = int64_t{first_head} * t.head_dim, last = int64_t{last_head} * t.head_dim;
  for (int i = 0; i < count; ++i) {
    for (int64_t at = where[i] * row_size + first; at < where[i] * row_size + last; at += kLine) {
      __builtin_prefetch(static_cast<const T*>(t.keys) + at, 0, 2);
      __builtin_prefetch(static_cast<const T*>(t.values) + at, 0, 2);
    }
  }
}

// Walks over the cache rows of a sequence's tokens.
class Rows {
 public:
  Rows(const int32_t* table, int block_size, int64_t first)
      : next_(table + first / block_size), block_size_(block_size), offset_(static_cast<int>(first % block_size)) {}

  void take(int count, int64_t* to) {
    for (int i = 0; i < count; ++i) {
      to[i] = *next_ * int64_t{block_size_} + offset_;
      if (++offset_ == block_size_) offset_ = 0, ++next_;
    }
  }

 private:
  const int32_t* next_;
  int block_size_, offset_;
};

template <class T, int kDim>
void attend(const Task& t, int token, int first_head, int last_head, Scratch& scratch) {
  const int dim = kDim ? kDim : t.head_dim, group = t.heads / t.kv_heads;
  const int64_t row_size = static_cast<int64_t>(t.kv_heads) * dim, len = t.lens[token];
  const int32_t* table = t.tables + token * t.table_stride;
  int64_t left = t.window ? std::min<int64_t>(len, t.window) : len, last_row;
  Rows(table, t.block_size, len - 1).take(1, &last_row);
  store<T>(t, token, first_head, last_head, last_row);

  scratch.fit(t.heads, group, dim);
  for (int h = first_head * group; h < last_head * group; ++h) {
    const T* q = static_cast<const T*>(t.query) + h * t.query_head_stride + token * t.query_token_stride;
    for (int d = 0; d < dim; ++d) scratch.query[h * dim + d] = widen(q[d]) * t.scaling;
    std::fill_n(&scratch.sums[h * dim], dim, 0.0f);
    scratch.largest[h] = t.sinks ? t.sinks[h] : -INFINITY;  // a sink is a key without a value
    scratch.total[h] = t.sinks ? 1.0f : 0.0f;
  }
  Rows rows(table, t.block_size, len - left);
  int64_t *where = scratch.where.data(), *next = where + kSpan;
  int count = static_cast<int>(std::min<int64_t>(kSpan, left)), next_count;
  rows.take(count, where);
  for (; count; left -= count, count = next_count, std::swap(where, next)) {
    next_count = static_cast<int>(std::min<int64_t>(kSpan, left - count));
    rows.take(next_count, next);
    prefetch<T>(t, first_head, last_head, next, next_count, row_size);
    for (int h = first_head; h < last_head; ++h) {
      const int q = h * group;
      float *scores = scratch.scores.data(), *four = scratch.rows.data(), *sums = &scratch.sums[q * dim];
      score<T, kDim>(static_cast<const T*>(t.keys) + h * dim, where, count, row_size, group, dim,
                     &scratch.query[q * dim], four, scores);
      for (int g = 0; g < group; ++g) {
        soften(scores + g * kSpan, count, t.softcap, dim, &scratch.largest[q + g], &scratch.total[q + g],
               sums + g * dim);
      }
      accumulate<T, kDim>(static_cast<const T*>(t.values) + h * dim, where, count, row_size, group, dim, scores,
                          four, sums);
    }
  }
  T* output = static_cast<T*>(t.output) + static_cast<int64_t>(token) * t.heads * dim;
  for (int h = first_head * group; h < last_head * group; ++h) {
    const float scale = 1.0f / scratch.total[h];
    for (int d = 0; d < dim; ++d) narrow(scratch.sums[h * dim + d] * scale, output + h * dim + d);
  }
}

template <class T>
void attend_any(const Task& t, int token, int first_head, int last_head, Scratch& scratch) {
  switch (t.head_dim) {
    case 64: return attend<T, 64>(t, token, first_head, last_head, scratch);
    case 128: return attend<T, 128>(t, token, first_head, last_head, scratch);
    default: return attend<T, 0>(t, token, first_head, last_head, scratch);
  }
}

struct Job {
  const Task* task;
  std::atomic<int> next{0};
};

void work(void* data) {
  static thread_local Scratch scratch;
  Job& job = *static_cast<Job*>(data);
  const Task& t = *job.task;
  const int items = t.tokens * t.splits, heads = t.kv_heads / t.splits;
  for (int item; (item = job.next.fetch_add(1, std::memory_order_relaxed)) < items;) {
    const int token = item / t.splits, first = item % t.splits * heads;
    (t.is_bfloat16 ? attend_any<Bfloat16> : attend_any<float>)(t, token, first, first + heads, scratch);
  }
}

}  // namespace

extern "C" void ftserve_paged_decode(const Task* task,
                                     void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags)) {
  Job job{task};
  if (parallel && task->tokens * task->splits > 1) {
    parallel(work, &job, 0, 0);  // as many threads as the caller's torch uses
  } else {
    work(&job);
  }
}
