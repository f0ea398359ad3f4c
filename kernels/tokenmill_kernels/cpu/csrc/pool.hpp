// A persistent team of threads that runs one function at a time, all threads together.
//
// Inside a region every thread executes the same code; `Worker::for_each` splits tasks among them and ends with a
// barrier. Threads that wait spin for a bounded time, then sleep: an idle library burns no CPU.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenmill {

class ThreadPool;

// One thread's view of a region.
class Worker {
 public:
  Worker(ThreadPool* pool, int index, int count) : pool_(pool), index_(index), count_(count) {}

  int index() const { return index_; }
  int count() const { return count_; }

  // Returns when every thread of the region has called it.
  void barrier();

  // Runs body(task) for every task in [0, num_tasks), each exactly once, on any thread, then a barrier. A thread
  // begins with its own contiguous share and then takes from the others, so a thread that the operating system
  // stopped costs little.
  template <class Body>
  void for_each(int num_tasks, Body&& body);

 private:
  ThreadPool* pool_;
  int index_;
  int count_;
};

class ThreadPool {
 public:
  static ThreadPool& instance();

  int num_threads() const { return num_threads_; }

  // Includes the calling thread of `run`. At least 1.
  void set_num_threads(int count);

  // Calls body(worker) on every thread of the team, the caller being thread 0, and returns when all are done.
  // Callers from different threads take turns.
  template <class Body>
  void run(Body&& body) {
    run_region([](void* context, Worker& worker) { (*static_cast<std::remove_reference_t<Body>*>(context))(worker); },
               const_cast<void*>(static_cast<const void*>(&body)));
  }

  // As `run`, on the calling thread alone: for work too small to wake others for.
  template <class Body>
  static void run_alone(Body&& body) {
    Worker worker(nullptr, 0, 1);
    body(worker);
  }

 private:
  friend class Worker;
  using Region = void (*)(void* context, Worker& worker);

  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  ThreadPool();
  void run_region(Region region, void* context);
  void start(int count);
  void stop();
  void serve(int index, int count, int epoch);
  void arrive(int count);

  std::mutex mutex_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Counter[]> taken_;  // per thread: tasks taken from its share
  Counter epoch_;                     // changes when a region starts or threads are to leave
  Counter arrived_;
  Counter generation_;  // changes when a barrier opens
  Region region_ = nullptr;
  void* context_ = nullptr;
  int num_threads_ = 1;
};

template <class Body>
void Worker::for_each(int num_tasks, Body&& body) {
  if (count_ == 1) {
    for (int task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  for (int offset = 0; offset < count_; ++offset) {
    const int owner = (index_ + offset) % count_;
    const int first = static_cast<int>(static_cast<int64_t>(num_tasks) * owner / count_);
    const int end = static_cast<int>(static_cast<int64_t>(num_tasks) * (owner + 1) / count_);
    std::atomic<int>& taken = pool_->taken_[owner].value;
    if (taken.load(std::memory_order_relaxed) >= end - first) continue;
    for (int task; (task = first + taken.fetch_add(1, std::memory_order_relaxed)) < end;) body(task);
  }
  barrier();
}

}  // namespace tokenmill
