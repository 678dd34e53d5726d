// What a kernel of the host needs from MLX: inputs computed and packed, outputs allocated. Kernels then
// run on the calling thread; there is no graph node for them. And weights in large pages.

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#ifdef __linux__
#include <malloc.h>
#include <sys/mman.h>
#endif

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/memory.h"
#include "mlx/transforms.h"

namespace mx = mlx::core;

namespace {

// Copies a strided array into row-major order.
void pack(const mx::array& from, char* to) {
  const auto& shape = from.shape();
  const auto& strides = from.strides();
  const size_t size = from.itemsize();
  const char* data = from.data<char>();
  const int rank = static_cast<int>(shape.size());
  if (from.size() == 0) {
    return;
  }
  // The innermost run of elements that lie side by side is copied in one piece.
  size_t run = 1;
  int outer = rank;
  while (outer > 0 &&
         (shape[outer - 1] == 1 || strides[outer - 1] == static_cast<int64_t>(run))) {
    run *= shape[--outer];
  }
  std::vector<int64_t> index(outer, 0);
  for (size_t done = 0; done < from.size(); done += run) {
    int64_t offset = 0;
    for (int axis = 0; axis < outer; ++axis) {
      offset += index[axis] * strides[axis];
    }
    std::memcpy(to + done * size, data + offset * static_cast<int64_t>(size), run * size);
    for (int axis = outer - 1; axis >= 0 && ++index[axis] == shape[axis]; --axis) {
      index[axis] = 0;
    }
  }
}

// Returns to the system what is free, which MLX and the allocator would rather keep.
void give_back() {
  mx::clear_cache();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

mx::array allocate(mx::Shape shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (auto length : shape) {
    bytes *= length;
  }
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), dtype);
}

} // namespace

extern "C" {

// An output to allocate. `shape` and `dtype` (in the order of mlx-c's enumeration) are given.
struct mlxhost_output {
  const int* shape;
  size_t rank;
  int dtype;
  // The input whose content it starts with, or -1: in the same buffer if the lender's handle is the
  // only one that holds it, else copied.
  int from;
  // Set here: a new handle, owned by the caller, and its data.
  void* handle;
  void* data;
};

// An input to make ready.
struct mlxhost_input {
  void* handle;
  // Whether it may come strided, as long as its last axis is not.
  bool strided;
  // Its data, if that is known: it is computed and row-contiguous then. Else null, and set here: its data, its strides in elements if it is strided and may be, and a packed copy that
  // the caller owns if there had to be one.
  const void* data;
  const int64_t* strides;
  void* packed;
};

// Computes the inputs and allocates the outputs. Returns 0, or 1 with the reason in `error`; what was
// set until then is the caller's in both cases.
int mlxhost_prepare(
    mlxhost_input* inputs,
    size_t input_count,
    mlxhost_output* outputs,
    size_t output_count,
    char* error,
    size_t error_room) {
  static const mx::Dtype dtypes[] = {
      mx::bool_, mx::uint8, mx::uint16, mx::uint32, mx::uint64, mx::int8, mx::int16,
      mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};
  try {
    std::vector<mx::array> pending;
    for (size_t i = 0; i < input_count; ++i) {
      if (inputs[i].data != nullptr) {
        continue;
      }
      const auto& input = *static_cast<mx::array*>(inputs[i].handle);
      if (!input.is_available()) {
        pending.push_back(input);
      }
    }
    if (!pending.empty()) {
      mx::eval(std::move(pending));
    }
    for (size_t i = 0; i < input_count; ++i) {
      if (inputs[i].data != nullptr) {
        continue;
      }
      const auto& input = *static_cast<mx::array*>(inputs[i].handle);
      inputs[i].data = input.data<char>();
      if (input.flags().row_contiguous) {
        continue;
      }
      if (inputs[i].strided && input.ndim() > 0 &&
          (input.strides().back() == 1 || input.shape(-1) == 1)) {
        inputs[i].strides = input.strides().data();
        continue;
      }
      auto* packed = new mx::array(allocate(input.shape(), input.dtype()));
      inputs[i].packed = packed;
      pack(input, packed->data<char>());
      inputs[i].data = packed->data<char>();
    }
    for (size_t i = 0; i < output_count; ++i) {
      auto& output = outputs[i];
      const mx::array* from = nullptr;
      if (output.from >= 0) {
        from = static_cast<mx::array*>(inputs[output.from].handle);
      }
      mx::Shape shape(output.shape, output.shape + output.rank);
      mx::array* made;
      if (from != nullptr && from->is_donatable() && from->flags().row_contiguous) {
        made = new mx::array(std::move(shape), dtypes[output.dtype], nullptr, {});
        output.handle = made;
        made->copy_shared_buffer(*from);
        made->set_status(mx::array::Status::available);
      } else {
        made = new mx::array(allocate(std::move(shape), dtypes[output.dtype]));
        output.handle = made;
        if (from != nullptr) {
          std::memcpy(made->data<char>(), inputs[output.from].data, made->nbytes());
        }
      }
      output.data = made->data<char>();
    }
    return 0;
  } catch (const std::exception& problem) {
    std::strncpy(error, problem.what(), error_room - 1);
    return 1;
  }
}

// Moves what computed arrays hold side by side into blocks of `block_bytes` or more, in large pages
// where the system has them, each array at the start of a cache line. Everything that shares an array's
// handle moves with it. Returns 0, or 1 with the reason in `error`; what was moved until then is whole.
int mlxhost_settle(
    void* const* handles,
    size_t count,
    size_t block_bytes,
    char* error,
    size_t error_room) {
  constexpr size_t line = 64;
  // What is moved before its old place is given back: more of it would be in memory twice.
  constexpr size_t at_once = 4 << 20;
  const auto rounded = [](size_t bytes) { return (bytes + line - 1) / line * line; };
  const auto movable = [](const mx::array& array) {
    return array.is_available() && array.flags().row_contiguous && array.nbytes() > 0;
  };
  try {
    size_t left = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto& array = *static_cast<mx::array*>(handles[i]);
      left += movable(array) ? rounded(array.nbytes()) : 0;
    }
    mx::array block(0.0f);
    size_t used = 0;
    size_t room = 0;
    size_t moved = 0;
    for (size_t i = 0; i < count; ++i) {
      auto& array = *static_cast<mx::array*>(handles[i]);
      if (!movable(array)) {
        continue;
      }
      const size_t bytes = rounded(array.nbytes());
      if (room - used < bytes) {
        const size_t wanted = std::max(bytes, std::min(left, block_bytes)) + line;
        block = allocate({static_cast<int>((wanted + line - 1) / line), static_cast<int>(line)}, mx::uint8);
        char* data = block.data<char>();
        used = (line - reinterpret_cast<uintptr_t>(data) % line) % line;
        room = block.nbytes();
#ifdef __linux__
        // Advice only: without large pages everything works as well, and slower. Of whole pages.
        constexpr uintptr_t page = 4096;
        const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
        const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + room) / page * page;
        if (end > start) {
          madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
        }
#endif
      }
      left -= bytes;
      std::memcpy(block.data<char>() + used, array.data<char>(), array.nbytes());
      array.copy_shared_buffer(
          block,
          array.strides(),
          array.flags(),
          array.data_size(),
          static_cast<int64_t>(used / array.itemsize()));
      used += bytes;
      moved += bytes;
      if (moved >= at_once) {
        give_back();
        moved = 0;
      }
    }
    give_back();
    return 0;
  } catch (const std::exception& problem) {
    std::strncpy(error, problem.what(), error_room - 1);
    return 1;
  }
}
}
