"""Training: one loop for pretraining and fine-tuning, every parallelism, exact resume.

data/         documents -> packed samples, a pure function of the sample number
step, loop    samples -> loss -> gradients -> weights
parallel/     who computes what
checkpoint/   what a restart needs
"""
