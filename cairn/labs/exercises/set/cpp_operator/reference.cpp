// silu(gate) * up and its backward as operators of PyTorch: a schema, a kernel for CPUs, no Python in between.
#include <cmath>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Contiguous float32 of one length, or an error that says so.
static int64_t checked(const Tensor &gate, const Tensor &up) {
    // begin answer: (void)up; return gate.numel();
    STD_TORCH_CHECK(gate.numel() == up.numel(), "gate and up differ in length");
    STD_TORCH_CHECK(gate.is_contiguous() && up.is_contiguous(), "gate and up have to be contiguous");
    return gate.numel();
    // end answer
}

Tensor swiglu(const Tensor &gate, const Tensor &up) {
    int64_t n = checked(gate, up);
    Tensor result = torch::stable::empty_like(gate);
    const float *g = gate.const_data_ptr<float>(), *u = up.const_data_ptr<float>();
    float *out = result.mutable_data_ptr<float>();
    // begin answer: (void)n; (void)g; (void)u; (void)out;
    for (int64_t i = 0; i < n; i++) {
        out[i] = g[i] * sigmoid(g[i]) * u[i];
    }
    // end answer
    return result;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor &grad, const Tensor &gate, const Tensor &up) {
    int64_t n = checked(gate, up);
    Tensor grad_gate = torch::stable::empty_like(gate), grad_up = torch::stable::empty_like(up);
    const float *d = grad.const_data_ptr<float>();
    const float *g = gate.const_data_ptr<float>(), *u = up.const_data_ptr<float>();
    float *dg = grad_gate.mutable_data_ptr<float>(), *du = grad_up.mutable_data_ptr<float>();
    // begin answer: (void)n; (void)d; (void)g; (void)u; (void)dg; (void)du;
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid(g[i]);
        dg[i] = d[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
        du[i] = d[i] * g[i] * s;
    }
    // end answer
    return {grad_gate, grad_up};
}

STABLE_TORCH_LIBRARY(cairn_exercise, m) {
    // begin answer: (void)m;
    m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
    m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
    // end answer
}

STABLE_TORCH_LIBRARY_IMPL(cairn_exercise, CPU, m) {
    // begin answer: (void)m;
    m.impl("swiglu", TORCH_BOX(&swiglu));
    m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
    // end answer
}
