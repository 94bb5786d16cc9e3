// out = silu(gate) * up, and its backward, over n floats.
#include <cmath>
#include <cstdint>

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

extern "C" void swiglu(const float *gate, const float *up, float *out, int64_t n) {
    // begin answer: (void)gate; (void)up; (void)out; (void)n;
    for (int64_t i = 0; i < n; i++) {
        out[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
    // end answer
}

extern "C" void swiglu_backward(const float *grad, const float *gate, const float *up,
                                float *grad_gate, float *grad_up, int64_t n) {
    // begin answer: (void)grad; (void)gate; (void)up; (void)grad_gate; (void)grad_up; (void)n;
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid(gate[i]);
        grad_gate[i] = grad[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
        grad_up[i] = grad[i] * gate[i] * s;
    }
    // end answer
}
