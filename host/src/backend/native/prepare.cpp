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

// The element types, in the order of mlx-c's enumeration.
const mx::Dtype dtypes[] = {
    mx::bool_, mx::uint8, mx::uint16, mx::uint32, mx::uint64, mx::int8, mx::int16,
    mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};

// A cache line.
constexpr size_t line = 64;

// An array of at least as many bytes lies in pages of its own, and is never moved.
constexpr size_t large = 4 << 20;

// What is moved before the old places are given back: it is in memory twice, and giving back takes long.
constexpr size_t at_once = 12 << 20;

mx::array allocate(mx::Shape shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (auto length : shape) {
    bytes *= length;
  }
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), dtype);
}

// Bytes in large pages where the system has them.
struct Block {
  mx::array bytes{0.0f};
  // The next free byte, at the start of a cache line.
  size_t used = 0;

  Block() = default;

  explicit Block(size_t wanted)
      : bytes(allocate({static_cast<int>(wanted / line + 2), static_cast<int>(line)}, mx::uint8)) {
    const auto data = reinterpret_cast<uintptr_t>(bytes.data<char>());
    used = (line - data % line) % line;
#ifdef __linux__
    // Advice only: without large pages everything works as well, and slower. Of whole pages.
    constexpr uintptr_t page = 4096;
    const uintptr_t start = (data + page - 1) / page * page;
    const uintptr_t end = (data + bytes.nbytes()) / page * page;
    if (end > start) {
      madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
    }
#endif
  }

  size_t room() const {
    return bytes.nbytes() - used;
  }

  // Makes `array` a row-contiguous one that lies here.
  void place(mx::array& array) {
    mx::Strides strides(array.ndim());
    int64_t stride = 1;
    int wide = 0;
    for (int axis = array.ndim() - 1; axis >= 0; --axis) {
      strides[axis] = stride;
      stride *= array.shape(axis);
      wide += array.shape(axis) > 1;
    }
    array.copy_shared_buffer(
        bytes,
        strides,
        mx::array::Flags{true, true, wide <= 1},
        array.size(),
        static_cast<int64_t>(used / array.itemsize()));
    used += (array.nbytes() + line - 1) / line * line;
  }
};

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

// A new array to be filled that stays for long: a new handle, owned by the caller, and its data. Returns 0, or 1
// with the reason in `error`.
int mlxhost_staying(
    const int* shape,
    size_t rank,
    int dtype,
    void** handle,
    void** data,
    char* error,
    size_t error_room) {
  try {
    mx::Shape dims(shape, shape + rank);
    size_t bytes = mx::size_of(dtypes[dtype]);
    for (auto length : dims) {
      bytes *= length;
    }
    mx::array* made;
    if (bytes >= large) {
      Block block(bytes);
      made = new mx::array(std::move(dims), dtypes[dtype], nullptr, {});
      *handle = made;
      block.place(*made);
      made->set_status(mx::array::Status::available);
    } else {
      made = new mx::array(allocate(std::move(dims), dtypes[dtype]));
      *handle = made;
    }
    *data = made->data<char>();
    return 0;
  } catch (const std::exception& problem) {
    std::strncpy(error, problem.what(), error_room - 1);
    return 1;
  }
}

// Moves what computed arrays hold side by side into blocks of `block_bytes` or more, in large pages
// where the system has them, each array at the start of a cache line. Everything that shares an array's
// handle moves with it; what is large and made to stay lies well already. Returns 0, or 1 with the reason in
// `error`; what was moved until then is whole.
int mlxhost_settle(
    void* const* handles,
    size_t count,
    size_t block_bytes,
    char* error,
    size_t error_room) {
  const auto rounded = [](size_t bytes) { return (bytes + line - 1) / line * line; };
  const auto movable = [](const mx::array& array) {
    return array.is_available() && array.flags().row_contiguous && array.nbytes() > 0 &&
        (array.nbytes() < large || reinterpret_cast<uintptr_t>(array.data<char>()) % line != 0);
  };
  try {
    size_t left = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto& array = *static_cast<mx::array*>(handles[i]);
      left += movable(array) ? rounded(array.nbytes()) : 0;
    }
    Block block;
    size_t moved = 0;
    for (size_t i = 0; i < count; ++i) {
      auto& array = *static_cast<mx::array*>(handles[i]);
      if (!movable(array)) {
        continue;
      }
      const size_t bytes = rounded(array.nbytes());
      if (block.room() < bytes) {
        block = Block(std::max(bytes, std::min(left, block_bytes)));
      }
      left -= bytes;
      std::memcpy(block.bytes.data<char>() + block.used, array.data<char>(), array.nbytes());
      block.place(array);
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
