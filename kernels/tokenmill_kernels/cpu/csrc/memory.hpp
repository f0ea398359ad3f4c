// Scratch memory aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace tokenmill {

constexpr size_t kAlignment = 64;

constexpr size_t align_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Uninitialised bytes that grow on demand; growing loses the contents.
class Buffer {
 public:
  char* data() const { return data_.get(); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    data_.reset();
    size_ = 0;
    data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, align_up(bytes))));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = bytes;
  }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

// Hands out consecutive aligned parts of one block of memory, or with no block only adds up their sizes.
class Carver {
 public:
  explicit Carver(char* memory = nullptr) : memory_(memory) {}

  template <class T>
  T* take(size_t count) {
    T* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += align_up(count * sizeof(T));
    return part;
  }

  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace tokenmill
