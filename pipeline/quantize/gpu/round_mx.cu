// Round to an OCP microscaling format and back, in one pass: `rounding.round_mx`. One thread rounds a group of 32.
//
// numbers, rounded [groups, 32], contiguous, 16 bytes aligned, of bfloat16 (DIGITS 7) or float32 (DIGITS 23).
// Defined before: BITS (unsigned short or unsigned int), DIGITS (of the mantissa), CARRY (what is added to the largest
// magnitude, so that its exponent is one more where the scale's is), and of the elements MANTISSA, LEAST (exponent of
// the smallest normal number), MOST (the largest exponent) and LARGEST (the largest value).

#define GROUP 32
#define WORDS (GROUP * sizeof(BITS) / sizeof(uint4))

extern "C" __global__ void round_mx(const uint4* numbers, uint4* rounded, int groups)
{
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= groups)
        return;
    union {
        uint4 words[WORDS];
        BITS bits[GROUP];
    } values;
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
        values.words[word] = numbers[group * (long long)WORDS + word];

    const int magnitude = (1u << (8 * sizeof(BITS) - 1)) - 1;
    int largest = 0;
#pragma unroll
    for (int place = 0; place < GROUP; ++place) {
        const int bits = values.bits[place] & magnitude;
        largest = bits > largest ? bits : largest;
    }
    int field = ((largest + CARRY) >> DIGITS) - MOST;
    field = field < 1 ? 1 : field;
    const int normal = field + LEAST < 1 ? 1 : field + LEAST;
    const float limit = LARGEST * __int_as_float(field << 23);

#pragma unroll
    for (int place = 0; place < GROUP; ++place) {
        const int bits = (int)values.bits[place] << (23 - DIGITS);
        const int exponent = bits & 0x7F800000;
        const int power = exponent > normal << 23 ? exponent : normal << 23;
        const float shift = 1.5f * (1 << (23 - MANTISSA)) * __int_as_float(power);
        float number = (__int_as_float(bits) + shift) - shift;
        number = number < -limit ? -limit : number > limit ? limit : number;
        values.bits[place] = (BITS)((unsigned)__float_as_int(number) >> (23 - DIGITS));
    }
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
        rounded[group * (long long)WORDS + word] = values.words[word];
}
