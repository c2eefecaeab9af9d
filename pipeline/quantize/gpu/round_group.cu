// Round a group of COUNT columns of weights, each compensating the errors of the columns before it, and choose each
// row's scale: `columns._round_group` in one launch. One thread rounds one row; blockIdx.y is the number of the weight.
//
// columns, target, rounded [weights, COUNT, rows]; reach [weights, COUNT, COUNT]; price [weights, COUNT];
// scales [weights, candidates, rows]; chosen [weights, 1, rows]. All float32 and contiguous.
// Defined before: COUNT, MANTISSA, LEAST (exponent of the smallest normal number), LOWEST and LIMIT (the range).

#define UNROLLED (COUNT <= 32 ? COUNT : 4) // what is unrolled whole stays in registers, and takes long to compile

__device__ float nearest(float number)
{
    const int exponent = __float_as_int(number) & 0x7F800000;
    const int least = (LEAST + 127) << 23;
    const float shift = 1.5f * (1 << (23 - MANTISSA)) * __int_as_float(exponent > least ? exponent : least);
    const float rounded = (number + shift) - shift;
    return rounded < LOWEST ? LOWEST : rounded > LIMIT ? LIMIT : rounded;
}

extern "C" __global__ void round_group(const float* columns, const float* target, const float* reach,
                                       const float* price, const float* scales, float* rounded, float* chosen,
                                       int rows, int candidates)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    const long long weight = blockIdx.y;
    const long long stride = rows;
    columns += weight * COUNT * stride + row;
    target += weight * COUNT * stride + row;
    rounded += weight * COUNT * stride + row;
    scales += weight * candidates * stride + row;
    reach += weight * COUNT * COUNT;
    price += weight * COUNT;

    float values[COUNT], errors[COUNT];
    float least_cost = 0, best_scale = 0;
    for (int candidate = 0; candidate < candidates; ++candidate) {
        const float scale = scales[candidate * stride];
        float cost = 0;
#pragma unroll UNROLLED
        for (int column = 0; column < COUNT; ++column) {
            float due = target[column * stride] / scale;
#pragma unroll UNROLLED
            for (int earlier = 0; earlier < column; ++earlier)
                due += reach[column * COUNT + earlier] * errors[earlier];
            values[column] = nearest(due);
            errors[column] = columns[column * stride] / scale - values[column];
            const float lost = due - values[column];
            cost += price[column] * lost * lost;
        }
        cost *= scale * scale;
        if (candidate == 0 || cost < least_cost) {
            least_cost = cost;
            best_scale = scale;
            for (int column = 0; column < COUNT; ++column)
                rounded[column * stride] = values[column];
        }
    }
    chosen[weight * stride + row] = best_scale;
}
