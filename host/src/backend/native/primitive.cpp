// One MLX primitive for all of the host's own CPU kernels: it allocates the outputs, makes the
// inputs row-contiguous and calls a function with raw pointers on the stream's thread.

#include <cstring>
#include <memory>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace mx = mlx::core;

namespace {

// `strides` has one entry per input, in elements; null for those that are row-contiguous.
using Run = void (*)(
    const void* params,
    const void* const* inputs,
    const int64_t* const* strides,
    void* const* outputs);
using Drop = void (*)(void* params);

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

class Kernel : public mx::Primitive {
 public:
  Kernel(
      mx::Stream stream,
      Run run,
      void* params,
      Drop drop,
      std::vector<int> in_place,
      uint64_t strided)
      : mx::Primitive(stream),
        run_(run),
        params_(params, drop),
        in_place_(std::move(in_place)),
        strided_(strided) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    // Every output holds the inputs. Those of the one that is being computed suffice, and only if
    // nobody else holds an input can its buffer be taken over.
    for (auto& output : outputs) {
      if (&output.inputs() != &inputs) {
        output.inputs().clear();
      }
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<const void*> in;
    std::vector<void*> out;
    // Arrays to pack before the kernel runs: their values exist only then.
    std::vector<std::pair<mx::array, char*>> packs;
    std::vector<std::vector<int64_t>> strides;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& input = inputs[i];
      strides.emplace_back();
      const bool rows = input.ndim() > 0 && (input.strides().back() == 1 || input.shape(-1) == 1);
      if ((strided_ >> i & 1) != 0 && rows) {
        strides.back().assign(input.strides().begin(), input.strides().end());
        in.push_back(input.data<char>());
        continue;
      }
      if (input.flags().row_contiguous) {
        in.push_back(input.data<char>());
        continue;
      }
      mx::array packed(input.shape(), input.dtype(), nullptr, {});
      packed.set_data(mx::allocator::malloc(packed.nbytes()));
      packs.emplace_back(input, packed.data<char>());
      in.push_back(packed.data<char>());
      encoder.add_temporary(packed);
    }
    std::vector<std::pair<const void*, size_t>> seeds(outputs.size(), {nullptr, 0});
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& output = outputs[i];
      const int source = in_place_[i];
      if (source >= 0 && inputs[source].is_donatable() &&
          inputs[source].flags().row_contiguous) {
        output.copy_shared_buffer(inputs[source]);
      } else {
        output.set_data(mx::allocator::malloc(output.nbytes()));
        if (source >= 0) {
          seeds[i] = {in[source], output.nbytes()};
        }
      }
      out.push_back(output.data<char>());
    }
    encoder.dispatch([run = run_,
                      params = params_,
                      in = std::move(in),
                      strides = std::move(strides),
                      out = std::move(out),
                      packs = std::move(packs),
                      seeds = std::move(seeds)]() {
      for (const auto& [from, to] : packs) {
        pack(from, to);
      }
      for (size_t i = 0; i < seeds.size(); ++i) {
        if (seeds[i].first != nullptr) {
          std::memcpy(out[i], seeds[i].first, seeds[i].second);
        }
      }
      std::vector<const int64_t*> steps;
      for (const auto& stride : strides) {
        steps.push_back(stride.empty() ? nullptr : stride.data());
      }
      run(params.get(), in.data(), steps.data(), out.data());
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the host's own kernels run on the CPU");
  }

  const char* name() const override {
    return "MlxhostKernel";
  }

 private:
  Run run_;
  std::shared_ptr<void> params_;
  std::vector<int> in_place_;
  // Bit i: input i may be strided, as long as its last axis is not.
  uint64_t strided_;
};

} // namespace

extern "C" {

struct mlxhost_output {
  const int* shape;
  size_t rank;
  int dtype;
  // The input whose buffer it takes over (copied first where others still use it), or -1.
  int in_place;
};

// The stream that a new primitive runs on: the default CPU stream of this thread.
// Writes one handle per output, each owned by the caller. `drop` frees `params` in every case.
// Returns 0, or 1 when MLX threw.
int mlxhost_primitive(
    void** handles,
    const mlxhost_output* outputs,
    size_t output_count,
    void* const* inputs,
    size_t input_count,
    uint64_t strided,
    Run run,
    void* params,
    Drop drop) {
  // The order of mlx-c's dtype enumeration.
  static const mx::Dtype dtypes[] = {
      mx::bool_, mx::uint8, mx::uint16, mx::uint32, mx::uint64, mx::int8, mx::int16,
      mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};
  std::vector<mx::array*> made;
  try {
    std::vector<mx::array> in;
    for (size_t i = 0; i < input_count; ++i) {
      in.push_back(*static_cast<mx::array*>(inputs[i]));
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> types;
    std::vector<int> in_place;
    for (size_t i = 0; i < output_count; ++i) {
      shapes.emplace_back(outputs[i].shape, outputs[i].shape + outputs[i].rank);
      types.push_back(dtypes[outputs[i].dtype]);
      in_place.push_back(outputs[i].in_place);
    }
    auto stream = mx::default_stream(mx::Device(mx::Device::cpu));
    auto kernel = std::make_shared<Kernel>(stream, run, params, drop, std::move(in_place), strided);
    params = nullptr;
    auto arrays = mx::array::make_arrays(std::move(shapes), types, kernel, in);
    for (auto& array : arrays) {
      made.push_back(new mx::array(std::move(array)));
    }
  } catch (...) {
    for (auto* array : made) {
      delete array;
    }
    if (params != nullptr) {
      drop(params);
    }
    return 1;
  }
  for (size_t i = 0; i < output_count; ++i) {
    handles[i] = made[i];
  }
  return 0;
}
}
