"""What is done with kernels besides running them: find, compile, lint, explain, measure, tune, show."""
