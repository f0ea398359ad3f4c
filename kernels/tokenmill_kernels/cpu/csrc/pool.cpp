#include "pool.hpp"

#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tokenmill {
namespace {

using std::chrono::microseconds;

// Between regions: what the caller needs from one native call to the next.
constexpr microseconds kIdleSpin{60};
// At a barrier everybody else is about to arrive. Sleeping here would hide from the operating system that two threads
// of the team share a core, and it would leave them there: one runnable thread a core looks balanced.
constexpr microseconds kBarrierSpin{5000};
// After this long a waiting thread offers its core to whoever wants it, perhaps the thread it waits for.
constexpr microseconds kYieldAfter{20};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `value` is no longer `old`: spins for a while, then sleeps.
void wait_for_change(const std::atomic<int>& value, int old, microseconds spin) {
  const auto start = std::chrono::steady_clock::now();
  for (microseconds waited{0}; waited < spin;
       waited = std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - start)) {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
    if (waited > kYieldAfter) sched_yield();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  // Never destroyed: its threads sleep until the process ends, and no destructor may wait for them.
  static ThreadPool* const pool = new ThreadPool;
  return *pool;
}

ThreadPool::ThreadPool() { start(1); }

void ThreadPool::set_num_threads(int count) {
  const std::lock_guard lock(mutex_);
  if (count == num_threads_) return;
  stop();
  start(count);
}

void ThreadPool::start(int count) {
  num_threads_ = count;
  taken_ = std::make_unique<Counter[]>(count);
  region_ = nullptr;
  const int epoch = epoch_.value.load(std::memory_order_relaxed);
  for (int index = 1; index < count; ++index) {
    threads_.emplace_back([this, index, count, epoch] { serve(index, count, epoch); });
  }
}

void ThreadPool::stop() {
  region_ = nullptr;
  epoch_.value.fetch_add(1, std::memory_order_release);
  epoch_.value.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::serve(int index, int count, int epoch) {
  Worker worker(this, index, count);
  for (;; ++epoch) {
    wait_for_change(epoch_.value, epoch, kIdleSpin);
    if (region_ == nullptr) return;
    region_(context_, worker);
    arrive(count);
  }
}

void ThreadPool::run_region(Region region, void* context) {
  const std::lock_guard lock(mutex_);
  Worker worker(this, 0, num_threads_);
  if (num_threads_ == 1) {
    region(context, worker);
    return;
  }
  region_ = region;
  context_ = context;
  epoch_.value.fetch_add(1, std::memory_order_release);
  epoch_.value.notify_all();
  region(context, worker);
  arrive(num_threads_);
}

void ThreadPool::arrive(int count) {
  const int generation = generation_.value.load(std::memory_order_relaxed);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 < count) {
    wait_for_change(generation_.value, generation, kBarrierSpin);
    return;
  }
  // Everybody is here: nobody touches the task counters, so they can begin again.
  for (int index = 0; index < count; ++index) taken_[index].value.store(0, std::memory_order_relaxed);
  arrived_.value.store(0, std::memory_order_relaxed);
  generation_.value.fetch_add(1, std::memory_order_release);
  generation_.value.notify_all();
}

void Worker::barrier() {
  if (count_ > 1) pool_->arrive(count_);
}

}  // namespace tokenmill
