// Keys and values in 8 bits: rounded by the kernel, judged against the originals, and read by the kernel that decodes.
#pragma once

#include "dispatch.h"
#include "sanitize_oracle.h"

namespace saccade::sanitize {

// The rows of a tensor in memory that ends with the last scale. `tensor` becomes what they stand for, in float32.
struct RoundedRows {
    std::vector<int8_t> data;
    Input input;
    bool near = true;  // whether every entry is within half a scale of the original, and rows with others are NaN

    RoundedRows(Random& random, Tensor& tensor) {
        const int64_t *shape = tensor.shape, width = shape[3], size = width + 4;
        data.assign(shape[0] * shape[1] * shape[2] * size, 77);
        RoundRows call;
        call.batch = shape[0], call.heads = shape[1], call.rows = shape[2], call.width = width, call.type = tensor.type;
        call.x = tensor.input(), call.out = data.data();
        kernels().round_rows(call);
        input = {data.data(), shape[1] * shape[2] * size, shape[2] * size, size};
        Tensor read(random, Type::f32, shape[0], shape[1], shape[2], width);
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t h = 0; h < shape[1]; h++)
                for (int64_t i = 0; i < shape[2]; i++) {
                    const int8_t* row = &data[b * input.batch + h * input.head + i * input.row];
                    float scale;
                    std::memcpy(&scale, row + width, sizeof scale);
                    bool finite = true;
                    for (int64_t x = 0; x < width; x++) {
                        const double was = tensor.at(b, h, i, x), is = double(row[x]) * scale;
                        read.put(b, h, i, x, is);
                        finite &= std::isfinite(was);
                        near &= !std::isfinite(was) || std::isnan(scale) || std::fabs(is - was) <= scale * (0.5 + 127 * 6e-8);
                    }
                    near &= finite != std::isnan(scale);
                }
        tensor = std::move(read);
    }
};

}  // namespace saccade::sanitize
